# SPDX-License-Identifier: Apache-2.0
"""NaN and Inf: seen by every rank in the same step, and never hidden in a memory."""

import numpy as np
import pytest
from bitopk import Compression
from bitopk.errors import NonFiniteGradientError
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
SHAPES = {"a": (60_000,), "b": (1500,), "small": (9,)}
BAD_VALUES = {
    "nan": np.float32(np.nan),
    "payload nan": np.array(0xFFABCDEF, np.uint32).view(np.float32)[()],
    "inf": np.float32(np.inf),
    "-inf": np.float32(-np.inf),
}


def spoiled_grads(value, name, rank=1, seed=50):
    """Gradients of three ranks, one entry of one tensor of one rank not finite."""
    grads = make_grads(SHAPES, 3, "normal", seed)
    grads[rank][name].reshape(-1)[-2] = value
    return grads


def prepared(policy, exchange, **options):
    """Return a group and oracle with two steps behind them."""
    spec = Compression.topk(0.05, nonfinite=policy, exchange=exchange, **options)
    group, oracle = make_pair(3, spec)
    for step in range(2):
        step_both(group, oracle, make_grads(SHAPES, 3, "normal", step), f"step {step}")
    return group, oracle


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("name", list(SHAPES))
@pytest.mark.parametrize("value", BAD_VALUES.values(), ids=BAD_VALUES)
def test_propagate_shows_the_entry_and_drops_all_memories(value, name, exchange):
    group, oracle = prepared("propagate", exchange)
    before = snapshot(group, 3)
    outs = step_both(group, oracle, spoiled_grads(value, name), "spoiled step")
    assert_state(group, before, "after the spoiled step")
    for out in outs:
        assert not np.isfinite(out[name].reshape(-1)[-2])
        for other in SHAPES.keys() - {name}:
            assert np.isfinite(out[other]).all()
    step_both(group, oracle, make_grads(SHAPES, 3, "normal", 60), "step after it")


def test_every_nan_arrives_with_the_same_bits():
    group, _ = prepared("propagate", "sharded")
    grads = spoiled_grads(BAD_VALUES["payload nan"], "a")
    grads[0]["small"][0] = np.inf
    grads[2]["small"][0] = -np.inf
    outs = group.allreduce(grads)
    for out in outs:
        assert out["a"].view(np.uint32)[-2] == 0x7FC00000
        assert out["small"].view(np.uint32)[0] == 0x7FC00000


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("name", list(SHAPES))
def test_skip_gives_zeros_and_drops_all_memories(name, exchange):
    group, oracle = prepared("skip", exchange)
    before = snapshot(group, 3)
    outs = group.allreduce(spoiled_grads(np.float32(np.nan), name))
    for out in outs:
        for tensor, shape in SHAPES.items():
            assert_bits(out[tensor], np.zeros(shape, np.float32), tensor)
    assert_state(group, before, "after the spoiled step")
    oracle.commit()
    step_both(group, oracle, make_grads(SHAPES, 3, "normal", 60), "step after it")


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("name", list(SHAPES))
def test_raise_raises_and_drops_all_memories(name, exchange):
    group, oracle = prepared("raise", exchange)
    before = snapshot(group, 3)
    with pytest.raises(NonFiniteGradientError):
        group.allreduce(spoiled_grads(np.float32(np.inf), name))
    assert_state(group, before, "after the spoiled step")
    oracle.commit()
    step_both(group, oracle, make_grads(SHAPES, 3, "normal", 60), "step after it")


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_more_bad_entries_than_are_sent(exchange):
    group, oracle = prepared("propagate", exchange)
    before = snapshot(group, 3)
    grads = make_grads(SHAPES, 3, "normal", 50)
    grads[0]["a"][::2] = np.nan
    grads[2]["a"][1000:50_000] = np.inf
    grads[2]["b"][:] = -np.inf
    step_both(group, oracle, grads, "spoiled step")
    assert_state(group, before, "after the spoiled step")
    step_both(group, oracle, make_grads(SHAPES, 3, "normal", 60), "step after it")


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("density_down", [0.05, 1.0])
def test_an_overflow_of_the_sum_counts_as_not_finite(density_down, exchange):
    spec = Compression.topk(0.05, density_down, exchange=exchange)
    group, oracle = make_pair(3, spec)
    step_both(group, oracle, make_grads(SHAPES, 3, "normal", 0), "step 0")
    before = snapshot(group, 3)
    grads = make_grads(SHAPES, 3, "normal", 1)
    for grad in grads:
        grad["a"][77] = 3e38
    outs = step_both(group, oracle, grads, "overflow", op="average")
    assert np.isinf(outs[0]["a"][77])
    assert_state(group, before, "after the overflow")
    step_both(group, oracle, make_grads(SHAPES, 3, "normal", 2), "step after it")


@pytest.mark.parametrize("value_format", ["float16", "bfloat16"])
def test_narrow_formats_keep_nan_and_inf(value_format):
    group, oracle = prepared("propagate", "sharded", value_format=value_format)
    for value in BAD_VALUES.values():
        outs = step_both(group, oracle, spoiled_grads(value, "a"), "spoiled step")
        assert np.isnan(outs[0]["a"][-2]) == np.isnan(value)


@pytest.mark.parametrize("scope", ["tensor", "global"])
def test_a_bad_entry_in_a_rule_drops_the_memories_of_all_rules(scope):
    rules = [("b", Compression.topk(k=3)), ("small", "dense")]
    group, oracle = prepared("propagate", "allgather", scope=scope, rules=rules)
    for name in SHAPES:
        before = snapshot(group, 3)
        step_both(group, oracle, spoiled_grads(np.float32(np.nan), name), f"spoiled {name}")
        assert_state(group, before, f"after spoiled {name}")


def test_rollback_after_a_bad_step_leaves_the_step_before_it():
    group, _ = prepared("propagate", "allgather")
    expected = snapshot(group, 3)
    group.allreduce(spoiled_grads(np.float32(np.nan), "a"))
    group.rollback()
    assert_state(group, expected, "after rollback")


def test_all_ranks_get_the_same_bytes_of_a_bad_step():
    for exchange in EXCHANGES:
        group, _ = prepared("propagate", exchange)
        outs = group.allreduce(spoiled_grads(np.float32(np.nan), "a"))
        for out in outs[1:]:
            assert_dicts(out, outs[0], exchange)
