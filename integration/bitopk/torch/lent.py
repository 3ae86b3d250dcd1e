# SPDX-License-Identifier: Apache-2.0
"""Lends the collectives of torch.distributed to an engine, for jobs whose ranks cannot connect.

By default an engine makes connections of its own, which is faster. Where that is not possible
(ports closed by policy, a backend that only torch knows), `connect` makes an engine whose bytes
travel through a process group: Gloo in host memory, NCCL in device memory, any other backend as far
as it serves uint8 tensors on the CPU.
"""

from __future__ import annotations

import atexit
import datetime
import inspect
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from bitopk import _core
from bitopk.errors import CommunicationError, InvalidArgumentError

__all__ = ["TorchCollectives", "connect", "own_process_group"]

# Polling starts at the shortest pause, for messages that arrive in microseconds, and backs off, so
# that a long wait costs no processor that the gradients need.
_SHORTEST_PAUSE_SECONDS = 50e-6
_LONGEST_PAUSE_SECONDS = 1e-3
_PAUSE_BEHIND_SECONDS = 20e-3

# How much later than this module Gloo gives up. Without that its thread would wait for a peer that
# is gone, and the group's destructor for the thread.
_GLOO_GRACE_SECONDS = 1.0

# What this rank sent last may still be under way when it closes, and closing discards it.
_LINGER_SECONDS = 0.3

# How long the exit of the interpreter waits until a group can be destroyed.
_LONGEST_EXIT_SECONDS = 3.0

# Gloo puts each rank's part where it belongs as it comes. Small messages, every call's first among
# them, are received into memory full of this byte, so that it can be told who has sent nothing.
_NOTHING_YET = 0xA5
_LARGEST_FILLED_BYTES = 64 << 10

# Backends with all_to_all_single; the others gather everything and pick.
_HAVE_ALL_TO_ALL = ("gloo", "nccl", "mpi", "ucc")


def connect(
    config: _core.Config, process_group: Any = None, timeout: float = 60.0
) -> tuple[_core.Engine, str]:
    """Make an engine that communicates through torch.distributed; a collective call.

    Parameters
    ----------
    config : _core.Config
        Settings of the engine.
    process_group : ProcessGroup, optional
        Whose ranks take part; the default group if None. It is not used for anything but to make
        another one; see `own_process_group` for who must call.
    timeout : float
        Seconds that any collective may take.

    Returns
    -------
    engine : _core.Engine
    description : str
        Through what, for a log.
    """
    group = own_process_group(process_group, timeout)
    collectives = TorchCollectives(group)
    engine = _core.lent_engine(collectives.rank, collectives.size, timeout, collectives, config)
    return engine, f"torch.distributed, collectives of {collectives.backend}"


def own_process_group(process_group: Any = None, timeout: float = 60.0) -> Any:
    """Make a process group with the ranks of another one, for one engine alone.

    The engine's thread makes its collectives whenever a message is ready. In a group that the
    program uses too they would pair with the program's own, in an order that differs between ranks.

    It calls ``torch.distributed.new_group``, which is collective over the *default* group: all its
    ranks must call, in the same order. For a subgroup, torch that has ``use_local_synchronization``
    (2.1 and later) wants only the ranks of the subgroup. Older torch waits for the other ranks as
    well; these call ``torch.distributed.new_group(ranks_of_the_subgroup)``.

    Parameters
    ----------
    process_group : ProcessGroup, optional
        The default group if None.
    timeout : float
        Seconds, of the collectives that will be made in it.

    Returns
    -------
    ProcessGroup
        Of the same backend; of Gloo if the given one serves CPU tensors by Gloo.

    Raises
    ------
    CommunicationError
        If some rank does not take part in time.
    """
    group = process_group if process_group is not None else dist.group.WORLD
    if group is None or group == dist.GroupMember.NON_GROUP_MEMBER:
        raise InvalidArgumentError(
            "own_process_group: torch.distributed is not initialised, or this rank is not in the "
            "group"
        )
    ranks = list(dist.get_process_group_ranks(group))
    options: dict[str, Any] = {"backend": _backend_for(group)}
    if options["backend"] == "gloo":
        options["timeout"] = datetime.timedelta(seconds=timeout + _GLOO_GRACE_SECONDS)
    supported = inspect.signature(dist.new_group).parameters
    if len(ranks) < dist.get_world_size() and "use_local_synchronization" in supported:
        options["use_local_synchronization"] = True
    try:
        return dist.new_group(ranks, **options)
    except RuntimeError as error:
        raise CommunicationError(
            f"own_process_group: rank {dist.get_rank()} of {dist.get_world_size()} could not make "
            f"a group of ranks {ranks}: {error}"
        ) from error


def _backend_for(group: Any) -> str:
    # Messages are in host memory, so of several backends the one for the CPU is the right one.
    config = getattr(dist, "get_backend_config", None)
    if config is not None and "cpu:gloo" in str(config(group)):
        return "gloo"
    return str(dist.get_backend(group))


class TorchCollectives:
    """What `_core.lent_engine` asks for, over one process group.

    Used by one thread at a time, apart from `close`. Failed or closed, it makes no more calls.

    Parameters
    ----------
    process_group : ProcessGroup
        From `own_process_group`: nobody else may use it, and `close` destroys it.

    Raises
    ------
    InvalidArgumentError
        If it is the default group, which belongs to the program.
    """

    def __init__(self, process_group: Any) -> None:
        if process_group == dist.group.WORLD:
            raise InvalidArgumentError(
                "TorchCollectives: needs a group of its own; see own_process_group"
            )
        self._group: Any = process_group
        self.rank: int = dist.get_rank(process_group)
        self.size: int = dist.get_world_size(process_group)
        self.backend: str = str(dist.get_backend(process_group))
        self._global_ranks = list(dist.get_process_group_ranks(process_group))
        self._device = torch.device("cpu")
        if self.backend == "nccl":
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._send = _Scratch()
        self._receive = _Scratch()
        # Of the last call, until it is known to be over: the work and the memory that it uses.
        self._pending: tuple[Any, ...] | None = None

    def all_to_all(
        self,
        parts: Sequence[Any],
        sizes: Sequence[int],
        what: str,
        timeout: float,
        aborted: Callable[[], bool],
    ) -> list[memoryview]:
        """Send ``parts[r]`` to rank r.

        Parameters
        ----------
        parts : sequence of bytes-like
            One for each rank.
        sizes : sequence of int
            Bytes that each rank sends to this one.
        what : str
            Begins the text of an error.
        timeout : float
            Seconds for the whole call, whatever the time-out of the group is.
        aborted : callable
            Says that the call should be given up.

        Returns
        -------
        list of memoryview
            What each rank sent; valid until the next call.

        Raises
        ------
        CommunicationError
            If a peer died, the time is up, or the call was aborted. The group is then of no use.
        """
        if self.backend not in _HAVE_ALL_TO_ALL:
            return self._all_to_all_by_gathering(parts, what, timeout, aborted)
        lengths = [len(part) for part in parts]
        send = self._send.filled(parts)
        receive = self._receive.take(sum(sizes))
        fill = receive.numel() <= _LARGEST_FILLED_BYTES
        if fill:
            receive.fill_(_NOTHING_YET)
        source, target = self._on_device(send), self._on_device(receive, copy=False)
        self._run(
            lambda: dist.all_to_all_single(
                target, source, list(sizes), lengths, group=self._group, async_op=True
            ),
            (source, target),
            what,
            timeout,
            aborted,
            lambda: self._silent(receive, sizes) if fill else [],
        )
        if target is not receive:
            receive.copy_(target)
        return _split(receive, sizes)

    def all_gather(
        self,
        part: Any,
        sizes: Sequence[int],
        what: str,
        timeout: float,
        aborted: Callable[[], bool],
    ) -> list[memoryview]:
        """Send `part` to all ranks, whose parts have the given sizes; otherwise as `all_to_all`."""
        if self.backend == "gloo":
            # Gloo's allgather wants parts of one size and passes them on from rank to rank; this
            # sends as many bytes as there are, and a dead rank is seen by all.
            return self.all_to_all([part] * self.size, sizes, what, timeout, aborted)
        return [
            row[:size]
            for row, size in zip(self._gather(part, max(sizes), what, timeout, aborted), sizes)
        ]

    def all_reduce(
        self, values: Any, what: str, timeout: float, aborted: Callable[[], bool]
    ) -> None:
        """Replace an int64 or float32 array by its sum over ranks; errors as of `all_to_all`.

        Parameters
        ----------
        values : memoryview or numpy.ndarray
            int64, added modulo 2**64, or float32.
        """
        array = np.asarray(values)
        # A copy, since the caller's memory must not be written to after a failure.
        tensor = torch.from_numpy(array.copy()).to(self._device)
        self._run(
            lambda: dist.all_reduce(tensor, group=self._group, async_op=True),
            (tensor,),
            what,
            timeout,
            aborted,
        )
        array[...] = tensor.cpu().numpy()

    def close(self) -> None:
        """Destroy the group, which its peers see as the end of this rank; idempotent.

        It happens behind, after a moment for what is under way, and only when Gloo's thread is done
        with the last call: destroying waits for it with the interpreter stopped.
        """
        group, self._group = self._group, None
        if group is None:
            return
        if threading.main_thread().is_alive():
            # The thread holds the memory of a call that is not over, too.
            closer = threading.Thread(
                target=_destroy_when_idle, args=(group, self._pending), daemon=True
            )
            closer.start()
            atexit.register(closer.join, _LONGEST_EXIT_SECONDS)
        elif not _destroy_when_idle(group, self._pending, _LONGEST_EXIT_SECONDS):
            # The interpreter is exiting, and what is held here is not destroyed any more.
            self._abandoned = group

    def _run(
        self,
        start: Callable[[], Any],
        memory: tuple[Any, ...],
        what: str,
        timeout: float,
        aborted: Callable[[], bool],
        silent: Callable[[], list[int]] = list,
    ) -> None:
        begin = time.monotonic()
        who = f"(rank {self.rank} of {self.size})"
        if self._group is None:
            raise CommunicationError(f"{what}: the lent collectives are closed {who}")
        try:
            work = start()
            self._pending = (work, *memory)
            pause = _SHORTEST_PAUSE_SECONDS
            while not work.is_completed():
                waited = time.monotonic() - begin
                if aborted():
                    raise CommunicationError(f"{what}: aborted after {waited:.1f} s {who}")
                if waited > timeout:
                    missing = self._one_of(silent())
                    raise CommunicationError(
                        f"{what}: no answer within {timeout:g} s from {missing} {who}"
                    )
                time.sleep(pause)
                pause = min(1.2 * pause, _LONGEST_PAUSE_SECONDS)
            work.wait()  # raises what the call failed with
        except (RuntimeError, ValueError) as error:
            if isinstance(error, CommunicationError):
                raise
            waited = time.monotonic() - begin
            lost = self._one_of(self._lost())
            text = str(error).strip().splitlines()[0]
            raise CommunicationError(
                f"{what}: lost {lost} after {waited:.1f} s: {text} {who}"
            ) from error
        self._pending = None

    def _one_of(self, ranks: Sequence[int]) -> str:
        # Nobody: it is not known who of the others it is.
        ranks = ranks or [rank for rank in range(self.size) if rank != self.rank]
        if len(ranks) == 1:
            return f"rank {ranks[0]}"
        return f"one or more of ranks {', '.join(map(str, ranks))}"

    def _silent(self, receive: torch.Tensor, sizes: Sequence[int]) -> list[int]:
        # Ranks of which nothing has come.
        parts = receive.numpy()
        ends = np.cumsum(sizes)
        return [
            rank
            for rank, (end, size) in enumerate(zip(ends, sizes))
            if rank != self.rank and size > 0 and np.all(parts[end - size : end] == _NOTHING_YET)
        ]

    def _lost(self) -> list[int]:
        # Gloo says which address is gone, not which rank; but it starts no message to that one.
        lost: list[int] = []
        if self.backend != "gloo":
            return lost
        byte = torch.zeros(1, dtype=torch.uint8)
        for rank, global_rank in enumerate(self._global_ranks):
            if rank == self.rank:
                continue
            try:
                dist.isend(byte, global_rank, group=self._group)
            except (RuntimeError, ValueError):
                lost.append(rank)
        return lost

    def _on_device(self, tensor: torch.Tensor, copy: bool = True) -> torch.Tensor:
        if self._device.type == "cpu":
            return tensor
        return tensor.to(self._device) if copy else torch.empty_like(tensor, device=self._device)

    def _gather(
        self, part: Any, longest: int, what: str, timeout: float, aborted: Callable[[], bool]
    ) -> list[memoryview]:
        # Every rank's part, padded to the longest.
        padded = self._send.filled([part, bytes(longest - len(part))])
        receive = self._receive.take(self.size * longest)
        source, target = self._on_device(padded), self._on_device(receive, copy=False)
        rows = list(target.split(longest))
        self._run(
            lambda: dist.all_gather(rows, source, group=self._group, async_op=True),
            (source, target),
            what,
            timeout,
            aborted,
        )
        if target is not receive:
            receive.copy_(target)
        return _split(receive, [longest] * self.size)

    def _all_to_all_by_gathering(
        self, parts: Sequence[Any], what: str, timeout: float, aborted: Callable[[], bool]
    ) -> list[memoryview]:
        lengths = np.array([len(part) for part in parts], np.int64)
        tables = self._gather(memoryview(lengths).cast("B"), lengths.nbytes, what, timeout, aborted)
        table = np.array([np.frombuffer(row, np.int64) for row in tables])
        longest = int(table.sum(axis=1).max())
        if longest == 0:
            return [memoryview(b"")] * self.size
        rows = self._gather(b"".join(parts), longest, what, timeout, aborted)
        starts = table.cumsum(axis=1) - table
        return [
            row[starts[rank, self.rank] :][: table[rank, self.rank]]
            for rank, row in enumerate(rows)
        ]


class _Scratch:
    """Memory that is kept from call to call, so that a steady state allocates nothing."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> torch.Tensor:
        if self._memory.numel() < num_bytes:
            self._memory = torch.empty(num_bytes, dtype=torch.uint8)
        return self._memory[:num_bytes]

    def filled(self, parts: Sequence[Any]) -> torch.Tensor:
        tensor = self.take(sum(len(part) for part in parts))
        # By NumPy: torch would copy large parts with a team of threads, one for each caller.
        array = tensor.numpy()
        start = 0
        for part in parts:
            if len(part) > 0:
                array[start : start + len(part)] = np.frombuffer(part, np.uint8)
            start += len(part)
        return tensor


def _split(tensor: torch.Tensor, sizes: Sequence[int]) -> list[memoryview]:
    view = memoryview(tensor.numpy())
    parts = []
    start = 0
    for size in sizes:
        parts.append(view[start : start + size])
        start += size
    return parts


def _destroy_when_idle(
    group: Any, pending: tuple[Any, ...] | None, longest: float = float("inf")
) -> bool:
    # False: the last call did not end. Then destroying the group would not end, either.
    end = time.monotonic() + longest
    time.sleep(_LINGER_SECONDS)
    if pending is not None and not pending[0].is_completed() and hasattr(group, "abort"):
        # Of torch 2. It ends NCCL's work, for which NCCL's watchdog would end the process later;
        # to Gloo it does nothing.
        try:
            group.abort()
        except RuntimeError:
            pass
    while pending is not None and not pending[0].is_completed():
        if time.monotonic() > end:
            return False
        time.sleep(_PAUSE_BEHIND_SECONDS)
    try:
        dist.destroy_process_group(group)
    except (AssertionError, RuntimeError, ValueError):
        pass  # the program destroyed all groups before
    return True
