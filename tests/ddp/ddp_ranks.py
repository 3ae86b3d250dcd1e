# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of the jobs of this folder as torchrun would, or under torchrun itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

JOBS = Path(__file__).parent / "jobs"
HELPERS = Path(__file__).parents[1] / "python"


class Job:
    """The ranks of a job; those that have not ended are killed at the end of the test.

    Parameters
    ----------
    folder : Path
        For the file in which the ranks meet.
    num_ranks : int
        Number of processes.
    script : str or Path
        Of tests/ddp/jobs, or any path.
    *arguments
        Of the script.
    """

    def __init__(
        self, folder: Path, num_ranks: int, script: str | Path, *arguments: object
    ) -> None:
        environment = {
            **job_environment(),
            "WORLD_SIZE": str(num_ranks),
            "TORCH_STORE": str(folder / "store"),
        }
        self.num_ranks = num_ranks
        self.ranks = [
            subprocess.Popen(
                [sys.executable, str(JOBS / script), *map(str, arguments)],
                env={**environment, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(num_ranks)
        ]

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.communicate()

    def output(self, rank: int, status: int = 0, timeout: float = 120.0) -> str:
        """Wait for a rank and return what it wrote."""
        output, _ = self.ranks[rank].communicate(timeout=timeout)
        assert self.ranks[rank].returncode == status, f"rank {rank}:\n{output}"
        return output


def job_environment() -> dict[str, str]:
    """Return the environment of any rank."""
    python_path = os.pathsep.join([str(HELPERS), *filter(None, sys.path)])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path}


def torchrun(
    num_ranks: int, script: str | Path, *arguments: object
) -> subprocess.CompletedProcess[str]:
    """Run a job under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={num_ranks}", str(JOBS / script), *map(str, arguments)]
    return subprocess.run(
        command, env=job_environment(), capture_output=True, text=True, timeout=120, check=False
    )


def run(folder: Path, num_ranks: int, script: str | Path, *arguments: object) -> list[str]:
    """Run a job to its end; return what each rank wrote."""
    with Job(folder, num_ranks, script, *arguments) as job:
        return [job.output(rank) for rank in range(num_ranks)]
