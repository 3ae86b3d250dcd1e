# SPDX-License-Identifier: Apache-2.0
"""`bitopk.init` and an optimizer's engine find Horovod, and say through which interface.

usage: init.py
"""

from __future__ import annotations

import logging
import sys

import bitopk
import horovod.torch as hvd
import numpy as np
import torch
from common import batch, make_model, wrap


def main() -> None:
    """Check a sum over the ranks in two groups, and log what both kinds of engine log."""
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    logging.getLogger("bitopk").setLevel(logging.INFO)
    hvd.init()
    spec = bitopk.Compression.topk(k=2, dense_below=0)
    with bitopk.init(spec, timeout=30.0) as first, bitopk.init(spec, timeout=30.0) as second:
        for group in (first, second):
            assert (group.rank, group.size) == (hvd.rank(), hvd.size())
            gradient = np.float32([0, group.rank + 1, 0, 10])
            out = group.allreduce({"x": gradient}, op="sum")["x"]
            size = group.size
            assert out.tolist() == [0, size * (size + 1) / 2, 0, 10 * size], out
    print(f"rank {hvd.rank()}: groups are right", flush=True)
    model = make_model()
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = wrap("wrapper", base, 0.5, model.named_parameters())
    model(batch(0)).square().mean().backward()
    optimizer.step()
    hvd.shutdown()


if __name__ == "__main__":
    main()
