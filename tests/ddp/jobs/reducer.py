# SPDX-License-Identifier: Apache-2.0
"""One rank of a job that reduces by hand. Usage: reducer.py EXCHANGE. Prints a line per case."""

import random
import sys

import bitopk
import bitopk.torch
import numpy as np
import torch
from bitopk.errors import InvalidArgumentError, NonFiniteGradientError

SHAPES = {"a": (300, 200), "b": (1500,), "scalar": (), "empty": (0, 4), "small": (7,)}
SIZE = 2


def gradients(step, rank, dtype=torch.float32):
    """Tensors of one rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in SHAPES.items()}


def expected(group, step, op="average", scale=1.0):
    """What LocalGroup makes of the same gradients."""
    grads = [{n: g.numpy().copy() for n, g in gradients(step, r).items()} for r in range(SIZE)]
    return group.allreduce(grads, op=op, scale=scale)[0]


def assert_equal(actual, wanted, what):
    """Compare bit for bit."""
    for name, tensor in actual.items():
        assert tensor.numpy().tobytes() == np.asarray(wanted[name]).tobytes(), f"{what}: {name}"


def reduce_all(reducer, tensors, op="average", names=None):
    """Reduce all, then wait for all."""
    works = [reducer.all_reduce_(tensors[n], n, op) for n in names or tensors]
    for work in works:
        work.wait()
        assert work.is_completed()


def together(spec, rank):
    """All keys in one set, in any order once they are known, equal LocalGroup."""
    group = bitopk.LocalGroup(SIZE, spec)
    order = random.Random(rank)
    with bitopk.torch.Reducer(spec, scale=lambda: 2.0) as reducer:
        for step in range(20):
            tensors = gradients(step, rank)
            names = list(SHAPES)
            if step > 0:
                order.shuffle(names)
            reduce_all(reducer, tensors, names=names)
            assert_equal(tensors, expected(group, step, scale=2.0), f"step {step}")
        for name, memory in reducer.worker_memory().items():
            assert np.array_equal(memory, group.worker_memory(rank)[name])
        for name, memory in reducer.server_memory().items():
            assert np.array_equal(memory, group.server_memory()[name])


def one_by_one(spec, rank):
    """Waiting after every call makes sets of one key each; tensors are selected alone anyway."""
    group = bitopk.LocalGroup(SIZE, spec)
    with bitopk.torch.Reducer(spec) as reducer:
        for step in range(10):
            tensors = gradients(step, rank)
            for name, tensor in tensors.items():
                reducer.all_reduce_(tensor, name, "sum").wait()
            assert_equal(tensors, expected(group, step, op="sum"), f"step {step}")
        assert reducer.stats().steps == 10 * len(SHAPES)


def rollback(spec, rank):
    """A step that is taken back leaves nothing; one that is committed cannot be."""
    group = bitopk.LocalGroup(SIZE, spec)
    with bitopk.torch.Reducer(spec) as reducer:
        for step in range(12):
            tensors = gradients(step, rank)
            reduce_all(reducer, tensors)
            assert_equal(tensors, expected(group, step), f"step {step}")
            if step % 3 == 1:
                reducer.rollback()
                group.rollback()
            elif step % 3 == 2:
                reducer.commit()
                group.commit()
                reducer.rollback()


def resume(spec, rank):
    """A reducer that loads a state before its first step goes on bit for bit."""
    with bitopk.torch.Reducer(spec) as reducer:
        for step in range(3):
            reduce_all(reducer, gradients(step, rank))
            reducer.all_reduce_(gradients(step, rank)["b"], "extra").wait()
        state = reducer.state_dict()
        whole = bitopk.checkpoint.gather(reducer)
        assert (whole is None) == (rank != 0)
        with bitopk.torch.Reducer(spec) as again:
            again.load_state_dict(state)
            for step in range(3, 6):
                results = []
                for each in (reducer, again):
                    tensors = gradients(step, rank)
                    reduce_all(each, tensors)
                    tensors["extra"] = gradients(step, rank)["b"]
                    each.all_reduce_(tensors["extra"], "extra").wait()
                    results.append(tensors)
                assert_equal(results[0], {n: t.numpy() for n, t in results[1].items()}, "resumed")
            try:
                again.load_state_dict({"format": 2})
                raise AssertionError("not refused")
            except InvalidArgumentError:
                pass


def types(spec, rank):
    """Narrow types, float64 and integers keep their type; strides do not matter."""
    with bitopk.torch.Reducer(spec) as reducer:
        for step in range(5):
            half = torch.full((2000,), float(rank + 1)).half()
            brain = torch.full((50, 60), float(rank + 1)).bfloat16().t()
            double = torch.full((10,), rank + 1.0, dtype=torch.float64)
            number = torch.tensor([rank + 1, 10])
            tensors = {"half": half, "brain": brain, "double": double, "number": number}
            reduce_all(reducer, tensors, op="sum")
            assert double.tolist() == [3.0] * 10, step
            assert number.tolist() == [3, 20], step
            assert set(half.tolist()) <= {0.0, 3.0, 6.0, 9.0, 12.0, 15.0}, set(half.tolist())
            assert torch.count_nonzero(brain) > 0


def refusals(spec, rank):
    """What cannot be served is refused, and the reducer works on."""
    strict = bitopk.Compression.topk(0.1, nonfinite="raise", dense_below=0)
    with bitopk.torch.Reducer(strict) as reducer:
        reduce_all(reducer, {"x": torch.ones(100)})
        before = reducer.worker_memory()["x"]
        for arguments in (
            (torch.ones(99), "x"),
            (torch.ones(100).double(), "x"),
            (torch.ones(100).to_sparse(), "x"),
            (torch.ones(100), "x", "sum"),
            (torch.ones(100), "x", "product"),
            (torch.ones(100), ""),
            ([1.0], "x"),
        ):
            try:
                reducer.all_reduce_(*arguments).wait()
                raise AssertionError(f"{arguments[1:]} was not refused")
            except InvalidArgumentError:
                pass
        bad = torch.ones(100)
        if rank == 1:
            bad[3] = float("nan")
        work = reducer.all_reduce_(bad, "x")
        for _ in range(2):
            try:
                work.wait()
                raise AssertionError("NaN was not refused")
            except NonFiniteGradientError:
                pass
        assert np.array_equal(reducer.worker_memory()["x"], before)
        reduce_all(reducer, {"x": torch.ones(100)})


def main():
    """Run all cases."""
    exchange = sys.argv[1]
    spec = bitopk.Compression.topk(0.05, exchange=exchange, dense_below=0)
    with bitopk.init(bitopk.Compression.none) as group:
        rank = group.rank
    for case in (together, one_by_one, rollback, resume, types, refusals):
        case(spec, rank)
        print(f"{case.__name__}: ok", flush=True)


if __name__ == "__main__":
    main()
