# SPDX-License-Identifier: Apache-2.0
"""`Reducer`: compressed reduction of any tensors, for training loops of any kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch

from bitopk import _core, checkpoint
from bitopk._rank import check_step_options
from bitopk.errors import Error, InvalidArgumentError
from bitopk.schedules import Schedule
from bitopk.stats import Stats
from bitopk.torch._connect import check_transport, connect_ranks
from bitopk.torch._session import Scale, Session, as_compression

__all__ = ["Reducer", "Work"]


class Work:
    """The reduction of one tensor, under way."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        self._lane: _Lane | None = None  # None while the set of tensors is open
        self._done = False
        self._error: Exception | None = None

    def is_completed(self) -> bool:
        """Tell, without waiting, whether the result is there, or the step has failed."""
        if not self._done and self._lane is not None and self._lane.session.is_completed():
            self._reducer._end_step(self._lane)  # brings results to where the tensors are
        return self._done

    def wait(self) -> None:
        """Wait for the result, which then stands in the tensor; ends the step it belongs to.

        Raises
        ------
        CommunicationError, WireFormatError
            If the step failed; the memories are as before it and the reducer is of no more use.
        NonFiniteGradientError
            With ``nonfinite="raise"``; the memories are as before the step.
        """
        if not self._done:
            self._reducer._end_step(self._lane)
        if self._error is not None:
            raise self._error


class Reducer:
    """Sums or means of tensors over ranks, compressed both ways, with memories by key.

    What is reduced together forms a step: the calls before the first `Work.wait` are the first one
    and fix a set of keys, the same on all ranks. Later calls with these keys belong to the set's
    next step, in any order. It ends when one of its works is waited for, when one of its keys comes
    again, or with a call for another set; keys that a rank left out count as zeros. Keys that come
    after the first wait form a set of their own. So a loop may wait after every call, which makes
    each key a step of its own, or after all of them, which is faster: messages then overlap.

    All ranks make the same calls in the same order, except that within a set that is known any
    order will do. Not thread-safe. Connections are made when the first step ends.

    Parameters
    ----------
    spec_or_density : bitopk.Compression or float
        What to compress, and how. Equal on all ranks.
    process_group : ProcessGroup, optional
        Whose ranks take part. By default those of the default group, or, where torch.distributed is
        not initialised, of whatever launched the ranks, as for `bitopk.init`.
    scale : None, float or callable
        Factor by which tensors are multiplied relative to the memories' own unit; see
        `bitopk.ddp.TopKState`.
    schedule : callable, optional
        Density as a function of the step; see `bitopk.schedules`.
    timeout : float, optional
        Seconds that a wait for a rank may last; half an hour by default.
    interface : str, optional
        Network interface; see `bitopk.hosts.connect_through`.
    transport : {"gloo", "torch"}
        Connections of our own, or the collectives of torch.distributed.

    Examples
    --------
    In a process of ``bitopk launch``::

        with bitopk.torch.Reducer(0.01) as reducer:
            works = [reducer.all_reduce_(p.grad, name) for name, p in model.named_parameters()]
            for work in works:
                work.wait()
            optimizer.step()
    """

    def __init__(
        self,
        spec_or_density: Any,
        *,
        process_group: Any = None,
        scale: Scale = None,
        schedule: Schedule | None = None,
        timeout: float | None = None,
        interface: str | None = None,
        transport: str = "gloo",
    ) -> None:
        check_transport(transport, "Reducer")
        self.spec = as_compression(spec_or_density, "Reducer")
        self.process_group = process_group
        self._scale = scale
        self._schedule = schedule
        self._options = {"transport": transport, "timeout": timeout, "interface": interface}
        self._lanes: list[_Lane] = []
        self._lane_of: dict[str, _Lane] = {}
        self._open: dict[str, tuple[torch.Tensor, Work]] = {}  # the set that is being formed
        self._open_op = "average"
        self._active: _Lane | None = None  # the only one that may have a step under way
        self._states: list[Any] = []  # loaded before their sets were known
        self._closed = False

    def all_reduce_(self, tensor: torch.Tensor, key: str, op: str = "average") -> Work:
        """Start to reduce a tensor in place.

        Parameters
        ----------
        tensor : Tensor
            Dense, of any shape; float32, float16 or bfloat16 are compressed, float64, int32 and
            int64 travel dense. Must stay alive and unchanged until the work is done.
        key : str
            Name of the tensor: what its memory belongs to, and what `rules` match.
        op : {"average", "sum"}
            The same for all keys of a set, always.

        Returns
        -------
        Work

        Raises
        ------
        InvalidArgumentError
            If an argument is not as described, or not as in the steps before.
        """
        if self._closed:
            raise Error("the reducer was closed")
        self._check_arguments(tensor, key, op)
        lane = self._lane_of.get(key)
        if lane is None:
            return self._add_to_open(tensor, key, op)
        self._end_open()
        if self._active is not lane:
            self._end_active()
        if op != lane.session.op:
            raise InvalidArgumentError(
                f"all_reduce_: op of {key!r} was {lane.session.op!r} in the first step; got {op!r}"
            )
        if lane.session.is_submitted(key):
            self._end_active()
        work = Work(self)
        lane.submit(key, tensor, work)
        self._active = lane
        return work

    def _check_arguments(self, tensor: Any, key: Any, op: Any) -> None:
        if not isinstance(key, str) or not key:
            raise InvalidArgumentError(f"all_reduce_: key must be a non-empty str; got {key!r}")
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            kind = tensor.layout if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise InvalidArgumentError(f"all_reduce_: {key!r} must be a dense Tensor; got {kind}")
        check_step_options(op, 1.0)

    def _add_to_open(self, tensor: torch.Tensor, key: str, op: str) -> Work:
        self._end_active()
        if key in self._open or (self._open and op != self._open_op):
            self._end_open()
            if key in self._lane_of:
                return self.all_reduce_(tensor, key, op)
        work = Work(self)
        self._open[key] = (tensor, work)
        self._open_op = op
        return work

    # However a step ends, its works know how.

    def _end_step(self, lane: _Lane | None) -> None:
        if lane is None:
            self._end_open()
        elif lane is self._active:
            self._end_active()

    def _end_open(self) -> None:
        if self._open:
            self._active = self._form()
            self._end_active()

    def _end_active(self) -> None:
        if self._active is not None:
            self._active.finish()
        self._active = None

    def _form(self) -> _Lane:
        """Make a lane of the calls that wait for one, and start its first step."""
        calls, self._open = self._open, {}
        names = sorted(calls, key=lambda name: name.encode())
        session = Session(
            self.spec,
            [(name, tuple(calls[name][0].shape), calls[name][0].dtype) for name in names],
            self._connect,
            op=self._open_op,
            scale=self._scale,
            schedule=self._schedule,
        )
        lane = _Lane(session)
        try:
            self._load_kept_state(lane)
            for name in names:
                lane.submit(name, *calls[name])
        except Exception as error:  # no connection, or a state that does not fit
            for _, work in calls.values():
                work._done, work._error = True, error
            raise
        self._lanes.append(lane)
        self._lane_of.update(dict.fromkeys(names, lane))
        return lane

    def _connect(self, config: _core.Config) -> tuple[_core.Engine, str]:
        for lane in self._lanes:
            if lane.session.connected:  # its connections serve all
                return lane.session.engine.engine.sibling(config), "the same connections"
        return connect_ranks(config, self.process_group, **self._options)

    # --- memories ------------------------------------------------------------------------------

    def _finish_all(self) -> None:
        self._end_open()
        self._end_active()

    def commit(self) -> None:
        """Make the last step of each set final. The set's next step does so too."""
        self._finish_all()
        for lane in self._lanes:
            lane.session.commit()

    def rollback(self) -> None:
        """Drop the last step of each set, unless it is final. All ranks must do the same.

        The memories are then as if it had never been; results are not taken back.
        """
        self._finish_all()
        for lane in self._lanes:
            lane.session.rollback()

    def set_density(self, density: float, density_down: float | None = None) -> None:
        """Use other densities from the next step on, on all ranks; ends a schedule."""
        for lane in self._lanes:
            lane.session.set_density(density, density_down)
        self._schedule = lambda step: (density, density if density_down is None else density_down)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the state of all sets; see `bitopk.checkpoint`."""
        self._finish_all()
        return {
            "format": checkpoint.FORMAT,
            # Sets that were loaded and have not come up again are kept.
            "sets": [*(lane.session.state_dict() for lane in self._lanes), *self._states],
        }

    def load_state_dict(self, state: Any) -> None:
        """Go on from a saved state; all ranks must do so.

        The states of sets that have made no step yet are kept until their first one.

        Raises
        ------
        InvalidArgumentError
            If the state is damaged, or of other keys than a set that is known.
        """
        if not isinstance(state, Mapping) or not isinstance(state.get("sets"), Sequence):
            raise InvalidArgumentError(
                "load_state_dict: expected what Reducer.state_dict gave: a dict with 'sets'"
            )
        for each in state["sets"]:
            checkpoint.check(each)
        self._finish_all()
        self._states = list(state["sets"])
        for lane in self._lanes:
            self._load_kept_state(lane)
        known = [name for name in self._lane_of if any(name in _names(s) for s in self._states)]
        if known:
            self._states = []
            raise InvalidArgumentError(
                f"load_state_dict: the state reduces {known[0]!r} together with other keys than "
                f"this reducer does"
            )

    def _load_kept_state(self, lane: _Lane) -> None:
        names = set(lane.session.names)
        for state in self._states:
            if _names(state) == names:
                self._states.remove(state)
                lane.session.load_state_dict(state)
                return

    def all_to_all(self, parts: Sequence[bytes]) -> list[bytes]:
        """Send ``parts[r]`` to rank r and return what each rank sent here. A collective call."""
        self._finish_all()
        if not self._lanes:
            raise Error("all_to_all: the reducer has made no step yet, so it has no connections")
        return self._lanes[0].session.all_to_all(parts)

    def worker_memory(self) -> dict[str, Any]:
        """Return a copy of this rank's worker memory by key, as NumPy arrays."""
        self._finish_all()
        return {k: m for lane in self._lanes for k, m in lane.session.worker_memory().items()}

    def server_memory(self) -> dict[str, Any]:
        """Return a copy of the whole server memory by key. A collective call."""
        self._finish_all()
        return {k: m for lane in self._lanes for k, m in lane.session.server_memory().items()}

    def stats(self) -> Stats:
        """Return what this rank did so far, all sets together; contractions are the first set's."""
        self._finish_all()
        if not self._lanes:
            raise Error("stats: the reducer has made no step yet")
        first, *others = [lane.session.stats() for lane in self._lanes]
        total = first  # bytes are those of the connections, which all sets share
        for each in others:
            total = replace(
                total,
                steps=total.steps + each.steps,
                dropped_steps=total.dropped_steps + each.dropped_steps,
                entries_up=total.entries_up + each.entries_up,
                entries_down=total.entries_down + each.entries_down,
                dense_bytes=total.dense_bytes + each.dense_bytes,
                residual_norm=(total.residual_norm**2 + each.residual_norm**2) ** 0.5,
                seconds={k: v + each.seconds[k] for k, v in total.seconds.items()},
            )
        ratio = total.dense_bytes / total.bytes_sent if total.bytes_sent else 0.0
        return replace(total, compression_ratio=ratio) if others else total

    def close(self) -> None:
        """Disconnect. A step under way is aborted."""
        for lane in reversed(self._lanes):
            lane.session.disconnect()
        self._lanes, self._lane_of, self._open, self._active = [], {}, {}, None
        self._closed = True

    def __enter__(self) -> Reducer:
        """Return the reducer itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the reducer."""
        self.close()


class _Lane:
    """One set of keys: an engine of its own over the connections that all sets share."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._works: list[Work] = []

    def submit(self, key: str, tensor: torch.Tensor, work: Work) -> None:
        """Hand over one tensor of the set's step."""
        self.session.submit(key, tensor)
        work._lane = self
        self._works.append(work)

    def finish(self) -> None:
        """End the step; an error stays with the works, whose `wait` raises it."""
        works, self._works = self._works, []
        error: Exception | None = None
        try:
            self.session.finish()
        except Exception as caught:
            error = caught
        except BaseException:  # an interrupt: the step goes on
            self._works = works
            raise
        for work in works:
            work._done, work._error = True, error


def _names(state: Mapping[str, Any]) -> set[str]:
    part = state["parts"][0] if "parts" in state else state
    return set(checkpoint.tensor_sizes(part["tensors"]))
