# SPDX-License-Identifier: Apache-2.0
"""`bitopk.ddp` in real processes."""

from __future__ import annotations

import pytest

pytest.importorskip("torch.distributed")

from ddp_ranks import run


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_at_density_1_training_is_that_of_ddp(tmp_path, num_ranks):
    for output in run(tmp_path, num_ranks, "ddp_dense.py"):
        assert "all equal" in output


def check_cases(folder, num_ranks, *cases):
    for output in run(folder, num_ranks, "ddp_topk.py", *cases):
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
