# SPDX-License-Identifier: Apache-2.0
"""BITOPK_ISA: every variant of the kernels gives the same bytes, and it is the one that ran."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from bitopk import _core

PROGRAM = """
import hashlib, sys
sys.path.insert(0, sys.argv[1])
import bitopk, bitopk._core
from support import make_grads

print(bitopk._core.compiled_for())
digest = hashlib.sha256()
for density in (0.001, 0.05):
    spec = bitopk.Compression.topk(density, exchange="sharded", dense_below=0)
    group = bitopk.LocalGroup(3, spec)
    for step, kind in enumerate(("normal", "few", "denormal", "layered")):
        outs = group.allreduce(make_grads({"a": (90001,), "b": (7, 11)}, 3, kind, step))
        for memory in (outs[0], group.worker_memory(2), group.server_memory()):
            for name in sorted(memory):
                digest.update(memory[name].tobytes())
print(digest.hexdigest())
"""

TARGETS = {"scalar": "scalar", "neon": "NEON", "avx2": "AVX2", "avx512": "AVX3"}


def run(isa: str) -> subprocess.CompletedProcess[str]:
    """Run the program under one instruction set."""
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(Path(__file__).parent)],
        env={**os.environ, "BITOPK_ISA": isa},
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_every_variant_runs_and_gives_the_bytes_of_the_scalar_one():
    digests = {}
    for isa in _core.supported_isas():
        done = run(isa)
        assert done.returncode == 0, done.stderr
        target, digests[isa] = done.stdout.split()
        assert target == TARGETS[isa]
    assert set(digests.values()) == {digests["scalar"]}


@pytest.mark.parametrize("isa", ["mmx", ""])
def test_an_unknown_instruction_set_is_an_error_that_lists_the_known_ones(isa):
    done = run(isa)
    assert done.returncode != 0
    assert "InvalidArgumentError" in done.stderr
    assert "scalar" in done.stderr
