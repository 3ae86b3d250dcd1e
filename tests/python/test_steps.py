# SPDX-License-Identifier: Apache-2.0
"""What becomes of steps that overlap, fail or are dropped, and of arrays that nobody keeps."""

from __future__ import annotations

import gc

import bitopk
import numpy as np
import pytest
from bitopk import Compression, InvalidArgumentError, NonFiniteGradientError, _core
from bitopk._rank import RankEngine
from bitopk._settings import make_config
from bitopk.group import Group
from support import assert_bits, make_grads


def one_rank(spec: Compression) -> Group:
    """Return a group of one rank, which needs no launcher."""
    (engine,) = _core.in_process_engines(1, make_config(spec, 32 << 20), 10.0)
    return Group(RankEngine(engine))


SPEC = Compression.topk(0.5, dense_below=0, nonfinite="raise")


def test_a_failed_step_keeps_its_error_and_the_next_one_its_result():
    group = one_rank(SPEC)
    first = group.allreduce_async({"x": np.float32([np.nan, 1])})
    second = group.allreduce_async({"x": np.float32([1, 4])})
    for _ in range(2):
        with pytest.raises(NonFiniteGradientError):
            first.wait()
        assert second.wait()["x"].tolist() == [0, 4]
    assert first.is_completed()
    assert second.is_completed()


def test_a_closed_group_is_closed_although_its_work_lives():
    group = one_rank(SPEC)
    with group:
        work = group.allreduce_async({"x": np.float32([1, 2])})
        assert work.wait()["x"].tolist() == [0, 2]
    with pytest.raises(bitopk.Error, match="closed"):
        group.allreduce({"x": np.float32([1, 2])})
    assert work.wait()["x"].tolist() == [0, 2]
    group.close()


def test_arrays_of_a_dropped_step_stay_until_it_is_done():
    group = one_rank(Compression.topk(0.01))
    for _ in range(20):
        group.allreduce_async({"x": np.ones(200_000, np.float32)})
        gc.collect()
    cycle = [group, group.allreduce_async({"x": np.ones(200_000, np.float32)})]
    cycle.append(cycle)
    del group, cycle
    gc.collect()


@pytest.mark.parametrize("shift", [0, 1])
def test_results_that_share_memory_are_refused(shift):
    group = one_rank(SPEC)
    pool = np.arange(8, dtype=np.float32)
    grads = {"a": np.ones(4, np.float32), "b": np.ones(4, np.float32)}
    with pytest.raises(InvalidArgumentError, match="shares memory"):
        group.allreduce(grads, out={"a": pool[:4], "b": pool[3 - shift : 7 - shift]})
    with pytest.raises(InvalidArgumentError, match="shares memory"):
        group.allreduce(grads, out={"a": grads["b"], "b": grads["a"]})
    assert group.stats().steps == 0


def test_a_scale_that_float32_memories_cannot_follow_is_refused_and_changes_nothing():
    group = one_rank(SPEC)
    group.allreduce({"x": np.float32([1, 2])}, scale=1e-30)
    with pytest.raises(InvalidArgumentError, match="scale"):
        group.allreduce({"x": np.float32([1, 2])}, scale=1e30)
    assert group.allreduce({"x": np.float32([1, 2])}, scale=1e-30)["x"].tolist() == [2, 0]


def test_a_refused_scale_does_not_make_the_step_before_final():
    group = one_rank(SPEC)
    group.allreduce({"x": np.float32([1, 2])}, scale=1e-30)
    with pytest.raises(InvalidArgumentError, match="scale"):
        group.allreduce({"x": np.float32([1, 2])}, scale=1e30)
    group.rollback()
    assert group.worker_memory()["x"].tolist() == [0, 0]


def test_a_state_without_set_density_brings_the_densities_of_the_settings_back():
    grads = [g["x"] for step in range(2) for g in make_grads({"x": (5000,)}, 1, "normal", step)]
    group = one_rank(Compression.topk(0.1))
    group.allreduce({"x": grads[0]})
    state = group.state_dict()
    group.set_density(0.01)
    group.load_state_dict(state)
    assert np.count_nonzero(group.allreduce({"x": grads[1]})["x"]) == 500


def test_a_local_group_whose_ranks_disagree_at_first_can_still_be_used():
    group = bitopk.LocalGroup(2, SPEC)
    with pytest.raises(InvalidArgumentError, match=r"rank 0 has .*rank 1 has"):
        group.allreduce([{"x": np.zeros(2, np.float32)}, {"x": np.zeros(3, np.float32)}])
    out = group.allreduce([{"x": np.float32([1, 2])}, {"x": np.float32([1, 2])}])
    assert out[1]["x"].tolist() == [0, 2]


@pytest.mark.parametrize("values", [(0,), (1,), (1.5,), ("0.1",), (0.1, 2.0), (True,), (None,)])
def test_set_density_refuses_what_is_no_density(values):
    for group in (one_rank(SPEC), bitopk.LocalGroup(2, SPEC)):
        with pytest.raises(InvalidArgumentError, match="density"):
            group.set_density(*values)


def test_a_state_goes_on_bit_for_bit_with_the_densities_that_were_set():
    grads = [g["x"] for step in range(6) for g in make_grads({"x": (5000,)}, 1, "normal", step)]
    group, again = one_rank(Compression.topk(0.1)), one_rank(Compression.topk(0.1))
    again.allreduce({"x": grads[5]})
    group.set_density(0.01, 0.005)
    for gradient in grads[:3]:
        group.allreduce({"x": gradient}, scale=2.0)
    again.load_state_dict(group.state_dict())
    for gradient in grads[3:]:
        expected = group.allreduce({"x": gradient}, scale=4.0)["x"]
        assert_bits(again.allreduce({"x": gradient}, scale=4.0)["x"], expected, "result")
        assert_bits(again.worker_memory()["x"], group.worker_memory()["x"], "memory")


@pytest.mark.parametrize(
    "damage",
    [
        {"rank": "x"},
        {"rank": 1},
        {"world_size": 2},
        {"schedule_step": -1},
        {"tensors": None},
        {"tensors": 'tensor 0: "y" float32[5000]'},
        {"op": "product"},
        {"worker_memory": 5},
        {"worker_memory": {"x": np.float32([np.nan] * 5000)}},
        {"worker_memory": {"x": np.zeros(7, np.float32)}},
        {"worker_memory": {"y": np.zeros(5000, np.float32)}},
        {"server_memory": {"x": np.zeros(7, np.float32)}},
        {"server_layout": {"x": [0, 1, 0, 0]}},
        {"tensor_scales": [0.0]},
        {"scale": -1.0},
        {"scale": float("nan")},
        {"density": 7.0},
        {"format": 1},
    ],
    ids=lambda damage: f"{next(iter(damage))}={str(next(iter(damage.values())))[:12]}",
)
def test_a_damaged_state_is_refused_by_name_and_changes_nothing(damage):
    group = one_rank(Compression.topk(0.1))
    group.allreduce({"x": make_grads({"x": (5000,)}, 1, "normal", 0)[0]["x"]})
    before = group.worker_memory()["x"]
    state = group.state_dict()
    with pytest.raises(InvalidArgumentError):
        group.load_state_dict({**state, **damage})
    with pytest.raises(InvalidArgumentError):
        group.load_state_dict({"format": 2})
    assert_bits(group.worker_memory()["x"], before, "memory")
    group.load_state_dict(state)


def test_patterns_of_rules_mean_the_same_in_both_languages():
    for pattern, name, expected in [
        ("a[^b]c", "azc", False),
        ("a[^b]c", "abc", True),
        ("a[!b]c", "azc", True),
        ("a[!b]c", "abc", False),
        ("x\\y", "x\\y", True),
        ("*.bias", "layer.0.bias", True),
        ("*.bias", "bias", False),
        ("w?", "w1", True),
        ("[]a]", "]", True),
        ("[a-c]*[!0-9]", "b12x", True),
        ("[ab", "[ab", True),
        ("*", "", True),
    ]:
        assert _core.matches_pattern(pattern, name) is expected, (pattern, name)
        spec = Compression.topk(0.1, rules=[(pattern, "dense")])
        assert (spec.rule_for(name) == "dense") is expected, (pattern, name)
