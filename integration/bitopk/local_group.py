# SPDX-License-Identifier: Apache-2.0
"""`LocalGroup`: N ranks in one process, for tests, simulation and notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from bitopk import _core, checkpoint
from bitopk._rank import RankEngine, Step, check_densities, check_step_options
from bitopk._settings import as_spec, make_config
from bitopk.compression import Compression
from bitopk.errors import Error, InvalidArgumentError
from bitopk.stats import Stats

__all__ = ["LocalGroup"]


class LocalGroup:
    """N ranks in this process, over the same engine that real jobs use.

    Each rank has its own memories and a thread; bytes move in memory. With ``exchange="auto"`` it
    uses the allgather exchange. Not thread-safe.

    Parameters
    ----------
    world_size : int
        Number of ranks, at least 1.
    spec : Compression
        What to compress, and how.
    bucket_bytes : int
        Dense bytes of the units that share a message; never changes a result.
    timeout : float
        Seconds that a rank waits for another.

    Raises
    ------
    InvalidArgumentError
        If an argument makes no sense.

    Examples
    --------
    >>> import numpy as np, bitopk
    >>> group = bitopk.LocalGroup(2, bitopk.Compression.topk(k=1, dense_below=0))
    >>> outs = group.allreduce([{"w": np.float32([3, 1])}, {"w": np.float32([3, 2])}])
    >>> outs[0]["w"].tolist(), group.worker_memory(1)["w"].tolist()
    ([3.0, 0.0], [0.0, 2.0])
    """

    def __init__(
        self,
        world_size: int,
        spec: Compression,
        *,
        bucket_bytes: int = 32 << 20,
        timeout: float = 60.0,
    ) -> None:
        spec = as_spec(spec, "LocalGroup")
        valid = isinstance(world_size, (int, np.integer)) and not isinstance(world_size, bool)
        if not valid or world_size < 1:
            raise InvalidArgumentError(
                f"LocalGroup: world_size must be a positive int; got {world_size!r}"
            )
        if spec.exchange == "auto" and not spec.dense_fallback:
            spec = replace(spec, exchange="allgather")
        config = make_config(spec, bucket_bytes)
        engines = _core.in_process_engines(int(world_size), config, timeout)
        self._ranks = [RankEngine(engine) for engine in engines]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self._ranks)

    def allreduce(
        self,
        grads: Sequence[dict[str, Any]],
        op: str = "average",
        scale: float = 1.0,
        *,
        out: Sequence[dict[str, Any]] | None = None,
    ) -> list[dict[str, Any]]:
        """Make one step of all ranks.

        Parameters
        ----------
        grads : list over ranks of dict of str to array or tensor
            float32 arrays of any shape; float64, int32 and int64 travel dense. Not modified. The
            first step fixes names, shapes and types; a name left out later counts as zeros.
        op : {"average", "sum"}
            Fixed by the first step. Averages of integers are cut towards zero.
        scale : float
            Factor by which these gradients are multiplied relative to the memories' own unit, such
            as a loss scale; finite and positive.
        out : list over ranks of dict, optional
            Where the results go; may be `grads` itself. New arrays by default.

        Returns
        -------
        list over ranks of dict
            The same bytes for every rank.

        Raises
        ------
        InvalidArgumentError
            Before anything is changed, if an argument is not as described.
        NonFiniteGradientError
            With ``nonfinite="raise"``, if a gradient holds NaN or Inf.
        """
        core_op, scale = check_step_options(op, scale)
        for what, value in (("grads", grads), ("out", out)):
            if value is None and what == "out":
                continue
            if isinstance(value, (dict, str)) or not hasattr(value, "__len__"):
                raise InvalidArgumentError(
                    f"allreduce: {what} must be a list over ranks; got {type(value).__name__}"
                )
            if len(value) != self.world_size:
                raise InvalidArgumentError(
                    f"allreduce: {what} must have one entry for each of {self.world_size} ranks; "
                    f"got {len(value)}"
                )
        steps = []
        for number, rank in enumerate(self._ranks):
            rank.check_op(core_op)
            steps.append(rank.prepare(grads[number], None if out is None else out[number]))
        self._register(steps)
        for rank in self._ranks:
            rank.load_pending_state(core_op)
        for rank in self._ranks:
            rank.settle()
        submissions = [rank.submissions(step) for rank, step in zip(self._ranks, steps)]
        _core.start_steps([rank.engine for rank in self._ranks], core_op, scale, submissions)
        for rank, step in zip(self._ranks, steps):
            rank.started(step, core_op)
        for rank, step in zip(self._ranks, steps):
            rank.finish(step)
        return [step.outcome() for step in steps]

    def _register(self, steps: list[Step]) -> None:
        """At the first step, fix the set of tensors, which must be the same on all ranks."""
        if self._ranks[0].registered:
            return
        sets = [
            sorted((name, str(view.dtype), view.shape) for name, view, _ in step.views)
            for step in steps
        ]
        for rank, tensors in enumerate(sets):
            if tensors != sets[0]:
                here = [tensor for tensor in sets[0] if tensor not in tensors] or ["nothing more"]
                there = [tensor for tensor in tensors if tensor not in sets[0]] or ["nothing more"]
                raise InvalidArgumentError(
                    f"allreduce: ranks disagree: rank 0 has {here[0]}, rank {rank} has {there[0]}"
                )
        for rank, step in zip(self._ranks, steps):
            rank.register(step)

    def worker_memory(self, rank: int) -> dict[str, np.ndarray]:
        """Return a copy of one rank's worker memory as it stands after the last step.

        Returns
        -------
        dict of str to numpy.ndarray
            float32, in the tensors' shapes; zeros for tensors that travel dense.
        """
        return self._rank(rank).worker_memory()

    def server_memory(self) -> dict[str, np.ndarray]:
        """Return a copy of the whole server memory as it stands after the last step."""
        out = self._ranks[0].zero_memory()
        for rank in self._ranks:
            rank.add_server_share(out)
        return out

    def commit(self) -> None:
        """Make the last step final. The next step does so too."""
        for rank in self._ranks:
            rank.engine.commit()

    def rollback(self) -> None:
        """Drop the last step, unless it is final: it is then as if it had never been."""
        for rank in self._ranks:
            rank.engine.rollback()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all ranks: a whole state of `bitopk.checkpoint`."""
        if not self._ranks[0].registered:
            raise Error("state_dict: the group has made no step yet, so there is no state")
        return checkpoint.join([rank.save_state() for rank in self._ranks])

    def load_state_dict(self, state: Any) -> None:
        """Go on from the whole state of a job of any number of ranks; see `Group.load_state_dict`.

        Raises
        ------
        InvalidArgumentError
            If the state is of another model or damaged.
        """
        checkpoint.check(state)
        for rank in self._ranks:
            rank.load_state(state)

    def set_density(self, density: float, density_down: float | None = None) -> None:
        """Use other densities from the next step on; see `Group.set_density`."""
        densities = check_densities(density, density_down, "set_density")
        for rank in self._ranks:
            rank.set_density(*densities)

    def stats(self, rank: int = 0) -> Stats:
        """Return what one rank did so far."""
        return self._rank(rank).stats()

    def _rank(self, rank: int) -> RankEngine:
        valid = isinstance(rank, (int, np.integer)) and not isinstance(rank, bool)
        if not valid or not 0 <= rank < self.world_size:
            raise InvalidArgumentError(
                f"LocalGroup: rank must be 0 to {self.world_size - 1}; got {rank!r}"
            )
        return self._ranks[rank]
