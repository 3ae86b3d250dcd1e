# SPDX-License-Identifier: Apache-2.0
"""`Session`: an engine that is fed torch tensors one by one; what Horovod, DDP and `Reducer` share.

A step starts with the first tensor that is submitted and ends with `finish`, which waits for all
results. Tensors are named and their set is fixed from the start; those that a rank does not submit
count as zeros.
"""

from __future__ import annotations

import logging
import math
import numbers
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Optional, Union

import numpy as np
import torch

from bitopk import _core, checkpoint
from bitopk._rank import RankEngine, check_densities, check_step_options
from bitopk._settings import as_spec, make_config
from bitopk.compression import Compression
from bitopk.errors import Error, InvalidArgumentError
from bitopk.schedules import Schedule
from bitopk.stats import Stats

__all__ = ["Connect", "Scale", "Session", "TensorInfo", "as_compression"]

logger = logging.getLogger("bitopk")

Scale = Optional[Union[float, Callable[[], float]]]
# Makes an engine with these settings, collectively; the text says through what, for the log.
Connect = Callable[[_core.Config], "tuple[_core.Engine, str]"]
TensorInfo = tuple[str, tuple[int, ...], torch.dtype]  # name, shape, type

# Types of gradients -> type that the engine works in. float64 travels dense.
_ENGINE_TYPES = {
    torch.float32: torch.float32,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float64: torch.float64,
    torch.int32: torch.int32,
    torch.int64: torch.int64,
}
_NUMPY_TYPES = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.int32: np.int32,
    torch.int64: np.int64,
}


def as_compression(spec_or_density: Any, where: str) -> Compression:
    """Return a spec; a density stands for ``Compression.topk(density)``."""
    number = isinstance(spec_or_density, numbers.Real) and not isinstance(spec_or_density, bool)
    return Compression.topk(spec_or_density) if number else as_spec(spec_or_density, where)


# Before there was a usable scale (1 / lr with a learning rate of 0): what such a step leaves in the
# memories weighs nothing later.
_NO_SCALE = 2.0**64


class _Slot:
    """One registered tensor and what is submitted for it in the step under way."""

    def __init__(self, number: int, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.number = number
        self.name = name
        self.shape = tuple(shape)
        self.dtype = dtype
        self.tensor: torch.Tensor | None = None
        # Contiguous CPU memory in the engine's type, where the gradient itself has none.
        self.staging: torch.Tensor | None = None
        self.staged = False

    def view(self, tensor: torch.Tensor) -> np.ndarray:
        """Return the gradient as memory that the engine may read and write."""
        tensor = tensor.detach()
        engine_type = _ENGINE_TYPES[self.dtype]
        self.staged = not (
            tensor.device.type == "cpu" and tensor.dtype == engine_type and tensor.is_contiguous()
        )
        if not self.staged:
            return tensor.numpy()
        if self.staging is None:
            self.staging = torch.empty(self.shape, dtype=engine_type)
        self.staging.copy_(tensor)
        return self.staging.numpy()

    def deliver(self) -> None:
        """Bring the result to where the gradient was."""
        if self.staged and self.tensor is not None:
            self.tensor.detach().copy_(self.staging)


class Session:
    """One engine over named torch tensors; results replace the gradients in place.

    Calls may come from several threads (hooks run in autograd's), one at a time. Nothing connects
    before the first step or `connect`: these are collective.

    Parameters
    ----------
    spec : Compression
        What to compress, and how.
    tensors : sequence of (name, shape, dtype)
        All tensors that a step may hold, in registration order, the same on all ranks. float32,
        float16 and bfloat16 are compressed as float32; float64 and integers travel dense.
    connect : callable
        Makes the engine; called by all ranks at the same step.
    op : {"average", "sum"}
    scale : None, float or callable
        Factor by which gradients are multiplied relative to the memories' own unit, asked at the
        start of each step. A callable that gives 0, Inf or divides by zero leaves the last value.
    tensor_scales : callable, optional
        Gives one factor per tensor, in registration order, by which `scale` is multiplied.
    schedule : callable, optional
        Density as a function of the step; see `bitopk.schedules`.
    bucket_bytes : int
        Dense bytes of the units that share a message.
    report_wait_after : float
        Seconds after which the log names the ranks that are waited for.
    """

    def __init__(
        self,
        spec: Compression,
        tensors: Iterable[TensorInfo],
        connect: Connect,
        *,
        op: str = "average",
        scale: Scale = None,
        tensor_scales: Callable[[], Sequence[float]] | None = None,
        schedule: Schedule | None = None,
        bucket_bytes: int = 32 << 20,
        report_wait_after: float = 10.0,
    ) -> None:
        self.spec = spec
        self.op = op
        self.scale = scale
        self.tensor_scales = tensor_scales
        self.schedule = schedule
        # Called after each connection, on all ranks: for whoever keeps memories across them.
        # Returns whether it loaded anything, the same on all ranks.
        self.on_connect: Callable[[Session], bool] | None = None
        self._connect = connect
        self._report_wait_after = report_wait_after
        self._config = make_config(spec, bucket_bytes)
        self._slots: dict[str, _Slot] = {}
        for number, (name, shape, dtype) in enumerate(tensors):
            if name in self._slots:
                raise InvalidArgumentError(f"bitopk: two tensors are called {name!r}")
            if dtype not in _ENGINE_TYPES:
                raise InvalidArgumentError(f"bitopk: {name!r} has the type {dtype}")
            self._slots[name] = _Slot(number, name, tuple(shape), dtype)
        self._rank_engine: RankEngine | None = None
        self._state_to_load: Any = None
        self._last_scale = _NO_SCALE
        self._last_tensor_scales: list[float] = []
        self._density: tuple[float, float] | None = None
        self._steps_before = 0
        self._open = False
        self._lock = threading.RLock()
        check_step_options(op, 1.0)

    # --- steps ---------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether a step has begun that `finish` has not ended."""
        return self._open

    @property
    def names(self) -> list[str]:
        """Names in registration order."""
        return list(self._slots)

    def __contains__(self, name: object) -> bool:
        """Tell whether a tensor of this name is registered."""
        return name in self._slots

    def is_submitted(self, name: str) -> bool:
        """Tell whether the step under way has this tensor already."""
        return self._slots[name].tensor is not None

    def all_submitted(self) -> bool:
        """Tell whether nothing is missing in the step under way."""
        return all(slot.tensor is not None for slot in self._slots.values())

    def submit(self, name: str, tensor: torch.Tensor) -> None:
        """Hand over a gradient, which must stay alive and unchanged until `finish`.

        Raises
        ------
        InvalidArgumentError
            If it is not registered like that, or was submitted before in this step.
        """
        with self._lock:
            slot = self._check(name, tensor)
            if not self._open:
                self._begin()
            view = slot.view(tensor)
            self._rank.engine.submit(slot.number, view, view)
            slot.tensor = tensor

    def is_completed(self) -> bool:
        """Tell, without waiting, whether `finish` would return at once."""
        with self._lock:
            return not self._open or (self.all_submitted() and self._rank.engine.is_completed())

    @property
    def was_dropped(self) -> bool:
        """Whether the last step left no trace in the memories, because of NaN or Inf."""
        return self._rank.engine.schedule_step == self._steps_before

    def finish(self) -> None:
        """End the step, wait for it, and leave the results in the tensors.

        Raises
        ------
        CommunicationError, WireFormatError, NonFiniteGradientError, ReplicaDivergence, \
InvalidArgumentError
            The memories are then as before the step.
        """
        with self._lock:
            if not self._open:
                return
            try:
                self._rank.engine.end_step()
                self._rank.wait()
                for slot in self._slots.values():
                    slot.deliver()
            finally:
                self._forget_submissions()

    def abandon(self, reason: str) -> None:
        """End the step and all communication; the peers' steps fail with `reason`."""
        with self._lock:
            if self._rank_engine is not None:
                self._rank_engine.engine.abort(reason)
            if self._open:
                try:
                    self.finish()
                except Error:
                    pass  # that is what was asked for
            self._forget_submissions()

    def _forget_submissions(self) -> None:
        self._open = False
        for slot in self._slots.values():
            slot.tensor = None

    def _begin(self) -> None:
        rank = self.connect()
        self._steps_before = rank.engine.schedule_step
        self._follow_schedule(rank)
        core_op, scale = check_step_options(self.op, self._scale_now())
        rank.check_op(core_op)
        rank.engine.begin_step(core_op, scale, self._tensor_scales_now())
        rank.started_op(core_op)
        self._last_scale = scale
        self._open = True

    def _scale_now(self) -> float:
        if self.scale is None:
            return 1.0
        if not callable(self.scale):
            return float(self.scale)
        try:
            value = float(self.scale())
        except ZeroDivisionError:  # 1 / lr while lr is 0
            return self._last_scale
        return value if math.isfinite(value) and value != 0.0 else self._last_scale

    def _tensor_scales_now(self) -> list[float]:
        if self.tensor_scales is None:
            return []
        values = [float(value) for value in self.tensor_scales()]
        last = self._last_tensor_scales or [_NO_SCALE] * len(values)
        usable = [
            new if math.isfinite(new) and new > 0.0 else old for new, old in zip(values, last)
        ]
        self._last_tensor_scales = usable
        return usable

    def _follow_schedule(self, rank: RankEngine) -> None:
        if self.schedule is None:
            return
        density = self.schedule(rank.engine.schedule_step)
        pair = density if isinstance(density, tuple) else (density, None)
        densities = check_densities(*pair, "schedule")
        if densities != self._density:
            rank.engine.set_density(*densities)
            self._density = densities

    def _check(self, name: str, tensor: torch.Tensor) -> _Slot:
        slot = self._slots.get(name)
        if slot is None:
            known = ", ".join(repr(known) for known in list(self._slots)[:8])
            raise InvalidArgumentError(
                f"bitopk: {name!r} is not registered; known are {len(self._slots)}: {known}"
                f"{', ...' if len(self._slots) > 8 else ''}"
            )
        if tensor.is_sparse:
            raise InvalidArgumentError(f"bitopk: {name!r} is sparse; only dense tensors are served")
        if tuple(tensor.shape) != slot.shape or tensor.dtype != slot.dtype:
            raise InvalidArgumentError(
                f"bitopk: {name!r} was registered as {slot.dtype}{list(slot.shape)}; got "
                f"{tensor.dtype}{list(tensor.shape)}"
            )
        if slot.tensor is not None:
            raise InvalidArgumentError(f"bitopk: {name!r} was submitted before in this step")
        return slot

    # --- connection ----------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether there is an engine."""
        return self._rank_engine is not None

    @property
    def _rank(self) -> RankEngine:
        if self._rank_engine is None:
            raise Error("bitopk: not connected yet; connections are made in the first step")
        return self._rank_engine

    @property
    def engine(self) -> RankEngine:
        """The engine by names. @raise Error before the first connection."""
        return self._rank

    def connect(self) -> RankEngine:
        """Connect with the other ranks if that has not happened; a collective call."""
        with self._lock:
            if self._rank_engine is None:
                self._rank_engine = self._make_engine()
                try:
                    loaded = self.on_connect is not None and self.on_connect(self)
                    if not loaded and self._state_to_load is not None:
                        self._rank_engine.load_state(self._state_to_load)
                except BaseException:
                    # Not with empty memories: the next attempt meets the same state.
                    self.disconnect()
                    raise
                self._state_to_load = None
                self._take_over_scales()
            return self._rank_engine

    def _take_over_scales(self) -> None:
        """After a state was loaded, its scales are the last ones."""
        if self._rank.loaded_scales is None:
            return
        scale, tensor_scales = self._rank.loaded_scales
        if scale > 0.0:
            self._last_scale = scale
            self._last_tensor_scales = list(tensor_scales)

    def _make_engine(self) -> RankEngine:
        engine, description = self._connect(self._config)
        logger.info("rank %d of %d: %s", engine.rank, engine.size, description)
        rank = RankEngine(engine, self._report_wait_after)
        slots = self._slots.values()
        rank.register_tensors(
            [(slot.name, slot.shape, _NUMPY_TYPES[_ENGINE_TYPES[slot.dtype]]) for slot in slots],
            {
                slot.name: str(slot.dtype).removeprefix("torch.")
                for slot in slots
                if slot.dtype in (torch.float16, torch.bfloat16)
            },
        )
        self._density = None
        return rank

    def disconnect(self) -> None:
        """Close the engine; the next step connects anew, with memories at zero unless loaded."""
        with self._lock:
            self._forget_submissions()
            if self._rank_engine is not None:
                self._rank_engine.engine.close()
            self._rank_engine = None

    # --- memories ------------------------------------------------------------------------------

    def commit(self) -> None:
        """Make the last step final. The next step does so too."""
        self.finish()
        if self.connected:
            self._rank.engine.commit()

    def rollback(self) -> None:
        """Drop the last step, unless it is final. All ranks must drop the same steps."""
        self.finish()
        if self.connected:
            self._rank.engine.rollback()

    def give_back(self, name: str, values: torch.Tensor) -> None:
        """Return to the memories a result that could not be applied; all ranks must do the same."""
        slot = self._slots[name]
        if _ENGINE_TYPES[slot.dtype] != torch.float32:
            return
        array = values.detach().to("cpu", torch.float32).contiguous().numpy()
        factor = 1.0 if self.op == "average" else 1.0 / self._rank.engine.size
        self._rank.engine.return_to_worker_memory(slot.number, array, factor)

    def set_density(self, density: float, density_down: float | None = None) -> None:
        """Use other densities from the next step on; ends a schedule. See `Group.set_density`."""
        densities = check_densities(density, density_down, "set_density")
        self.schedule = lambda step: densities

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the state; see `bitopk.checkpoint`."""
        self.finish()
        return self._rank.save_state()

    def load_state_dict(self, state: Any) -> None:
        """Load a part or a whole state; before the first connection it is kept until then."""
        self.finish()
        if self.connected:
            self._rank.load_state(state)
            self._density = None
            self._take_over_scales()
        else:
            checkpoint.check(state)
            self._state_to_load = state

    def all_to_all(self, parts: Sequence[bytes]) -> list[bytes]:
        """Send ``parts[r]`` to rank r; a collective call."""
        self.finish()
        return self._rank.engine.all_to_all(list(parts))

    def worker_memory(self) -> dict[str, np.ndarray]:
        """Return a copy of this rank's worker memory."""
        return self._rank.worker_memory()

    def server_memory(self) -> dict[str, np.ndarray]:
        """Return a copy of the whole server memory; a collective call."""
        return self._rank.gather_server_memory()

    def stats(self) -> Stats:
        """Return what this rank did so far."""
        return self._rank.stats()
