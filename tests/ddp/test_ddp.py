# SPDX-License-Identifier: Apache-2.0
"""`bitopk.ddp` in real processes."""

from __future__ import annotations

import re

import pytest
from ddp_ranks import Job, run, torchrun

torch = pytest.importorskip("torch")

TORCH_2 = int(torch.__version__.split(".")[0]) >= 2


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_at_density_1_training_is_that_of_ddp(tmp_path, num_ranks):
    for output in run(tmp_path, num_ranks, "ddp_dense.py"):
        assert "all equal" in output


def check_cases(folder, num_ranks, *cases, script="ddp_topk.py"):
    for output in run(folder, num_ranks, script, *cases):
        assert "all equal" in output


def test_results_are_those_of_a_local_group(tmp_path):
    check_cases(tmp_path, 3, "equals_a_local_group", "several_process_groups")


def test_what_no_rank_uses_is_neither_lost_nor_sent_twice(tmp_path):
    check_cases(
        tmp_path,
        3,
        "what_no_rank_uses_stays_in_the_memories",
        "gradients_of_another_step_are_left_alone",
    )


def test_modes_of_ddp(tmp_path):
    check_cases(
        tmp_path,
        3,
        "uneven_inputs",
        "sparse_gradients",
        "memory_formats",
        "wrapped_hooks",
        "one_rank_alone",
        "half_precision",
        "reductions_by_hand",
    )


def test_steps_and_their_errors(tmp_path):
    check_cases(
        tmp_path,
        2,
        "schedules_and_densities",
        "discarded_steps",
        "nonfinite_gradients",
        "named_parameters_are_checked",
    )


def test_training_goes_on_from_a_checkpoint_bit_for_bit(tmp_path):
    cases = ("checkpoint", "whole_checkpoint", "pickled", "refusals")
    check_cases(tmp_path, 2, *cases, script="ddp_restart.py")


def test_a_loss_scale_does_not_disturb_the_memories(tmp_path):
    check_cases(tmp_path, 2, script="ddp_amp.py")


@pytest.mark.parametrize(
    ("transport", "options"),
    [("gloo", ()), ("gloo", ("find_unused_parameters",)), ("torch", ())],
    ids=str,
)
def test_a_killed_rank_ends_the_others_with_an_error(tmp_path, transport, options):
    with Job(tmp_path, 3, "ddp_victim.py", transport, *options) as job:
        for rank in (0, 1):
            output = job.output(rank, status=7)
            found = re.search(r"after ([\d.]+) s CommunicationError: .*rank.*2", output)
            assert found, output
            assert float(found[1]) < 40.0  # and not its time-out, which is 60


@pytest.mark.skipif(not TORCH_2, reason="torch 1 does not compile")
def test_compiled_models_train_and_the_reducer_in_python_is_refused(tmp_path):
    for output in run(tmp_path, 2, "ddp_compile.py"):
        assert "refused" in output


@pytest.mark.skipif(not TORCH_2, reason="torchrun of torch 1 does not run under Python 3.11")
def test_torchrun_starts_the_ranks():
    done = torchrun(2, "ddp_topk.py", "discarded_steps")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all equal") == 2
