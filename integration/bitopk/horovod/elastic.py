# SPDX-License-Identifier: Apache-2.0
"""Elastic Horovod: the memories survive when workers die, leave and join.

Use `TorchState` in place of ``hvd.elastic.TorchState``; nothing else changes::

    state = bitopk.horovod.elastic.TorchState(model=model, optimizer=optimizer, epoch=0)


    @hvd.elastic.run
    def train(state): ...

A commit keeps a copy of this rank's worker memory and of its share of the server memory, and sends
that share to the next rank. A reset only marks the engine; the first step after it connects the
ranks of the new world and hands the memories out again: a worker memory stays with its worker
(times N'/N for averages, so that the sum of m_i / N keeps its parts), a new worker starts at zero,
and the server memory is put together from the shares and the copies. The worker memory of a dead
worker is lost; of the server memory nothing is, unless two neighbours died at once.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import horovod.torch as hvd
import numpy as np

from bitopk import checkpoint
from bitopk._packing import pack, unpack
from bitopk.horovod._errors import as_horovod_errors
from bitopk.torch._session import Session

__all__ = ["TorchState"]

logger = logging.getLogger("bitopk")

_KEEP = 2  # a rank may fail in a commit that others finish, and is then asked for the one before


class TorchState(hvd.elastic.TorchState):
    """``hvd.elastic.TorchState`` that also keeps the memories of bitopk.

    Parameters
    ----------
    model, optimizer, **kwargs
        As for Horovod. The memories are found through the optimizers among them, whichever of the
        three ways attached bitopk.

    Raises
    ------
    ValueError
        If no optimizer among the arguments has bitopk attached.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        sessions = [
            session
            for value in (optimizer, *kwargs.values())
            if (session := _session_of(value)) is not None
        ]
        if not sessions:
            raise ValueError(
                "bitopk.horovod.elastic.TorchState: none of the arguments is an optimizer with "
                "bitopk attached; use hvd.elastic.TorchState"
            )
        self._bitopk_memories = [_Memories(session) for session in sessions]
        super().__init__(model=model, optimizer=optimizer, **kwargs)

    def save(self) -> None:
        """Keep copies of everything; collective, as ``commit`` is."""
        # First the memories: a rank that cannot finish this goes back to the commit before, whole.
        for memories in self._bitopk_memories:
            memories.save()
        super().save()
        for memories in self._bitopk_memories:
            memories.mark_finished()

    def restore(self) -> None:
        """Go back to the last commit."""
        super().restore()
        for memories in self._bitopk_memories:
            memories.restore()

    def sync(self) -> None:
        """Make all ranks equal; the memories follow when the first step connects."""
        super().sync()
        for memories in self._bitopk_memories:
            memories.reset()

    def reset(self) -> None:
        """Mark the engines: after a reset their connections are of another world."""
        super().reset()
        for memories in self._bitopk_memories:
            memories.reset()


def _session_of(value: Any) -> Session | None:
    for owner in (value, getattr(value, "_compression", None)):
        session = getattr(getattr(owner, "bitopk", None), "session", None)
        if isinstance(session, Session):
            return session
    return None


@dataclass
class _Snapshot:
    """One commit, or the live state at a reset."""

    commit: int
    part: dict[str, Any] | None  # of `Session.state_dict`; None before the first step
    neighbour: int = -1  # rank whose share of the server memory is here too
    neighbour_share: dict[str, np.ndarray] = field(default_factory=dict)
    finished: bool = False  # the model was saved with it
    live: bool = False  # `part` is newer than the commit, and than the neighbour's share


class _Memories:
    """The memories of one session over the life of an elastic job."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._snapshots = [_Snapshot(0, None, finished=True)]  # newest last
        self._restored = False
        session.on_connect = self._hand_out

    def save(self) -> None:
        """Copy this rank's part and exchange shares with the neighbours."""
        number = self._snapshots[-1].commit + 1
        if not self._session.connected:
            self._keep(replace(self._snapshots[-1], commit=number, finished=False))
            return
        with as_horovod_errors():
            self._session.commit()
            part = checkpoint.normalised(self._session.state_dict())
            snapshot = _Snapshot(number, part)
            self._keep(snapshot)
            self._send_share(snapshot, self._session.all_to_all)

    def mark_finished(self) -> None:
        """Note that the model was saved too: from here on this commit can be restored."""
        self._snapshots[-1].finished = True

    def restore(self) -> None:
        """Use the last commit from here on."""
        self._restored = True

    def reset(self) -> None:
        """Let the engine go; what it holds beyond the last commit is kept unless `restore` came."""
        session = self._session
        if not session.connected:
            return
        if not self._restored:
            part = checkpoint.normalised(session.state_dict())
            self._snapshots[-1] = replace(self._snapshots[-1], part=part, live=True)
        session.disconnect()

    def _keep(self, snapshot: _Snapshot) -> None:
        self._snapshots = [*self._snapshots, snapshot][-_KEEP:]

    @staticmethod
    def _send_share(snapshot: _Snapshot, all_to_all: Callable[[list[bytes]], list[bytes]]) -> None:
        """Send this rank's share of the server memory to the next rank; collective."""
        part = snapshot.part
        assert part is not None
        rank, size = part["rank"], part["world_size"]
        if size == 1:
            return
        share = {
            name: array
            for name, array in part["server_memory"].items()
            if part["server_layout"][name][1] > 1  # what every rank has needs no copy
        }
        parts = [b""] * size
        parts[(rank + 1) % size] = pack({"rank": rank}, share)
        received = all_to_all(parts)
        header, snapshot.neighbour_share = unpack(received[(rank - 1) % size])
        snapshot.neighbour = int(header["rank"])

    # --- after a reset -------------------------------------------------------------------------

    def _hand_out(self, session: Session) -> bool:
        """Load what the old world left, if anything; collective over the ranks of the new one."""
        engine = session.engine.engine
        self._restored = False
        finished = [snapshot.commit for snapshot in self._snapshots if snapshot.finished]
        header = {
            "commits": finished if any(s.part is not None for s in self._snapshots) else [],
        }
        headers = [json.loads(text) for text in engine.all_gather(json.dumps(header).encode())]
        known = [header for header in headers if header["commits"]]
        if not known:
            return False  # a new job
        # Rank 0 is a survivor, and Horovod's sync gives its model to all.
        wanted = known[0]["commits"][-1]
        snapshot = self._snapshot(wanted)
        part = None if snapshot is None else snapshot.part
        owner = {"has": part is not None}
        if part is not None:
            owner.update(rank=part["rank"], size=part["world_size"], neighbour=snapshot.neighbour)
        owners = [json.loads(text) for text in engine.all_gather(json.dumps(owner).encode())]
        if any(each["has"] for each in owners):
            common, server = self._gather_server(engine, snapshot, owners)
            self._load(session, common, server, part, owners)
        # From here on nothing of the old world counts: another reset may come before a commit.
        new = _Snapshot(wanted, checkpoint.normalised(session.engine.save_state()), finished=True)
        self._send_share(new, engine.all_to_all)
        self._snapshots = [new]
        return any(each["has"] for each in owners)

    def _snapshot(self, commit: int) -> _Snapshot | None:
        usable = [snapshot for snapshot in self._snapshots if snapshot.part is not None]
        exact = [snapshot for snapshot in usable if snapshot.commit == commit]
        if exact:
            return exact[-1]
        return usable[-1] if usable else None

    def _gather_server(
        self, engine: Any, snapshot: _Snapshot | None, owners: list[dict[str, Any]]
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Give every rank the common fields of the parts and the whole server memory."""
        me = engine.rank
        reference = next(r for r, each in enumerate(owners) if each["has"])
        old_size = owners[reference]["size"]
        # A rank whose copies are of another world has nothing that fits.
        owners = [
            each if each.get("size") == old_size else {"has": False, "rank": -1, "neighbour": -1}
            for each in owners
        ]
        providers = {share: _provider(owners, share) for share in range(old_size)}
        lost = [share for share, provider in providers.items() if provider is None]
        shares: dict[str, np.ndarray] = {}  # "share number/tensor name"
        fields: dict[str, Any] = {}
        if owners[me]["has"] and snapshot is not None and snapshot.part is not None:
            part = snapshot.part
            if me == reference:
                fields = {key: part[key] for key in _COMMON}
            for share, provider in providers.items():
                if provider != me:
                    continue
                own = part["rank"] == share
                arrays = part["server_memory"] if own else snapshot.neighbour_share
                for name, array in arrays.items():
                    if part["server_layout"][name][1] > 1:
                        shares[f"{share}/{name}"] = array
            if me == reference:  # what every rank has
                for name, array in part["server_memory"].items():
                    if part["server_layout"][name][1] == 1:
                        shares[f"{part['rank']}/{name}"] = array
        received = [unpack(bytes_) for bytes_ in engine.all_gather(pack(fields, shares))]
        common = received[reference][0]
        by_share: dict[int, dict[str, np.ndarray]] = {}
        for _, arrays in received:
            for key, array in arrays.items():
                share_text, _, name = key.partition("/")
                by_share.setdefault(int(share_text), {})[name] = array
        sizes = checkpoint.tensor_sizes(common["tensors"])
        server = checkpoint.whole_server_memory(by_share, common["server_layout"], sizes)
        sharded = any(layout[1] > 1 for layout in common["server_layout"].values())
        copied = [
            share
            for share, rank in providers.items()
            if rank is not None and owners[rank]["rank"] != share
        ]
        if copied and sharded and snapshot is not None and snapshot.live and engine.rank == 0:
            logger.warning(
                "elastic: the server memory of old ranks %s is that of the last commit: they left "
                "without another",
                copied,
            )
        if lost and sharded and engine.rank == 0:
            logger.warning(
                "elastic: the server memory of old ranks %s is lost (they and their next ranks "
                "are gone); it starts at zero there",
                lost,
            )
        return common, server

    def _load(
        self,
        session: Session,
        common: dict[str, Any],
        server: dict[str, np.ndarray],
        part: dict[str, Any] | None,
        owners: list[dict[str, Any]],
    ) -> None:
        rank, size = session.engine.engine.rank, session.engine.engine.size
        old_size = next(each["size"] for each in owners if each["has"])
        factor, server_factor = checkpoint.resharding_factors(common["op"], old_size, size)
        worker = {} if part is None else part["worker_memory"]
        session.engine.load_state(
            {
                **common,
                "rank": rank,
                "world_size": size,
                "worker_memory": {name: array * factor for name, array in worker.items()},
                "server_memory": {name: array * server_factor for name, array in server.items()},
                "whole_server_memory": True,
            }
        )
        if rank == 0:
            gone = sorted(set(range(old_size)) - {each["rank"] for each in owners if each["has"]})
            logger.info(
                "elastic: %d ranks, were %d; worker memories of old ranks %s are lost",
                size,
                old_size,
                gone or "none",
            )


_COMMON = (
    "format",
    "op",
    "tensors",
    "settings",
    "density",
    "density_down",
    "scale",
    "tensor_scales",
    "schedule_step",
    "server_layout",
)


def _provider(owners: list[dict[str, Any]], share: int) -> int | None:
    """Return the new rank that has a share of the old server memory: its owner, else the copy."""
    for key in ("rank", "neighbour"):
        for rank, each in enumerate(owners):
            if each["has"] and each[key] == share:
                return rank
    return None
