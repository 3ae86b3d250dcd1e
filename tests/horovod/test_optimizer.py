# SPDX-License-Identifier: Apache-2.0
"""bitopk in Horovod's optimizer, in all three ways, in real jobs.

Each job runs many cases in one process group, since a start takes seconds; it ends at the
first one that is wrong.
"""

from __future__ import annotations

import re

import pytest
from jobs_support import horovodrun, mpirun_job


def check(done, size, num_cases):
    """Fail unless all ranks came to the end of so many cases."""
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert done.stdout.count(f"all {num_cases} cases right") == size, output


def test_density_1_is_plain_horovod_bit_for_bit_on_two_ranks():
    check(horovodrun(2, "dense.py", "sharded", timeout=250), 2, 64)


def test_density_1_is_plain_horovod_under_mpi():
    check(mpirun_job(3, "dense.py", "allgather", timeout=250), 3, 67)


@pytest.mark.parametrize("ranks", [3, 4])
def test_compressed_training_is_that_of_local_group(ranks):
    # Four ranks make one way; three make all of them.
    part = "" if ranks == 3 else "simulated-wrapper"
    check(horovodrun(ranks, "sparse.py", part, timeout=250), ranks, 14 if ranks == 3 else 1)


def test_no_order_of_gradients_blocks_or_changes_a_result():
    done = mpirun_job(3, "scrambled.py", 2000, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("2000 scrambled steps: right") == 3


def test_what_users_of_horovod_rely_on_works_and_the_rest_is_refused():
    check(horovodrun(2, "behaviours.py", timeout=250), 2, 48)


@pytest.mark.parametrize(("way", "steps"), [("compression", 3), ("wrapper", 3), ("attach", 0)])
def test_join_is_an_error_on_the_ranks_that_go_on(way, steps):
    done = horovodrun(3, "join.py", way, steps, timeout=60)
    assert done.returncode != 0, done.stdout
    for rank in (0, 2):
        refused = re.search(rf"\[{rank}\]<stdout>:refused after (\S+) s: (.*)", done.stdout)
        assert refused, done.stdout + done.stderr
        assert float(refused[1]) < 20
        assert "hvd.join()" in refused[2]


def test_checkpoints_resume_bit_for_bit_and_move_to_another_number_of_ranks(tmp_path):
    check(mpirun_job(3, "resume.py", "save", tmp_path), 3, 6)
    check(horovodrun(2, "resume.py", "load", tmp_path), 2, 3)


def test_a_rank_that_is_late_is_named():
    done = horovodrun(2, "late.py", env={"HOROVOD_STALL_CHECK_TIME_SECONDS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    for step in (2, 3):
        late = rf"\[0\]<stdout>:still waiting for ranks \[1\] after \d s: .*, step {step}"
        assert re.search(late, done.stdout), done.stdout
