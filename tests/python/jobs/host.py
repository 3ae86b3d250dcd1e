# SPDX-License-Identifier: Apache-2.0
"""One rank started by torch.distributed's environment or by mpirun: two independent groups."""

import logging
import os
import sys

import bitopk
import numpy as np


def main() -> None:
    """Check a sum over the ranks, in two groups made one after the other."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    if sys.argv[1] == "torch":
        import torch

        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{os.environ['TORCH_STORE']}",
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
        )
        name = "torch.distributed"
    else:
        import mpi4py.MPI  # noqa: F401

        name = "mpi4py"
    spec = bitopk.Compression.topk(k=2, dense_below=0)
    with bitopk.init(spec, timeout=30.0) as first, bitopk.init(spec, timeout=30.0) as second:
        for group in (first, second):
            gradient = np.float32([0, group.rank + 1, 0, 10])
            out = group.allreduce({"x": gradient}, op="sum")["x"]
            size = group.size
            assert out.tolist() == [0, size * (size + 1) / 2, 0, 10 * size], out
        print(f"rank {first.rank} of {first.size} through {name}: right")


if __name__ == "__main__":
    main()
