# SPDX-License-Identifier: Apache-2.0
"""Saved states: gathered, damaged, and loaded by another number of ranks."""

from __future__ import annotations

import copy
import logging

import bitopk
import numpy as np
import pytest
from bitopk import Compression, checkpoint
from bitopk.errors import InvalidArgumentError, WireFormatError
from support import assert_bits, assert_state, launch, make_grads, snapshot

SHAPES = {"large": (200, 300), "small": (1500,), "tiny": (3,), "none": (0,), "scalar": ()}
SPEC = Compression.topk(0.05, exchange="sharded", dense_below=2)


def trained(world_size, spec=SPEC, op="average", steps=4):
    """Return a group that has made some steps."""
    group = bitopk.LocalGroup(world_size, spec)
    for step in range(steps):
        group.allreduce(make_grads(SHAPES, world_size, "normal", step), op=op, scale=2.0)
    return group


def outstanding(group, world_size, op):
    """Return sum_i p_i m_i by name, in float64."""
    weight = 1.0 if op == "sum" else 1.0 / world_size
    total = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for rank in range(world_size):
        for name, memory in group.worker_memory(rank).items():
            total[name] += weight * memory.astype(np.float64)
    return total


@pytest.mark.parametrize("exchange", ["allgather", "sharded"])
def test_the_same_number_of_ranks_goes_on_bit_for_bit(exchange):
    spec = Compression.topk(0.05, exchange=exchange, dense_below=2)
    group, again = trained(3, spec), bitopk.LocalGroup(3, spec)
    again.load_state_dict(group.state_dict())  # before its first step
    for step in range(10, 13):
        grads = make_grads(SHAPES, 3, "few", step)
        expected = group.allreduce(grads, scale=4.0)
        actual = again.allreduce(grads, scale=4.0)
        for name in SHAPES:
            assert_bits(actual[2][name], expected[2][name], name)
        assert_state(again, snapshot(group, 3), f"step {step}")


@pytest.mark.parametrize("op", ["average", "sum"])
@pytest.mark.parametrize("new_size", [1, 2, 4, 7])
@pytest.mark.parametrize("exchange", ["allgather", "sharded"])
def test_another_number_of_ranks_keeps_what_is_outstanding(exchange, new_size, op):
    spec = Compression.topk(0.05, exchange=exchange, dense_below=2)
    group = trained(3, spec, op)
    again = bitopk.LocalGroup(new_size, spec)
    again.load_state_dict(group.state_dict())
    zeros = make_grads({n: s for n, s in SHAPES.items()}, new_size, "zeros", 0)
    # The state is loaded when the first step fixes the tensors; take that step back again.
    again.allreduce(zeros, op=op, scale=2.0)
    again.rollback()
    before, after = outstanding(group, 3, op), outstanding(again, new_size, op)
    for name in SHAPES:
        np.testing.assert_allclose(after[name], before[name], rtol=2e-6, atol=1e-6)
        assert_bits(again.server_memory()[name], group.server_memory()[name], f"server {name}")


def test_other_exchanges_and_densities_take_the_memories_over(caplog):
    group = trained(3)
    again = bitopk.LocalGroup(3, Compression.topk(0.01, exchange="allgather", dense_below=2))
    again.load_state_dict(checkpoint.join(list(reversed(group.state_dict()["parts"]))))
    with caplog.at_level(logging.WARNING, "bitopk"):
        again.allreduce(make_grads(SHAPES, 3, "zeros", 0), scale=2.0)
    assert "density" in caplog.text
    again.rollback()
    assert_state(again, snapshot(group, 3), "after loading")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda parts: parts.pop(), "ranks 0 to 2"),
        (lambda parts: parts.append(parts[0]), "ranks 0 to 2"),
        (lambda parts: parts.clear(), "no parts"),
        (lambda parts: parts[1].update(tensors='tensor 0: "y" float32[1]'), "of which tensors"),
        (lambda parts: parts[1].update(tensors="nonsense"), "nonsense"),
        (lambda parts: parts[1].update(scale=9.0), "scale differs"),
        (lambda parts: parts[1]["server_layout"].pop("large"), "server_layout"),
        (lambda parts: parts[1].update(schedule_step=9), "schedule_step differs"),
        (lambda parts: parts[1].update(format=1), "format"),
        (lambda parts: parts[1]["worker_memory"].update(small=np.float32([np.nan])), "small"),
        (lambda parts: parts[1].pop("worker_memory"), "worker_memory"),
    ],
)
def test_a_damaged_whole_state_is_refused_by_name(damage, words):
    group = trained(3)
    state = copy.deepcopy(group.state_dict())
    damage(state["parts"])
    with pytest.raises(InvalidArgumentError, match=words):
        group.load_state_dict(state)


def test_a_part_of_another_world_says_what_is_needed():
    part = trained(3).state_dict()["parts"][1]
    with pytest.raises(InvalidArgumentError, match=r"rank 1 of 3.*checkpoint.join"):
        checkpoint.part_for(part, 0, 2)


def test_the_size_is_that_of_the_memories():
    state = trained(2, Compression.topk(0.05, exchange="sharded", dense_below=2)).state_dict()
    entries = 60_000 + 1500 + 3
    assert checkpoint.num_bytes(state) == 4 * entries * 3  # two worker memories, one server memory


def test_bytes_of_a_peer_that_make_no_sense_are_refused():
    with pytest.raises(WireFormatError, match="damaged"):
        checkpoint._unpack(b"\xff" * 20)


@pytest.mark.parametrize("exchange", ["allgather", "sharded"])
def test_real_ranks_gather_on_one_and_go_on_as_others(tmp_path, exchange):
    path = tmp_path / "state.pt"
    for ranks, mode in ((3, "save"), (3, "load"), (2, "load")):
        done = launch(ranks, "gathered.py", exchange, mode, path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"{mode} with {ranks} ranks" in done.stdout


@pytest.mark.parametrize("exchange", ["allgather", "sharded"])
def test_memories_that_meet_dense_steps_are_sent_whole(exchange):
    group = trained(3, Compression.topk(0.05, exchange=exchange, dense_below=0))
    later = Compression.topk(0.05, exchange=exchange, dense_below=0, start_step=100)
    again = bitopk.LocalGroup(3, later)
    again.load_state_dict(group.state_dict())
    expected = outstanding(group, 3, "average")
    (out, *_) = again.allreduce(make_grads(SHAPES, 3, "zeros", 0), scale=2.0)
    for name, memory in group.server_memory().items():
        np.testing.assert_allclose(out[name], expected[name] + memory, rtol=1e-5, atol=1e-5)
    assert not any(memory.any() for memory in again.server_memory().values())


def test_a_state_of_another_operation_is_refused_before_the_first_step_too():
    group, again = trained(2), bitopk.LocalGroup(2, SPEC)
    again.load_state_dict(group.state_dict())
    for _ in range(2):  # not with empty memories at the second attempt
        with pytest.raises(InvalidArgumentError, match=r"average.*sum|sum.*average"):
            again.allreduce(make_grads(SHAPES, 2, "zeros", 0), op="sum")


def test_a_state_that_does_not_fit_is_refused_again_and_again():
    again = bitopk.LocalGroup(2, SPEC)
    again.load_state_dict(trained(2).state_dict())
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match="tensor"):
            again.allreduce([{"other": np.ones(2000, np.float32)}] * 2)


def test_what_a_caller_multiplies_by_n_is_resharded_as_a_sum():
    worker, server = checkpoint.resharding_factors(checkpoint.TIMES_N, 2, 4)
    assert (float(worker), float(server)) == (1.0, 0.5)
    assert [float(f) for f in checkpoint.resharding_factors("average", 2, 4)] == [2.0, 1.0]
    assert [float(f) for f in checkpoint.resharding_factors("sum", 2, 4)] == [1.0, 1.0]


def test_gathering_memory_leaves_the_error_of_a_step_to_its_work():
    spec = Compression.topk(0.5, nonfinite="raise", dense_below=0)
    done = launch(1, "late_error.py", repr(spec))
    assert done.returncode == 0, done.stdout + done.stderr
