# SPDX-License-Identifier: Apache-2.0
"""One engine with names: the part that `Group` and `LocalGroup` share."""

from __future__ import annotations

import itertools
import logging
import math
import numbers
import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from bitopk import _core, checkpoint
from bitopk._tensors import empty_like, host_view
from bitopk.errors import InvalidArgumentError
from bitopk.stats import Stats

__all__ = ["RankEngine", "Step", "check_densities", "check_step_options"]

logger = logging.getLogger("bitopk")

_WAIT_SLICE_SECONDS = 0.2
_REPORT_WAIT_AFTER_SECONDS = 10.0
_OPS = {"average": _core.Op.average, "sum": _core.Op.sum}


def check_step_options(op: Any, scale: Any) -> tuple[_core.Op, float]:
    """Return the engine's operation and scale, or raise InvalidArgumentError."""
    if op not in _OPS:
        raise InvalidArgumentError(f"allreduce: op must be 'average' or 'sum'; got {op!r}")
    valid = isinstance(scale, numbers.Real) and not isinstance(scale, bool)
    if not valid or not math.isfinite(scale) or scale <= 0:
        raise InvalidArgumentError(f"allreduce: scale must be finite and positive; got {scale!r}")
    return _OPS[op], float(scale)


def check_densities(density: Any, density_down: Any, where: str) -> tuple[float, float]:
    """Return both densities as floats, or raise InvalidArgumentError."""
    out = []
    for name, value in (("density", density), ("density_down", density_down)):
        if name == "density_down" and value is None:
            value = density
        number = isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral)
        if not number or not 0.0 < value <= 1.0:
            raise InvalidArgumentError(
                f"{where}: {name} must be a float in (0, 1]; got {value!r} ({type(value).__name__})"
            )
        out.append(float(value))
    return out[0], out[1]


class Step:
    """One step of one rank: its checked arrays, and what became of it once that is known."""

    def __init__(self) -> None:
        self.results: dict[str, Any] = {}
        self.views: list[tuple[str, np.ndarray, np.ndarray]] = []
        self.done = False
        self.error: Exception | None = None

    def outcome(self) -> dict[str, Any]:
        """Return the results, or raise what the step failed with."""
        if self.error is not None:
            raise self.error
        return self.results


class RankEngine:
    """An engine whose tensors are called by name. Not thread-safe."""

    def __init__(
        self, engine: _core.Engine, report_wait_after: float = _REPORT_WAIT_AFTER_SECONDS
    ) -> None:
        self.engine = engine
        self.report_wait_after = report_wait_after  # seconds
        self._numbers: dict[str, int] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, np.dtype] = {}
        self._op: Any = None
        self.registered = False
        self._last: Step | None = None
        self._state_to_load: dict[str, Any] | None = None
        # Callers multiply the mean by N, as Horovod's Sum by way of `compression=` does.
        self.times_n = False
        self.loaded_scales: tuple[float, list[float]] | None = None  # of the last state

    def prepare(self, grads: Any, out: Any) -> Step:
        """Check one rank's gradients and make room for the results; nothing else is changed."""
        if not isinstance(grads, Mapping):
            raise InvalidArgumentError(
                f"allreduce: gradients must be a dict of name to array; got {type(grads).__name__}"
            )
        if out is not None and not isinstance(out, Mapping):
            raise InvalidArgumentError(
                f"allreduce: out must be a dict of name to array; got {type(out).__name__}"
            )
        step = Step()
        for name, gradient in grads.items():
            if not isinstance(name, str):
                raise InvalidArgumentError(f"allreduce: names must be str; got {name!r}")
            view = host_view(gradient, f"gradient {name!r}")
            self._check_tensor(name, view)
            result = empty_like(gradient) if out is None else self._result_for(name, out)
            result_view = host_view(result, f"out {name!r}")
            _check_result(name, view, result_view)
            step.results[name] = result
            step.views.append((name, view, result_view))
        _check_overlap(step.views)
        return step

    def _result_for(self, name: str, out: Mapping[str, Any]) -> Any:
        if name not in out:
            raise InvalidArgumentError(f"allreduce: out has no {name!r}")
        return out[name]

    def _check_tensor(self, name: str, view: np.ndarray) -> None:
        if view.dtype not in (np.float32, np.float64, np.int32, np.int64):
            raise InvalidArgumentError(
                f"gradient {name!r}: must be float32 (compressed), or float64, int32 or int64 "
                f"(sent dense); got {view.dtype}"
            )
        if not self.registered:
            return
        if name not in self._numbers:
            if not self._numbers:
                raise InvalidArgumentError(
                    f"allreduce: {name!r} was not in the first step, which had no tensors at all"
                )
            known = ", ".join(repr(known) for known in list(self._numbers)[:8])
            raise InvalidArgumentError(
                f"allreduce: {name!r} was not in the first step, which fixed the set of tensors "
                f"({len(self._numbers)}: {known}{', ...' if len(self._numbers) > 8 else ''})"
            )
        if view.shape != self._shapes[name]:
            raise InvalidArgumentError(
                f"gradient {name!r}: got shape {view.shape}, the first step had "
                f"{self._shapes[name]}"
            )
        if view.dtype != self._dtypes[name]:
            raise InvalidArgumentError(
                f"gradient {name!r}: got {view.dtype}, the first step had {self._dtypes[name]}"
            )

    def check_op(self, op: _core.Op) -> None:
        """Refuse another operation than the first step's."""
        if self._op is not None and op != self._op:
            raise InvalidArgumentError(
                f"allreduce: the first step fixed op={self._op.name!r}; got {op.name!r}"
            )

    def submissions(self, step: Step) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """Return the arrays of a step by the engine's numbers."""
        return [(self._numbers[name], view, result) for name, view, result in step.views]

    def started(self, step: Step, op: _core.Op) -> None:
        """Take note that the engine works on `step`."""
        self._last = step
        self._op = op

    def started_op(self, op: _core.Op) -> None:
        """Take note of the operation of a step that is submitted tensor by tensor."""
        self._op = op

    def register(self, step: Step) -> None:
        """At the first step, fix the set of tensors; the comparison among ranks goes on behind."""
        if self.registered:
            return
        views = {name: view for name, view, _ in step.views}
        names = sorted(views, key=lambda name: name.encode())
        self.register_tensors([(name, views[name].shape, views[name].dtype) for name in names])

    def load_pending_state(self, op: _core.Op) -> None:
        """Load a state that came before the tensors were known, once all ranks have registered.

        `op` is that of the first step, which must be the state's.
        """
        if self._state_to_load is not None:
            self.load_state(self._state_to_load)
            self.check_op(op)

    def set_density(self, density: float, density_down: float) -> None:
        """Use other densities from the next step on, also if a state is still to be loaded."""
        self.engine.set_density(density, density_down)
        if self._state_to_load is not None:
            self._state_to_load.update(density=density, density_down=density_down)

    def register_tensors(
        self,
        tensors: Iterable[tuple[str, tuple[int, ...], np.dtype]],
        result_formats: Mapping[str, str] | None = None,
    ) -> None:
        """Fix the set of tensors, in this order.

        Parameters
        ----------
        tensors : iterable of (str, shape, dtype)
            float32, float64, int32 or int64.
        result_formats : dict, optional
            By name, "float16" or "bfloat16" if the caller's own type is that; see TensorSpec of
            tensor.h.
        """
        formats = result_formats or {}
        tensors = list(tensors)
        self.engine.register(
            [
                (
                    name,
                    math.prod(shape),
                    np.dtype(dtype).name,
                    getattr(_core.ValueFormat, formats.get(name, "float32")),
                )
                for name, shape, dtype in tensors
            ]
        )
        self._numbers = {name: number for number, (name, _, _) in enumerate(tensors)}
        self._shapes = {name: tuple(shape) for name, shape, _ in tensors}
        self._dtypes = {name: np.dtype(dtype) for name, _, dtype in tensors}
        self.registered = True
        for line in self.engine.decisions:
            logger.info("%s", line)
        if self.engine.rank == 0:
            for line in self.engine.warnings:
                logger.warning("%s", line)

    def settle(self) -> None:
        """Wait for whatever is under way; a step that failed keeps its error for its own `wait`."""
        if self._last is not None and not self._last.done:
            self.finish(self._last)
        else:
            self.wait()

    def finish(self, step: Step, timeout: float | None = None) -> bool:
        """Wait until `step` is done, well or not; returns False after `timeout` seconds."""
        if step.done:
            return True
        try:
            if not self.wait(timeout):
                return False
        except Exception as error:
            step.error = error
        step.done = True
        return True

    def is_completed(self, step: Step) -> bool:
        """Tell, without waiting, whether `step` is done."""
        return step.done or self.engine.is_completed()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the engine and say now and then for whom; False after `timeout` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        report_after = self.report_wait_after
        while True:
            left = _WAIT_SLICE_SECONDS if end is None else end - time.monotonic()
            if self.engine.wait_for(min(_WAIT_SLICE_SECONDS, max(left, 0.001))):
                return True
            if end is not None and time.monotonic() >= end:
                return False
            report_after = self.report_wait(report_after)

    def report_wait(self, report_after: float) -> float:
        """Log for whom the engine waits if that lasts for so many seconds; return when to again."""
        ranks, what, seconds = self.engine.waiting()
        if not ranks or seconds < report_after:
            return report_after
        logger.warning("still waiting for ranks %s after %.0f s: %s", ranks, seconds, what)
        return 2 * report_after

    def worker_memory(self) -> dict[str, np.ndarray]:
        """Return this rank's worker memory by name; zeros for tensors that travel dense."""
        out = self.zero_memory()
        for name, array in out.items():
            self.engine.read_worker_memory(self._numbers[name], array)
        return out

    def add_server_share(self, out: dict[str, np.ndarray]) -> None:
        """Write this rank's share of the server memory into the arrays of `out`."""
        for name, array in out.items():
            self.engine.read_server_share(self._numbers[name], array)

    def gather_server_memory(self) -> dict[str, np.ndarray]:
        """Return the whole server memory; every rank must call it."""
        out = self.zero_memory()
        if not self.registered:
            return out
        whole = self.engine.gather_server_memory()
        for name, array in out.items():
            if whole[self._numbers[name]] is not None:
                array[...] = whole[self._numbers[name]].reshape(array.shape)
        return out

    def zero_memory(self) -> dict[str, np.ndarray]:
        """Return zeros in the shapes of the float32 tensors."""
        return {
            name: np.zeros(shape, np.float32)
            for name, shape in self._shapes.items()
            if self._dtypes[name] == np.float32
        }

    def save_state(self) -> dict[str, Any]:
        """Return this rank's part of the state; see `bitopk.checkpoint`."""
        op = "" if self._op is None else self._op.name
        part = {
            "format": checkpoint.FORMAT,
            **self.engine.save_state(),
            "op": checkpoint.TIMES_N if self.times_n and op == "average" else op,
            "whole_server_memory": False,
        }
        return checkpoint.portable(part)

    def load_state(self, state: Any) -> None:
        """Load a part or a whole state; before the tensors are known it is kept until they are."""
        part = checkpoint.part_for(state, self.engine.rank, self.engine.size)
        if not self.registered:
            self._state_to_load = part
            return
        op = "average" if part["op"] == checkpoint.TIMES_N else part["op"]
        if op and self._op is not None and op != self._op.name:
            raise InvalidArgumentError(
                f"load_state_dict: the state is of op={op!r}, this engine's first step fixed "
                f"{self._op.name!r}"
            )
        self.settle()
        self.engine.load_state(part)
        self._state_to_load = None
        self.times_n = part["op"] == checkpoint.TIMES_N
        self.loaded_scales = (part["scale"], part["tensor_scales"])
        if op:
            self._op = _OPS[op]
        if part["settings"] != self.engine.settings:
            logger.warning(
                "load_state_dict: the memories carry over, but the settings differ: saved with %s; "
                "now %s",
                *_first_difference(part["settings"], self.engine.settings),
            )

    def stats(self) -> Stats:
        """Return what this rank did so far."""
        return Stats(**self.engine.stats())


def _first_difference(left: str, right: str) -> tuple[str, str]:
    pairs = itertools.zip_longest(left.splitlines(), right.splitlines(), fillvalue="nothing")
    return next(pair for pair in pairs if pair[0] != pair[1])


def _check_result(name: str, view: np.ndarray, result: np.ndarray) -> None:
    if result.shape != view.shape or result.dtype != view.dtype:
        raise InvalidArgumentError(
            f"out {name!r}: got {result.dtype}{list(result.shape)}, the gradient is "
            f"{view.dtype}{list(view.shape)}"
        )
    if not result.flags.writeable:
        raise InvalidArgumentError(f"out {name!r}: must be writable")
    same = result.__array_interface__["data"] == view.__array_interface__["data"]
    if not same and np.may_share_memory(result, view):
        raise InvalidArgumentError(f"out {name!r}: must be the gradient itself or not overlap it")


def _check_overlap(views: list[tuple[str, np.ndarray, np.ndarray]]) -> None:
    """Refuse a result that shares memory with another tensor's gradient or result."""
    ranges = []
    for name, view, result in views:
        if result.nbytes == 0:
            continue
        start = result.__array_interface__["data"][0]
        ranges.append((start, start + result.nbytes, name, True))
        other = view.__array_interface__["data"][0]
        if other != start:
            ranges.append((other, other + view.nbytes, name, False))
    ranges.sort()
    end, owner, written = 0, "", False
    for start, stop, name, is_result in ranges:
        if start < end and (written or is_result):
            raise InvalidArgumentError(
                f"out: the result of {name if is_result else owner!r} shares memory with "
                f"{owner if is_result else name!r}"
            )
        if stop > end:
            end, owner, written = stop, name, is_result
