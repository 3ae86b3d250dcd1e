# SPDX-License-Identifier: Apache-2.0
"""`Group`: this process as one rank of a job, and `init`, which makes one."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from bitopk import hosts
from bitopk._rank import RankEngine, Step, check_densities, check_step_options
from bitopk._settings import as_spec, make_config
from bitopk.compression import Compression
from bitopk.errors import Error
from bitopk.stats import Stats

__all__ = ["Group", "Work", "init"]

logger = logging.getLogger("bitopk")


class Work:
    """A step under way."""

    def __init__(self, rank: RankEngine, step: Step) -> None:
        self._rank = rank
        self._step = step

    def is_completed(self) -> bool:
        """Tell, without waiting, whether the step is done, well or not."""
        return self._rank.is_completed(self._step)

    def wait(self, timeout: float | None = None) -> dict[str, Any]:
        """Wait for the step and return its results; every later call gives the same.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait at most. Independent of it, the group's own time-out ends every wait for
            a peer.

        Raises
        ------
        TimeoutError
            After `timeout` seconds; the step goes on.
        CommunicationError, WireFormatError
            If the step failed; the memories are as before it and the group is dead.
        NonFiniteGradientError
            With ``nonfinite="raise"``; the memories are as before the step.
        """
        if not self._rank.finish(self._step, timeout):
            raise TimeoutError(f"wait: the step is not done after {timeout} s")
        return self._step.outcome()


class Group:
    """One rank of a job, made by `init`; a context manager. Not thread-safe."""

    def __init__(self, rank: RankEngine) -> None:
        self._rank_engine: RankEngine | None = rank
        self.rank: int = rank.engine.rank
        self.size: int = rank.engine.size

    @property
    def _rank(self) -> RankEngine:
        if self._rank_engine is None:
            raise Error("the group was closed")
        return self._rank_engine

    def allreduce(
        self,
        grads: Mapping[str, Any],
        op: str = "average",
        scale: float = 1.0,
        *,
        out: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Make one step: compress, exchange, and return what every rank gets.

        Parameters
        ----------
        grads : dict of str to numpy.ndarray or CPU torch.Tensor
            float32 of any shape; float64, int32 and int64 travel dense. Contiguous; used in place
            and not modified. The first step fixes names, shapes and types, which must be equal on
            all ranks; a name left out later counts as zeros.
        op : {"average", "sum"}
            Fixed by the first step. Averages of integers are cut towards zero.
        scale : float
            Factor by which these gradients are multiplied relative to the memories' own unit, such
            as a loss scale or one over the learning rate; finite and positive, equal on all ranks.
        out : dict, optional
            Where the results go; may be `grads` itself. New arrays by default.

        Returns
        -------
        dict
            The results by name, in the kind and shape of the gradients; equal on every rank.

        Raises
        ------
        InvalidArgumentError
            Before anything is sent, if an argument is not as described; at the first step also if
            ranks disagree, naming two of them.
        CommunicationError
            If a peer died or did not answer in time, naming it; memories are as before the step.
        NonFiniteGradientError
            With ``nonfinite="raise"``, if a gradient of any rank holds NaN or Inf.
        """
        return self.allreduce_async(grads, op, scale, out=out).wait()

    def allreduce_async(
        self,
        grads: Mapping[str, Any],
        op: str = "average",
        scale: float = 1.0,
        *,
        out: Mapping[str, Any] | None = None,
    ) -> Work:
        """Start a step and return; see `allreduce`.

        The gradients must not change until the step is done. Waits for the step before, whose
        error, if any, stays with its own `Work`.
        """
        core_op, scale = check_step_options(op, scale)
        rank = self._rank
        rank.check_op(core_op)
        step = rank.prepare(grads, out)
        rank.register(step)
        rank.load_pending_state(core_op)
        rank.settle()
        rank.engine.start_step(core_op, scale, rank.submissions(step))
        rank.started(step, core_op)
        return Work(rank, step)

    def worker_memory(self) -> dict[str, np.ndarray]:
        """Return a copy of this rank's worker memory; zeros for tensors that travel dense."""
        return self._rank.worker_memory()

    def server_memory(self) -> dict[str, np.ndarray]:
        """Return a copy of the whole server memory. A collective call: all ranks must make it."""
        self._rank.settle()  # a step that failed keeps its error for its own `Work.wait`
        return self._rank.gather_server_memory()

    def commit(self) -> None:
        """Make the last step final. The next step does so too."""
        self._rank.engine.commit()

    def rollback(self) -> None:
        """Drop the last step, unless it is final: memories and scale are as if it had never been.

        All ranks must drop the same steps.
        """
        self._rank.engine.rollback()

    def set_density(self, density: float, density_down: float | None = None) -> None:
        """Use other densities from the next step on, for all tensors that no rule serves.

        Parameters
        ----------
        density : float
            In (0, 1]; the same on all ranks.
        density_down : float, optional
            The same as `density` by default.
        """
        self._rank.set_density(*check_densities(density, density_down, "set_density"))

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the state: both memories, scale and step count.

        Every rank must save its own. A rank that loads it goes on bit for bit.
        """
        if not self._rank.registered:
            raise Error("state_dict: the group has made no step yet, so there is no state")
        return self._rank.save_state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; all ranks must do so.

        Before the first step, which fixes the tensors, the state is kept and loaded then.

        Parameters
        ----------
        state : dict
            This rank's part of a job of as many ranks, or a whole state of a job of any number of
            ranks (`bitopk.checkpoint`).

        Raises
        ------
        InvalidArgumentError
            If the state is of another model or damaged; the message names the difference, and
            nothing is changed. Before the first step some of these surface in that step.
        """
        self._rank.load_state(state)

    def all_to_all(self, parts: Sequence[bytes]) -> list[bytes]:
        """Send ``parts[r]`` to rank r and return what each rank sent here. A collective call."""
        self._rank.settle()
        return self._rank.engine.all_to_all(list(parts))

    def stats(self) -> Stats:
        """Return what this rank did so far."""
        return self._rank.stats()

    def close(self) -> None:
        """Disconnect. A step under way is aborted, which the peers see as the end of this rank."""
        if self._rank_engine is not None:
            self._rank_engine.engine.close()
        self._rank_engine = None

    def __enter__(self) -> Group:
        """Return the group itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the group."""
        self.close()


def init(
    spec: Compression,
    *,
    timeout: float = 60.0,
    bucket_bytes: int = 32 << 20,
    interface: str | None = None,
) -> Group:
    """Join this process, as one rank, with the other ranks of its job.

    All ranks must call it, in the same order if they do so several times; each call makes an
    independent group. The ranks may have been started by anything that made an initialised
    torch.distributed or mpi4py, or by ``bitopk launch`` (one machine).

    Parameters
    ----------
    spec : Compression
        What to compress, and how; equal on all ranks.
    timeout : float
        Seconds that any wait for a peer may last.
    bucket_bytes : int
        Dense bytes of the units that share a message; never changes a result.
    interface : str, optional
        Network interface, e.g. "eth0"; see `bitopk.hosts.connect` for the default.

    Raises
    ------
    Error
        If nothing launched this process as a rank; the message lists what was looked for.
    CommunicationError
        If a rank cannot be reached within the time-out.
    """
    config = make_config(as_spec(spec, "init"), bucket_bytes)
    engine, description = hosts.connect(config, timeout, interface)
    logger.info("rank %d of %d: %s", engine.rank, engine.size, description)
    return Group(RankEngine(engine))
