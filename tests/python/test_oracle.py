# SPDX-License-Identifier: Apache-2.0
"""The oracle itself, against cases small enough to work out by hand."""

import numpy as np
import oracle
import pytest
from oracle import OracleGroup


def _f32(*values):
    return np.array(values, np.float32)


def _from_bits(*bits):
    return np.array(bits, np.uint32).view(np.float32)


def test_topk_orders_by_magnitude_and_breaks_ties_by_index():
    assert oracle.topk_indices(_f32(1, -3, 2, 3), 2).tolist() == [1, 3]
    assert oracle.topk_indices(_f32(1, -1, 1, 1), 2).tolist() == [0, 1]
    assert oracle.topk_indices(_f32(np.inf, np.nan, -np.inf, 5), 2).tolist() == [0, 1]
    assert oracle.topk_indices(_f32(0, -0.0, 0), 2).tolist() == [0, 1]
    assert oracle.topk_indices(_f32(1, 2), 5).tolist() == [0, 1]
    assert oracle.topk_indices(_f32(), 5).tolist() == []


def test_all_nans_are_equal():
    x = _from_bits(0x7F800001, 0xFFFFFFFF, 0x7FC00000, 0x7F800000)
    assert oracle.topk_indices(x, 2).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("d", "density", "kept"),
    [(0, 0.5, 0), (1, 0.001, 1), (5, 0.5, 3), (10, 0.25, 3), (10, 0.24, 2), (4, 1.0, 4)],
)
def test_halves_round_up(d, density, kept):
    assert oracle.count_kept(d, density, None) == kept


def test_two_bidirectional_steps_worked_out_by_hand():
    group = OracleGroup(2, k=1, dense_below=0)
    (out, same) = group.allreduce([{"a": _f32(4, 1, 0)}, {"a": _f32(0, 2, 3)}], op="average")
    # Up: rank 0 sends 4 at 0, rank 1 sends 3 at 2; s = (2, 0, 1.5); down: 2 at 0.
    assert out["a"].tolist() == same["a"].tolist() == [2, 0, 0]
    assert group.worker_memory(0)["a"].tolist() == [0, 1, 0]
    assert group.worker_memory(1)["a"].tolist() == [0, 2, 0]
    assert group.server_memory()["a"].tolist() == [0, 0, 1.5]
    (out, _) = group.allreduce([{"a": _f32(0, 0, 0)}, {"a": _f32(1, 0, 0)}], op="average")
    # Up: 1 and 2 at 1; s = (0, 1.5, 0); q = (0, 1.5, 1.5); the tie goes to the lower index.
    assert out["a"].tolist() == [0, 1.5, 0]
    assert group.worker_memory(1)["a"].tolist() == [1, 0, 0]
    assert group.server_memory()["a"].tolist() == [0, 0, 1.5]


def test_the_global_scope_selects_over_sorted_names():
    group = OracleGroup(1, k=1, scope="global", dense_below=0)
    (out,) = group.allreduce([{"b": _f32(2, 5), "a": _f32(-5, 1)}])
    assert out["a"].tolist() == [-5, 0]
    assert out["b"].tolist() == [0, 0]


def test_scale_and_decay_multiply_old_memories():
    group = OracleGroup(1, k=1, memory_decay=0.5, dense_below=0)
    group.allreduce([{"a": _f32(8, 4)}], scale=1.0)
    (out,) = group.allreduce([{"a": _f32(0, 0)}], scale=4.0)
    assert out["a"].tolist() == [0, 8]


@pytest.mark.parametrize(
    ("value_format", "value", "rounded"),
    [
        ("float16", 1.0 + 2**-11, 1.0),  # halfway, to even
        ("float16", 1.0 + 3 * 2**-11, 1.0 + 2**-9),
        ("float16", 1e30, 65504.0),
        ("float16", -70000.0, -65504.0),
        ("float16", 2.0**-26, 0.0),
        ("bfloat16", 1.0 + 2**-8, 1.0),
        ("bfloat16", 1.0 + 3 * 2**-8, 1.0 + 2**-6),
        ("bfloat16", 3.4028235e38, 3.3895314e38),
        ("bfloat16", np.inf, np.inf),
        ("float16", -np.inf, -np.inf),
    ],
)
def test_narrow_formats_round_to_even_and_saturate(value_format, value, rounded):
    assert oracle.round_values(_f32(value), value_format)[0] == np.float32(rounded)


@pytest.mark.parametrize("value_format", ["float32", "float16", "bfloat16"])
def test_every_nan_travels_as_one(value_format):
    x = oracle.round_values(_from_bits(0xFFFFFFFF, 0x7F800001), value_format)
    assert x.view(np.uint32).tolist() == [0x7FC00000] * 2


def test_rollback_restores_memories_and_scale():
    group = OracleGroup(1, k=1, dense_below=0)
    group.allreduce([{"a": _f32(8, 4)}], scale=2.0)
    group.commit()
    group.allreduce([{"a": _f32(1, 1)}], scale=64.0)
    group.rollback()
    assert group.worker_memory(0)["a"].tolist() == [0, 4]
    (out,) = group.allreduce([{"a": _f32(0, 0)}], scale=4.0)
    assert out["a"].tolist() == [0, 8]


def test_a_nonfinite_step_drops_all_memories():
    group = OracleGroup(2, k=1, dense_below=0)
    grads = [{"a": _f32(1, 2), "b": _f32(3, 1)}, {"a": _f32(1, 2), "b": _f32(np.nan, 1)}]
    (out, _) = group.allreduce(grads)
    assert out["b"].view(np.uint32).tolist() == [0x7FC00000, 0]
    assert out["a"].tolist() == [0, 2]
    assert group.worker_memory(0)["a"].tolist() == [0, 0]
