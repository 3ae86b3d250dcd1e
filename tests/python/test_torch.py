# SPDX-License-Identifier: Apache-2.0
"""CPU torch tensors go in and out like arrays, without copies on the way in."""

import bitopk
import numpy as np
import pytest
from bitopk import Compression
from support import assert_bits, make_grads, make_pair

torch = pytest.importorskip("torch")

SHAPES = {"weight": (64, 50), "bias": (64,), "scalar": (), "empty": (0, 3)}


def to_torch(grads):
    """Return tensors that share memory with the arrays."""
    return [{name: torch.from_numpy(x) for name, x in grad.items()} for grad in grads]


@pytest.mark.parametrize("exchange", ["allgather", "sharded"])
def test_tensors_give_the_same_bits_as_arrays(exchange):
    group, oracle = make_pair(3, Compression.topk(0.05, exchange=exchange, dense_below=0))
    for step in range(5):
        grads = make_grads(SHAPES, 3, "normal", step)
        outs = group.allreduce(to_torch(grads))
        expected = oracle.allreduce(grads)
        for rank in range(3):
            for name in SHAPES:
                assert isinstance(outs[rank][name], torch.Tensor)
                assert outs[rank][name].dtype == torch.float32
                assert_bits(outs[rank][name].numpy(), expected[rank][name], f"{name} step {step}")


def test_gradients_of_parameters_that_require_grad_are_accepted():
    group = bitopk.LocalGroup(1, Compression.topk(1.0, dense_below=0))
    parameter = torch.nn.Parameter(torch.arange(5, dtype=torch.float32))
    (parameter * parameter).sum().backward()
    (out,) = group.allreduce([{"p": parameter.grad}])
    assert torch.equal(out["p"], parameter.grad)


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (lambda: torch.zeros(3000, dtype=torch.float64), ["x", "float64"]),
        (lambda: torch.zeros(3000).to_sparse(), ["x", "sparse"]),
        (lambda: torch.zeros(3000, device="meta"), ["x", "meta"]),
    ],
    ids=["float64", "sparse", "meta"],
)
def test_tensors_that_cannot_be_read_are_refused_by_name(tensor, words):
    group = bitopk.LocalGroup(1, Compression.topk(0.1))
    group.allreduce([{"x": torch.ones(3000)}])
    before = np.array(group.worker_memory(0)["x"], copy=True)
    with pytest.raises((bitopk.errors.InvalidArgumentError, TypeError)) as caught:
        group.allreduce([{"x": tensor()}])
    for word in words:
        assert word in str(caught.value)
    assert_bits(group.worker_memory(0)["x"], before, "worker memory")


def test_import_of_bitopk_does_not_import_torch():
    import subprocess
    import sys

    code = (
        "import bitopk, sys; assert 'torch' not in sys.modules; assert 'horovod' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
