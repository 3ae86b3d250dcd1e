# SPDX-License-Identifier: Apache-2.0
"""One rank of a job that compares every step with the oracle.

Usage: steps.py JSON with the keys spec (options of Compression.topk), shapes, steps, op,
bucket_bytes, library ("numpy" or "torch") and mode ("plain", "out", "async").
"""

import json
import sys

import bitopk
import numpy as np
from oracle import OracleGroup
from support import assert_dicts, make_grads


def as_library(grad, library):
    """Return the gradient as arrays or as tensors that share their memory."""
    if library == "numpy":
        return grad
    import torch

    return {name: torch.from_numpy(x) for name, x in grad.items()}


def allreduce(group, grad, mode, **options):
    """Call the group in one of the ways it can be called."""
    if mode == "async":
        work = group.allreduce_async(grad, **options)
        out = work.wait()
        assert work.is_completed()
        return out
    if mode == "out":  # the results overwrite the gradients
        group.allreduce(grad, out=grad, **options)
        return grad
    return group.allreduce(grad, **options)


def main():
    """Run the steps."""
    job = json.loads(sys.argv[1])
    spec = bitopk.Compression.topk(**job["spec"])
    with bitopk.init(spec, timeout=30.0, bucket_bytes=job.get("bucket_bytes", 32 << 20)) as group:
        oracle = OracleGroup.from_spec(group.size, spec)
        shapes = {name: tuple(shape) for name, shape in job["shapes"].items()}
        rng = np.random.default_rng(group.rank)
        for step in range(job.get("steps", 10)):
            kind = ("normal", "few", "layered")[step % 3]
            grads = make_grads(shapes, group.size, kind, step)
            expected = oracle.allreduce(grads, op=job.get("op", "average"))
            # Every rank submits in an order of its own.
            mine = {str(n): grads[group.rank][str(n)].copy() for n in rng.permutation(list(shapes))}
            mine = as_library(mine, job.get("library", "numpy"))
            out = allreduce(group, mine, job.get("mode", "plain"), op=job.get("op", "average"))
            what = f"rank {group.rank} step {step}"
            assert_dicts(out, expected[group.rank], what)
            memory = oracle.worker_memory(group.rank)
            assert_dicts(group.worker_memory(), memory, f"{what}: worker memory", rest_zero=True)
            if step % 4 == 3:  # a collective call
                memory = oracle.server_memory()
                assert_dicts(group.server_memory(), memory, f"{what}: server", rest_zero=True)
        stats = group.stats()
        assert stats.steps == job.get("steps", 10)
        assert (stats.bytes_sent > 0) == (group.size > 1)
        print(f"rank {group.rank} of {group.size}: all equal")


if __name__ == "__main__":
    main()
