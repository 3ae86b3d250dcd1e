# SPDX-License-Identifier: Apache-2.0
"""Rank 1 calls hvd.join() after some steps while the others go on.

usage: join.py WAY STEPS
"""

from __future__ import annotations

import os
import sys
import time

import bitopk
import horovod.torch as hvd
import torch
from common import batch, make_model, wrap


def main() -> None:
    """Print what the ranks that go on get, and how soon."""
    hvd.init()
    torch.set_num_threads(1)
    way, num_steps = sys.argv[1], int(sys.argv[2])
    model = make_model()
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    spec = bitopk.Compression.topk(0.1, dense_below=0)
    optimizer = wrap(way, base, spec, model.named_parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(batch(0)).square().mean().backward()
        optimizer.step()

    for _ in range(num_steps):
        step()
    if hvd.rank() == 1:
        hvd.join()
        return
    started = time.monotonic()
    try:
        step()
    except bitopk.InvalidArgumentError as error:
        print(f"refused after {time.monotonic() - started:.1f} s: {error}", flush=True)
        # Not before all ranks that go on have said so: the first to end takes the others along.
        time.sleep(2.0)
        os._exit(3)


if __name__ == "__main__":
    main()
