# SPDX-License-Identifier: Apache-2.0
"""Gradients accumulated by hand over several batches, then reduced once.

    ./run exec bitopk launch -np 2 integration/examples/accumulation.py

Only the last pass of each step talks to the other ranks; what was accumulated is what is
compressed.
"""

import os

import bitopk
import bitopk.torch
import torch

BATCHES_PER_STEP = 4
SPEC = bitopk.Compression.topk(0.1, dense_below=0, rules=[("*bias", "dense")])


def main() -> None:
    """Fit a line, each rank on data of its own."""
    torch.manual_seed(0)  # the same model everywhere
    model = torch.nn.Linear(100, 1)
    target = torch.randn(100, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(1 + int(os.environ["RANK"]))
    with bitopk.torch.Reducer(SPEC) as reducer:
        for step in range(100):
            optimizer.zero_grad()
            total = 0.0
            for _ in range(BATCHES_PER_STEP):
                x = torch.randn(32, 100, generator=data)
                loss = torch.nn.functional.mse_loss(model(x), x @ target) / BATCHES_PER_STEP
                loss.backward()  # adds to what is there
                total += float(loss)
            if step == 0:
                print(f"loss at first {total:.3f}")
            works = [reducer.all_reduce_(p.grad, name) for name, p in model.named_parameters()]
            for work in works:
                work.wait()
            optimizer.step()
        print(f"loss at last {total:.3f}, {reducer.stats().bytes_sent} bytes sent")


if __name__ == "__main__":
    main()
