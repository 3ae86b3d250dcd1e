# SPDX-License-Identifier: Apache-2.0
"""Helpers of the Python tests: gradients of every kind, comparison bit for bit, launched jobs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from oracle import OracleGroup

JOBS = Path(__file__).parent / "jobs"


def make_vector(kind: str, d: int, rng: np.random.Generator) -> np.ndarray:
    """One gradient of d float32 entries.

    normal: no ties. few: ties everywhere, zeros of both signs. equal: one magnitude. zeros: +0 and
    -0. denormal: below the smallest normal number. layered: ten layers, scales alternate by 100.
    sparse: nearly all zero. wide: magnitudes from 1e-9 to 1e9, beyond float16 on either side.
    """
    x = rng.standard_normal(d).astype(np.float32)
    if kind == "few":
        x = rng.choice(np.array([0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 2.0], np.float32), d)
    elif kind == "equal":
        x = np.copysign(np.float32(0.75), x)
    elif kind == "zeros":
        x = np.copysign(np.float32(0), x)
    elif kind == "denormal":
        x = (rng.integers(-5000, 5000, d) * 2.0**-149).astype(np.float32)
    elif kind == "layered":
        layer = np.arange(d) // max(1, -(-d // 10))
        x = (x * np.where(layer % 2 == 0, 1.0, 100.0)).astype(np.float32)
    elif kind == "sparse":
        x = np.where(rng.random(d) < 0.002, x, np.float32(0)).astype(np.float32)
    elif kind == "wide":
        x = (x * 10.0 ** rng.uniform(-9, 9, d)).astype(np.float32)
    else:
        assert kind == "normal"
    return x


KINDS = ("normal", "few", "equal", "zeros", "denormal", "layered", "sparse", "wide")


def make_grads(
    shapes: dict[str, tuple[int, ...]], world_size: int, kind: str, seed: int
) -> list[dict[str, np.ndarray]]:
    """Gradients of all ranks for one step."""
    rng = np.random.default_rng(seed)
    return [
        {
            name: make_vector(kind, int(np.prod(shape, dtype=np.int64)), rng).reshape(shape)
            for name, shape in shapes.items()
        }
        for _ in range(world_size)
    ]


def copy_grads(grads: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a deep copy of the gradients of all ranks."""
    return [{name: np.array(x, copy=True) for name, x in grad.items()} for grad in grads]


def assert_bits(actual: Any, expected: Any, what: str) -> None:
    """Fail unless two arrays have the same shape, type and bytes."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, not {expected.shape}"
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, not {expected.dtype}"
    if actual.tobytes() == expected.tobytes():
        return
    words = np.dtype(f"u{actual.dtype.itemsize}")
    a = np.ascontiguousarray(actual).reshape(-1).view(words)
    e = np.ascontiguousarray(expected).reshape(-1).view(words)
    wrong = np.flatnonzero(a != e)
    i = int(wrong[0])
    raise AssertionError(
        f"{what}: {wrong.size} of {a.size} entries differ, first at {i}: got "
        f"{actual.reshape(-1)[i]!r} ({a[i]:#x}), expected {expected.reshape(-1)[i]!r} ({e[i]:#x})"
    )


def assert_dicts(
    actual: dict[str, Any], expected: dict[str, Any], what: str, *, rest_zero: bool = False
) -> None:
    """Compare the arrays of `expected` bit for bit; with `rest_zero` others may be zeros."""
    for name, array in expected.items():
        assert name in actual, f"{what}: {name!r} is missing"
        assert_bits(actual[name], array, f"{what}[{name!r}]")
    for name in actual.keys() - expected.keys():
        assert rest_zero, f"{what}: unexpected {name!r}"
        assert not np.any(np.asarray(actual[name])), f"{what}[{name!r}] is not zero"


def assert_state(group: Any, oracle: Any, what: str) -> None:
    """Compare every memory of two groups (the second may be an engine's group too)."""
    for rank in range(oracle.world_size):
        assert_dicts(
            group.worker_memory(rank),
            oracle.worker_memory(rank),
            f"{what}: worker memory of rank {rank}",
            rest_zero=True,
        )
    assert_dicts(
        group.server_memory(), oracle.server_memory(), f"{what}: server memory", rest_zero=True
    )


def snapshot(group: Any, world_size: int) -> Snapshot:
    """Copy all memories, for a later `assert_state`."""
    return Snapshot(group, world_size)


class Snapshot:
    """All memories of a group at one moment."""

    def __init__(self, group: Any, world_size: int) -> None:
        self.world_size = world_size
        self._worker = [
            {n: np.array(x, copy=True) for n, x in group.worker_memory(rank).items()}
            for rank in range(world_size)
        ]
        self._server = {n: np.array(x, copy=True) for n, x in group.server_memory().items()}

    def worker_memory(self, rank: int) -> dict[str, np.ndarray]:
        """Return the copy of one worker's memory."""
        return self._worker[rank]

    def server_memory(self) -> dict[str, np.ndarray]:
        """Return the copy of the server's memory."""
        return self._server


def step_both(
    group: Any, oracle: Any, grads: list[dict[str, np.ndarray]], what: str, **options: Any
) -> list[dict[str, np.ndarray]]:
    """Run one step in the engine and in the oracle and compare outputs and memories."""
    before = copy_grads(grads)
    outs = group.allreduce(grads, **options)
    for rank, grad in enumerate(grads):
        assert_dicts(grad, before[rank], f"{what}: gradient of rank {rank} was changed")
    expected = oracle.allreduce(before, **options)
    for rank in range(oracle.world_size):
        assert_dicts(outs[rank], expected[rank], f"{what}: output of rank {rank}")
    assert_state(group, oracle, what)
    return outs


def make_pair(world_size: int, spec: Any, **options: Any) -> tuple[Any, OracleGroup]:
    """Return an engine's LocalGroup and the oracle for one spec."""
    import bitopk

    return bitopk.LocalGroup(world_size, spec, **options), OracleGroup.from_spec(world_size, spec)


def launch(
    num_ranks: int,
    script: str | Path,
    *arguments: Any,
    options: tuple[str, ...] = (),
    timeout: float = 60.0,
    env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a job of tests/python/jobs (or any path) under ``bitopk launch``."""
    command = [sys.executable, "-m", "bitopk", "launch", "-np", str(num_ranks), *options]
    command += [str(JOBS / script), *map(str, arguments)]
    python_path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": python_path, **(env or {})}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )


def last_line(text: str) -> str:
    """Return the last line that is not empty."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
