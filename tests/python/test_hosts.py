# SPDX-License-Identifier: Apache-2.0
"""`bitopk.init` under launchers that are not ours: torch.distributed and MPI."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

JOB = Path(__file__).parent / "jobs" / "host.py"


def test_torch_distributed_ranks_find_each_other(tmp_path):
    pytest.importorskip("torch")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(JOB), "torch"],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": "3",
                "TORCH_STORE": str(tmp_path / "store"),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(3)
    ]
    for number, rank in enumerate(ranks):
        output, _ = rank.communicate(timeout=100)
        assert rank.returncode == 0, output
        assert f"rank {number} of 3 through torch.distributed" in output


def test_mpi_ranks_find_each_other():
    assert shutil.which("mpirun"), "mpirun is missing: install openmpi-bin"
    rank_command = [sys.executable, str(JOB), "mpi"]
    done = subprocess.run(
        ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "3", *rank_command],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(3):
        assert f"rank {rank} of 3 through mpi4py" in done.stdout
