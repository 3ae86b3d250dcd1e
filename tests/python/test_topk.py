# SPDX-License-Identifier: Apache-2.0
"""The contract of `bitopk.topk`."""

import bitopk
import numpy as np
import oracle
import pytest
from bitopk.errors import InvalidArgumentError
from support import KINDS, assert_bits, make_vector

SIZES = (0, 1, 2, 3, 15, 16, 17, 31, 33, 63, 65, 1000, 1023, 1024, 1025, 4097, 65_537)


def assert_topk(x, k):
    """Compare with the oracle: kept indices and untouched values."""
    indices, values = bitopk.topk(x, k)
    expected = oracle.topk_indices(x, k)
    assert_bits(indices, expected.astype(np.uint32), f"indices, d={x.size}, k={k}")
    assert np.asarray(values).dtype == np.float32
    finite = ~np.isnan(x[expected])
    assert_bits(np.asarray(values)[finite], x[expected][finite], f"values, d={x.size}, k={k}")
    assert np.all(np.isnan(np.asarray(values)[~finite]))


@pytest.mark.parametrize("kind", KINDS)
def test_topk_equals_the_oracle(kind):
    for d in SIZES:
        x = make_vector(kind, d, np.random.default_rng(d))
        for k in sorted({1, 2, d // 100, d // 20, d // 2, d - 1, d, d + 5}):
            if k >= 1:
                assert_topk(x, k)


@pytest.mark.parametrize("kind", ["normal", "few", "equal", "sparse"])
def test_topk_of_a_million(kind):
    x = make_vector(kind, 1_000_000, np.random.default_rng(1))
    for k in (1, 1000, 10_000, 50_000, 999_999, 1_000_000):
        assert_topk(x, k)


def test_nan_and_inf_rank_above_everything_and_nans_are_equal():
    x = make_vector("normal", 5000, np.random.default_rng(2))
    x[100] = np.inf
    x[50] = -np.inf
    x[4000] = np.nan
    x[3000] = np.array(0xFF800001, np.uint32).view(np.float32)
    for k in range(1, 8):
        assert_topk(x, k)
    assert np.asarray(bitopk.topk(x, 2)[0]).tolist() == [3000, 4000]


def test_zeros_fill_up_to_k():
    x = np.array([0.0, -0.0, 3.0, 0.0], np.float32)
    indices, values = bitopk.topk(x, 3)
    assert np.asarray(indices).tolist() == [0, 1, 2]
    assert_bits(values, np.array([0.0, -0.0, 3.0], np.float32), "values")


def test_monotone_input_in_both_directions():
    for x in (np.arange(1, 100_001, dtype=np.float32), np.arange(100_000, 0, -1, dtype=np.float32)):
        for k in (1, 100, 5000):
            assert_topk(x, k)


def test_unaligned_slices_are_accepted():
    base = make_vector("normal", 4099, np.random.default_rng(3))
    for offset in range(1, 4):
        assert_topk(base[offset:], 50)


def test_the_input_is_not_changed():
    x = make_vector("normal", 3000, np.random.default_rng(4))
    before = x.copy()
    bitopk.topk(x, 30)
    assert_bits(x, before, "input")


def test_read_only_input_is_accepted():
    x = make_vector("normal", 3000, np.random.default_rng(5))
    x.flags.writeable = False
    assert_topk(x, 30)


@pytest.mark.parametrize(
    ("x", "k", "words"),
    [
        (np.zeros(4, np.float64), 1, ["float32", "float64"]),
        (np.zeros(4, np.int32), 1, ["float32", "int32"]),
        (np.zeros((2, 2), np.float32), 1, ["1"]),
        (np.zeros(8, np.float32)[::2], 1, ["contiguous"]),
        (np.zeros(4, np.float32), -1, ["k", "-1"]),
    ],
)
def test_bad_input_is_refused_and_named(x, k, words):
    with pytest.raises((InvalidArgumentError, TypeError)) as caught:
        bitopk.topk(x, k)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("k", [True, 1.5, None, "3"])
def test_k_must_be_an_int(k):
    with pytest.raises((InvalidArgumentError, TypeError)):
        bitopk.topk(np.ones(4, np.float32), k)


def test_torch_tensors_are_accepted():
    torch = pytest.importorskip("torch")
    x = make_vector("few", 5000, np.random.default_rng(6))
    indices, values = bitopk.topk(torch.from_numpy(x), 100)
    expected = oracle.topk_indices(x, 100)
    assert_bits(indices, expected.astype(np.uint32), "indices")
    assert_bits(values, x[expected], "values")
