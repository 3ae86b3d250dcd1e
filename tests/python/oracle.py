# SPDX-License-Identifier: Apache-2.0
"""An independent oracle of the bidirectional topK step, in plain NumPy.

Written from the formulas of the design only, for clarity instead of speed: one array per quantity,
named as in the formulas, and every float32 operation in the stated order. The tests compare the
engine with it bit for bit. It imports nothing of bitopk.

    rank i :  a_i = m_i + g_i;  u_i = C_up(a_i);  m_i = a_i - u_i
    server :  s = u_0 + ... + u_{N-1} from +0 in rank order, for an average s / N
              q = delta + s;    v = C_down(q);    delta = q - v
"""

from __future__ import annotations

import fnmatch
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

DEFAULTS: dict[str, Any] = {
    "density": None,
    "density_down": None,
    "k": None,
    "k_down": None,
    "scope": "tensor",
    "value_format": "float32",
    "exchange": "auto",
    "worker_memory": True,
    "server_memory": True,
    "memory_decay": 1.0,
    "nonfinite": "propagate",
    "start_step": 0,
    "dense_below": 1024,
    "rules": (),
}

CANONICAL_NAN = np.uint32(0x7FC00000)


class OracleNonFinite(Exception):
    """What the oracle raises under ``nonfinite="raise"``."""


def magnitude_keys(x: np.ndarray) -> np.ndarray:
    """Order of the topK contract as integers: bits without sign, all NaNs equal and above Inf."""
    keys = x.view(np.uint32) & np.uint32(0x7FFFFFFF)
    return np.minimum(keys, np.uint32(0x7F800001))


def topk_indices(x: np.ndarray, k: int) -> np.ndarray:
    """Ascending indices of the ``min(k, len(x))`` largest magnitudes, ties to the lower index."""
    k = min(k, x.size)
    if k == 0:
        return np.empty(0, np.int64)
    keys = magnitude_keys(x)
    threshold = np.partition(keys, x.size - k)[x.size - k]
    above = np.flatnonzero(keys > threshold)
    tied = np.flatnonzero(keys == threshold)[: k - above.size]
    return np.sort(np.concatenate([above, tied]))


def count_kept(d: int, density: float | None, k: int | None) -> int:
    """Entries that one topK keeps of a unit with d entries."""
    wanted = max(1, math.floor(density * d + 0.5)) if k is None else k
    return min(d, wanted)


def canonical(x: np.ndarray) -> np.ndarray:
    """Copy of x in which every NaN has the bits 0x7fc00000."""
    out = x.copy()
    out[np.isnan(out)] = CANONICAL_NAN.view(np.float32)
    return out


def round_values(x: np.ndarray, value_format: str) -> np.ndarray:
    """What the receiver decodes: nearest even, finite stays finite, NaN canonical."""
    if value_format == "float32":
        return canonical(x)
    if value_format == "float16":
        with np.errstate(over="ignore"):
            rounded = x.astype(np.float16).astype(np.float32)
        largest = np.float32(65504)
    else:
        assert value_format == "bfloat16"
        bits = canonical(x).view(np.uint32).astype(np.uint64)
        bits += np.uint64(0x7FFF) + ((bits >> np.uint64(16)) & np.uint64(1))
        rounded = ((bits >> np.uint64(16)).astype(np.uint32) << np.uint32(16)).view(np.float32)
        largest = np.uint32(0x7F7F0000).view(np.float32)
    overflowed = np.isfinite(x) & ~np.isfinite(rounded)
    rounded = np.where(overflowed, np.copysign(largest, x), rounded)
    rounded = np.where(np.isinf(x), x, rounded).astype(np.float32)
    return canonical(np.where(np.isnan(x), np.float32(np.nan), rounded).astype(np.float32))


def compress(x: np.ndarray, k: int, value_format: str) -> np.ndarray:
    """C(x) as a dense vector: the topK entries that are not zero, as the receiver decodes them."""
    kept = topk_indices(x, k)
    kept = kept[x[kept] != 0]  # NaN != 0, so it is sent
    out = np.zeros_like(x)
    out[kept] = round_values(x[kept], value_format)
    return out


@dataclass
class Unit:
    """Entries among which one topK selects: whole tensors, one after the other."""

    names: list[str]
    num_entries: int
    params: SimpleNamespace

    def gather(self, tensors: dict[str, np.ndarray], shapes: dict[str, tuple]) -> np.ndarray:
        """Concatenate the unit's tensors; one that a rank did not submit counts as zeros."""
        parts = [
            tensors[name].ravel()
            if name in tensors
            else np.zeros(math.prod(shapes[name]), np.float32)
            for name in self.names
        ]
        return np.concatenate(parts).astype(np.float32, copy=False)

    def scatter(self, flat: np.ndarray, shapes: dict[str, tuple]) -> dict[str, np.ndarray]:
        """Cut a vector of the unit's size into tensors."""
        out, begin = {}, 0
        for name in self.names:
            size = math.prod(shapes[name])
            out[name] = flat[begin : begin + size].reshape(shapes[name]).copy()
            begin += size
        return out


@dataclass
class State:
    """All memories between two steps; a step makes a new one and never changes an old one."""

    m: list[list[np.ndarray]]  # [rank][unit]
    delta: list[np.ndarray]  # [unit]
    scale: float | None
    step: int


class OracleGroup:
    """N ranks and the server, with the interface of ``bitopk.LocalGroup``.

    Parameters
    ----------
    world_size : int
        Number of ranks N.
    **params
        Parameters of ``Compression.topk``; `rules` hold dicts of such parameters or "dense".
    """

    def __init__(self, world_size: int, **params: Any) -> None:
        self.world_size = world_size
        self.params = _complete(params)
        self.entries_up = [0] * world_size
        self._units: list[Unit] | None = None
        self._dense: list[str] = []
        self._shapes: dict[str, tuple] = {}
        self._old: State | None = None  # last committed
        self._new: State | None = None  # of the last step, as long as it can be rolled back

    @classmethod
    def from_spec(cls, world_size: int, spec: Any) -> OracleGroup:
        """Read the parameters from an object with attributes, such as a ``Compression``."""
        params = _params_of(spec)
        params["rules"] = [
            (pattern, inner if inner == "dense" else _params_of(inner))
            for pattern, inner in spec.rules
        ]
        return cls(world_size, **params)

    def allreduce(
        self, grads: list[dict[str, np.ndarray]], op: str = "average", scale: float = 1.0
    ) -> list[dict[str, np.ndarray]]:
        """One step; returns the new gradients of every rank (all the same)."""
        self.commit()
        if self._units is None:
            self._register(grads)
        old = self._old
        factor = np.float32(
            (1.0 if old.scale is None else scale / old.scale) * self.params.memory_decay
        )
        new = State([[] for _ in grads], [], scale, old.step + 1)
        is_finite = True
        out: dict[str, np.ndarray] = {}
        with np.errstate(all="ignore"):
            for number, unit in enumerate(self._units):
                unit_factor = self._unit_factor(unit, factor, scale)
                v, unit_finite = self._step_unit(number, unit, unit_factor, grads, op, new)
                out.update(unit.scatter(v, self._shapes))
                is_finite &= unit_finite
            for name in self._dense:
                out[name] = self._sum_dense(name, grads, op)
                is_finite &= bool(np.all(np.isfinite(out[name])))
                is_finite &= all(np.all(np.isfinite(g[name])) for g in grads if name in g)
        if is_finite:
            self._new = new
        else:
            out = self._apply_policy(out)
        return [{name: x.copy() for name, x in out.items()} for _ in grads]

    def commit(self) -> None:
        """Make the last step's memories final."""
        if self._new is not None:
            self._old, self._new = self._new, None

    def rollback(self) -> None:
        """Drop the last step's memories, if they are not final yet."""
        self._new = None

    def set_density(self, density: float, density_down: float | None = None) -> None:
        """Change how much the units outside `rules` send; memories stay."""
        self.params.density, self.params.k, self.params.k_down = density, None, None
        self.params.density_down = density if density_down is None else density_down

    def worker_memory(self, rank: int) -> dict[str, np.ndarray]:
        """Return m of one rank by tensor name; dense tensors have none."""
        return self._scatter(self._current().m[rank])

    def server_memory(self) -> dict[str, np.ndarray]:
        """Return delta by tensor name; dense tensors have none."""
        return self._scatter(self._current().delta)

    def _current(self) -> State:
        return self._old if self._new is None else self._new

    def _scatter(self, flats: list[np.ndarray]) -> dict[str, np.ndarray]:
        out: dict[str, np.ndarray] = {}
        for unit, flat in zip(self._units, flats):
            out.update(unit.scatter(flat, self._shapes))
        return out

    def _unit_factor(self, unit: Unit, factor: np.float32, scale: float) -> np.float32:
        """Apply a rule's own decay, if it differs."""
        if unit.params.memory_decay == self.params.memory_decay:
            return factor
        ratio = 1.0 if self._old.scale is None else scale / self._old.scale
        return np.float32(ratio * unit.params.memory_decay)

    def _step_unit(
        self,
        number: int,
        unit: Unit,
        factor: np.float32,
        grads: list[dict[str, np.ndarray]],
        op: str,
        new: State,
    ) -> tuple[np.ndarray, bool]:
        """Return v and whether all was finite; append the unit's new memories to `new`."""
        params, d, old = unit.params, unit.num_entries, self._old
        is_dense = params.exchange == "dense" or old.step < params.start_step
        k_up = d if is_dense else count_kept(d, params.density, params.k)
        k_down = d if is_dense else count_kept(d, params.density_down, params.k_down)
        up_format = "float32" if is_dense else params.value_format
        is_finite = True

        s = np.zeros(d, np.float32)
        for rank, grad in enumerate(grads):
            a = _scaled(old.m[rank][number], factor) + unit.gather(grad, self._shapes)
            u = compress(a, k_up, up_format)
            self.entries_up[rank] += int(np.count_nonzero(u))
            m = a - u  # +0 where the entry was sent exactly
            new.m[rank].append(m if params.worker_memory else np.zeros_like(m))
            s = s + u
            is_finite &= bool(np.all(np.isfinite(a)))
        if op == "average":
            s = s / np.float32(self.world_size)

        q = _scaled(old.delta[number], factor) + s
        is_finite &= bool(np.all(np.isfinite(q)))
        if k_down >= d:  # unidirectional: v = q exactly, delta stays (or becomes) 0
            v, delta = q, np.zeros_like(q)
        else:
            v = compress(q, k_down, params.value_format)
            delta = q - v
        new.delta.append(delta if params.server_memory else np.zeros_like(delta))
        return canonical(v), is_finite

    def _sum_dense(self, name: str, grads: list[dict[str, np.ndarray]], op: str) -> np.ndarray:
        """Sum in rank order from +0, for tensors that are not compressed."""
        dtype = next(g[name].dtype for g in grads if name in g)
        total = np.zeros(self._shapes[name], dtype)
        for grad in grads:
            if name in grad:
                total = total + grad[name]
        if op == "average":
            assert dtype == np.float32, "the average of integers is not specified"
            total = total / np.float32(self.world_size)
        total = np.asarray(total, dtype)
        return canonical(total.reshape(-1)).reshape(total.shape) if dtype == np.float32 else total

    def _apply_policy(self, out: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if self.params.nonfinite == "raise":
            raise OracleNonFinite
        if self.params.nonfinite == "skip":
            return {name: np.zeros_like(x) for name, x in out.items()}
        return out

    def _register(self, grads: list[dict[str, np.ndarray]]) -> None:
        """Fix the tensors and form the units, at the first step."""
        first = {name: x for grad in grads for name, x in grad.items()}
        groups: dict[Any, list[str]] = {}
        group_params: dict[Any, SimpleNamespace] = {}
        for name in sorted(first, key=lambda name: name.encode()):
            self._shapes[name] = first[name].shape
            index, params = self._rule(name)
            is_float = first[name].dtype == np.float32
            if params == "dense" or not is_float or first[name].size < params.dense_below:
                self._dense.append(name)
                continue
            key = (index,) if params.scope == "global" else (index, name)
            groups.setdefault(key, []).append(name)
            group_params[key] = params
        self._units = [
            Unit(names, sum(math.prod(self._shapes[n]) for n in names), group_params[key])
            for key, names in groups.items()
        ]
        zeros = [np.zeros(unit.num_entries, np.float32) for unit in self._units]
        self._old = State([list(zeros) for _ in grads], list(zeros), None, 0)

    def _rule(self, name: str) -> tuple[int, Any]:
        for index, (pattern, params) in enumerate(self.params.rules):
            if fnmatch.fnmatchcase(name, pattern):
                return index, params if params == "dense" else _complete(params)
        return -1, self.params


def _complete(params: dict[str, Any]) -> SimpleNamespace:
    full = {**DEFAULTS, **params}
    if full["density_down"] is None:
        full["density_down"] = full["density"]
    if full["k_down"] is None:
        full["k_down"] = full["k"]
    return SimpleNamespace(**full)


def _params_of(spec: Any) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in DEFAULTS if name != "rules"}


def _scaled(memory: np.ndarray, factor: np.float32) -> np.ndarray:
    return memory if factor == np.float32(1) else memory * factor
