# SPDX-License-Identifier: Apache-2.0
"""Horovod itself works here under each launcher, and its jobs end; bitopk is not involved."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from jobs_support import horovodrun, mpirun_job


def check_ranks(done, size, controller):
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(size):
        assert f"rank {rank} of {size} through {controller}: right" in done.stdout, done.stdout


def test_horovodrun_connects_two_ranks_through_gloo():
    check_ranks(horovodrun(2, "allreduce.py"), 2, "Gloo")


def test_horovodrun_connects_two_ranks_through_mpi():
    check_ranks(horovodrun(2, "allreduce.py", mpi=True), 2, "MPI")


def test_mpirun_connects_three_ranks_through_mpi():
    check_ranks(mpirun_job(3, "allreduce.py"), 3, "MPI")


def is_running(pid):
    try:
        # Empty once it is dead, though nobody may have waited for it yet.
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    except OSError:
        return False


@pytest.mark.parametrize("launch", [horovodrun, mpirun_job])
def test_a_job_that_hangs_is_killed_with_all_its_ranks(launch):
    with pytest.raises(TimeoutError, match="not done after 10") as caught:
        launch(2, "sleep.py", timeout=10)
    pids = {int(pid) for pid in re.findall(r"process (\d+)", str(caught.value))}
    assert len(pids) == 2, caught.value
    for pid in pids:
        assert not is_running(pid), f"rank {pid} is still there"
