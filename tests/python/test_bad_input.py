# SPDX-License-Identifier: Apache-2.0
"""Bad input of every kind: a clear error that names what matters, and nothing changes."""

import bitopk
import numpy as np
import pytest
from bitopk import Compression
from bitopk.errors import Error, InvalidArgumentError
from support import assert_state, make_grads, make_pair, snapshot, step_both

SHAPES = {"fc1.weight": (50, 40), "fc1.bias": (1200,), "small": (5,)}
WORLD_SIZE = 3


@pytest.fixture(params=["allgather", "sharded"])
def pair(request):
    """Return a group and oracle with two steps behind them."""
    group, oracle = make_pair(WORLD_SIZE, Compression.topk(0.05, exchange=request.param))
    for step in range(2):
        step_both(group, oracle, make_grads(SHAPES, WORLD_SIZE, "normal", step), f"step {step}")
    return group, oracle


def assert_refused(pair, grads, words, **options):
    """Check the error, and that memories, rollback and the next step are as without the call."""
    group, oracle = pair
    before = snapshot(group, WORLD_SIZE)
    with pytest.raises((InvalidArgumentError, TypeError)) as caught:
        group.allreduce(grads, **options)
    print(caught.value)
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in the message: {caught.value}"
    assert_state(group, before, "after the refused step")
    group.rollback()
    oracle.rollback()
    assert_state(group, oracle, "rollback after the refused step")
    step_both(group, oracle, make_grads(SHAPES, WORLD_SIZE, "normal", 9), "next step")


def good_grads():
    """Gradients that would be accepted."""
    return make_grads(SHAPES, WORLD_SIZE, "normal", 5)


@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.complex64, bool])
def test_wrong_dtype(pair, dtype):
    grads = good_grads()
    grads[1]["fc1.bias"] = grads[1]["fc1.bias"].astype(dtype)
    assert_refused(pair, grads, ["fc1.bias", np.dtype(dtype).name, "float32"])


def test_wrong_size_of_a_registered_name(pair):
    grads = good_grads()
    grads[2]["fc1.bias"] = np.zeros(1201, np.float32)
    assert_refused(pair, grads, ["fc1.bias", "1201", "1200"])


def test_new_name(pair):
    grads = good_grads()
    for grad in grads:
        grad["fc2.weight"] = np.zeros(10, np.float32)
    assert_refused(pair, grads, ["fc2.weight"])


def test_new_name_on_one_rank(pair):
    grads = good_grads()
    grads[1]["fc2.weight"] = np.zeros(10, np.float32)
    assert_refused(pair, grads, ["fc2.weight"])


def test_another_operation(pair):
    assert_refused(pair, good_grads(), ["sum", "average"], op="sum")


def test_unknown_operation(pair):
    assert_refused(pair, good_grads(), ["max", "average", "sum"], op="max")


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_scale(pair, scale):
    assert_refused(pair, good_grads(), ["scale", str(scale).rstrip("0").rstrip(".")], scale=scale)


@pytest.mark.parametrize("scale", ["1", None, 1j])
def test_scale_of_a_wrong_type(pair, scale):
    assert_refused(pair, good_grads(), ["scale"], scale=scale)


def test_wrong_number_of_ranks(pair):
    assert_refused(pair, good_grads()[:2], ["2", "3"])


def test_not_an_array(pair):
    grads = good_grads()
    grads[0]["small"] = [1.0] * 5
    assert_refused(pair, grads, ["small", "list"])


def test_not_a_dict(pair):
    assert_refused(pair, [[1.0], [2.0], [3.0]], ["list"])


def test_name_that_is_not_a_str(pair):
    grads = good_grads()
    grads[0][3] = np.zeros(5, np.float32)
    assert_refused(pair, grads, ["3"])


def test_unknown_option(pair):
    assert_refused(pair, good_grads(), ["sclae"], sclae=2.0)


def accepted_or_reason(group, grads):
    """Make the step; return "" if it was accepted, else the message of the refusal."""
    try:
        group.allreduce(grads)
    except (InvalidArgumentError, TypeError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("layout", ["strided", "fortran"])
def test_non_contiguous_tensors_are_copied_or_refused_by_name(pair, layout):
    group, oracle = pair
    grads = good_grads()
    weight = grads[1]["fc1.weight"]
    wide = np.repeat(weight, 2, axis=1)
    grads[1]["fc1.weight"] = wide[:, ::2] if layout == "strided" else np.asfortranarray(weight)
    reason = accepted_or_reason(group, grads)
    if reason:
        assert "fc1.weight" in reason
        assert "contiguous" in reason
    else:
        oracle.allreduce(grads)
    assert_state(group, oracle, f"after the step ({reason or 'accepted'})")


@pytest.mark.parametrize("world_size", [0, -1, 1.5, True, "2"])
def test_bad_world_size(world_size):
    with pytest.raises((InvalidArgumentError, TypeError), match="world_size"):
        bitopk.LocalGroup(world_size, Compression.topk(0.1))


@pytest.mark.parametrize("spec", [0, None, "topk", 2.0, {"density": 0.1}])
def test_bad_spec(spec):
    with pytest.raises((InvalidArgumentError, TypeError)):
        bitopk.LocalGroup(2, spec)


@pytest.mark.parametrize("density", [0.0, 1, float("nan"), 1.5, True])
def test_bad_densities_of_topk(density):
    with pytest.raises(InvalidArgumentError, match="density"):
        Compression.topk(density)


def test_ranks_that_start_with_different_tensors_are_both_named():
    group = bitopk.LocalGroup(2, Compression.topk(0.1))
    zeros = np.zeros(2000, np.float32)
    with pytest.raises(Error) as caught:
        group.allreduce([{"a": zeros, "b": zeros}, {"a": zeros, "b": zeros[:1999].copy()}])
    for word in ("b", "2000", "1999"):
        assert word in str(caught.value)


@pytest.mark.parametrize("rank", [-1, 2, 1.5])
def test_bad_rank(rank):
    group = bitopk.LocalGroup(2, Compression.topk(0.1))
    group.allreduce(make_grads({"x": (2000,)}, 2, "normal", 0))
    for call in (group.worker_memory, group.stats):
        with pytest.raises((InvalidArgumentError, TypeError, IndexError)):
            call(rank)


def test_unknown_keyword_of_the_group():
    with pytest.raises(TypeError, match="bucket_byte"):
        bitopk.LocalGroup(2, Compression.topk(0.1), bucket_byte=1)
