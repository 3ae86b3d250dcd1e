# SPDX-License-Identifier: Apache-2.0
"""Laws of the memories: identities, commit and rollback, changes of scale and density."""

import bitopk
import numpy as np
import pytest
from bitopk import Compression
from support import (
    assert_bits,
    assert_dicts,
    assert_state,
    make_grads,
    make_pair,
    snapshot,
    step_both,
)

EXCHANGES = ("allgather", "sharded")
SHAPES = {"a": (60_000,), "b": (1100,), "small": (7,)}


def flat(memories):
    """One float64 vector of a dict of arrays."""
    return np.concatenate([np.asarray(memories[n], np.float64).ravel() for n in sorted(memories)])


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_corrected_gradient_is_sent_plus_memory(exchange):
    """a = u + m: with one rank and unidirectional exchange v is u."""
    spec = Compression.topk(0.05, 1.0, exchange=exchange, dense_below=0)
    group = bitopk.LocalGroup(1, spec)
    old = np.zeros(5000, np.float32)
    for step in range(10):
        (grad,) = make_grads({"x": (5000,)}, 1, "normal", step)
        corrected = old + grad["x"]
        (out,) = group.allreduce([grad])
        m = np.array(group.worker_memory(0)["x"])
        assert (out["x"] + m == corrected).all()
        assert not np.any((out["x"] != 0) & (m != 0))
        assert np.count_nonzero(out["x"]) == 250
        old = m


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_server_sum_is_sent_plus_memory(exchange):
    """q = v + delta: at uplink density 1 the sum s is that of the gradients."""
    spec = Compression.topk(1.0, 0.05, exchange=exchange, dense_below=0)
    group = bitopk.LocalGroup(3, spec)
    old = np.zeros(50_000, np.float32)
    for step in range(6):
        grads = make_grads({"x": (50_000,)}, 3, "normal", step)
        s = np.zeros(50_000, np.float32)
        for grad in grads:
            s = s + grad["x"]
        q = old + s
        outs = group.allreduce(grads, op="sum")
        delta = np.array(group.server_memory()["x"])
        for out in outs:
            assert (out["x"] + delta == q).all()
        assert not np.any((outs[0]["x"] != 0) & (delta != 0))
        old = delta


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("op", ["average", "sum"])
@pytest.mark.parametrize("value_format", ["float32", "bfloat16"])
def test_the_virtual_iterate_follows_plain_sgd(op, value_format, exchange):
    world_size, d = 4, 3000
    p = 1 / world_size if op == "average" else 1.0
    spec = Compression.topk(
        0.01, scope="global", value_format=value_format, exchange=exchange, dense_below=0
    )
    group = bitopk.LocalGroup(world_size, spec)
    w, plain = np.zeros(d), np.zeros(d)
    for step in range(30):
        grads = make_grads({"x": (d - 10,), "y": (10,)}, world_size, "normal", step)
        w -= flat(group.allreduce(grads, op=op)[0])
        plain -= p * sum(flat(grad) for grad in grads)
        outstanding = p * sum(flat(group.worker_memory(r)) for r in range(world_size))
        virtual = w - outstanding - flat(group.server_memory())
        np.testing.assert_allclose(virtual, plain, atol=1e-4)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_rolled_back_step_never_happened(exchange):
    spec = Compression.topk(0.05, exchange=exchange)
    group, oracle = make_pair(3, spec)
    for step in range(8):
        before = make_grads(SHAPES, 3, "normal", step)
        step_both(group, oracle, before, f"step {step}")
        group.commit()
        oracle.commit()
        kept = snapshot(group, 3)
        group.allreduce(make_grads(SHAPES, 3, ("few", "layered", "normal")[step % 3], 100 + step))
        group.rollback()
        assert_state(group, kept, f"after rollback {step}")


def test_rollback_of_the_first_step_leaves_zeros():
    group, oracle = make_pair(3, Compression.topk(0.05))
    grads = make_grads(SHAPES, 3, "normal", 0)
    group.allreduce(grads)
    group.rollback()
    for rank in range(3):
        assert not any(np.any(m) for m in group.worker_memory(rank).values())
    assert not any(np.any(m) for m in group.server_memory().values())
    step_both(group, oracle, grads, "step after it")


def test_rollback_without_commit_goes_back_one_step():
    group, oracle = make_pair(2, Compression.topk(0.05))
    for step in range(3):
        step_both(group, oracle, make_grads(SHAPES, 2, "normal", step), f"step {step}")
    group.rollback()
    oracle.rollback()
    assert_state(group, oracle, "after rollback")
    step_both(group, oracle, make_grads(SHAPES, 2, "normal", 9), "step after it")


def test_rollback_twice_or_after_commit_changes_nothing():
    group, oracle = make_pair(2, Compression.topk(0.05))
    for step in range(2):
        step_both(group, oracle, make_grads(SHAPES, 2, "normal", step), f"step {step}")
    group.rollback()
    oracle.rollback()
    group.rollback()
    assert_state(group, oracle, "after two rollbacks")
    step_both(group, oracle, make_grads(SHAPES, 2, "normal", 5), "next step")
    group.commit()
    oracle.commit()
    group.commit()
    group.rollback()
    assert_state(group, oracle, "rollback after commit")


def test_rollback_restores_the_unit_of_the_memories():
    group, oracle = make_pair(2, Compression.topk(0.05))
    for step, scale in enumerate((4.0, 4.0)):
        step_both(group, oracle, make_grads(SHAPES, 2, "normal", step), f"step {step}", scale=scale)
    group.commit()
    oracle.commit()
    group.allreduce(make_grads(SHAPES, 2, "normal", 7), scale=1024.0)
    group.rollback()
    step_both(group, oracle, make_grads(SHAPES, 2, "normal", 8), "step after it", scale=2.0)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("decay", [1.0, 0.9])
def test_memories_follow_the_scale(decay, exchange):
    spec = Compression.topk(0.05, exchange=exchange, memory_decay=decay)
    group, oracle = make_pair(3, spec)
    for step, scale in enumerate((1.0, 1.0, 65536.0, 32768.0, 0.1, 0.3, 0.3, 1e-10, 1e10)):
        grads = make_grads(SHAPES, 3, "normal", step)
        for grad in grads:
            for x in grad.values():
                x *= np.float32(scale)
        step_both(group, oracle, grads, f"step {step}", scale=scale)


def test_scaling_by_powers_of_two_changes_nothing_else():
    spec = Compression.topk(0.05)
    plain, scaled = bitopk.LocalGroup(2, spec), bitopk.LocalGroup(2, spec)
    for step, scale in enumerate((1.0, 1024.0, 512.0, 2.0, 2.0)):
        grads = make_grads(SHAPES, 2, "normal", step)
        outs = plain.allreduce(grads)
        larger = [{n: x * np.float32(scale) for n, x in grad.items()} for grad in grads]
        for name, x in scaled.allreduce(larger, scale=scale)[0].items():
            assert_bits(x / np.float32(scale), outs[0][name], f"step {step} {name}")


def test_memories_are_copies_that_a_caller_may_change():
    group, oracle = make_pair(2, Compression.topk(0.05))
    step_both(group, oracle, make_grads(SHAPES, 2, "normal", 0), "step 0")
    for memory in (group.worker_memory(0)["a"], group.server_memory()["a"]):
        if memory.flags.writeable:
            memory.fill(1)
    assert_state(group, oracle, "after the change")
    step_both(group, oracle, make_grads(SHAPES, 2, "normal", 1), "step 1")


def test_outputs_stay_valid_after_the_next_step():
    group = bitopk.LocalGroup(2, Compression.topk(0.05))
    first = group.allreduce(make_grads(SHAPES, 2, "normal", 0))
    kept = [{n: np.array(x, copy=True) for n, x in out.items()} for out in first]
    group.allreduce(make_grads(SHAPES, 2, "few", 1))
    for rank in range(2):
        assert_dicts(first[rank], kept[rank], f"rank {rank}")
