# SPDX-License-Identifier: Apache-2.0
"""Local-step training: ranks train alone for a while, then exchange how far they came.

    ./run exec bitopk launch -np 2 integration/examples/local_steps.py

The outer gradient, old parameters minus new ones, is what is compressed; an outer SGD with momentum
applies its mean, as in DiLoCo [DFR+23].

References
----------
.. [DFR+23] A. Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models,
   arXiv 2311.08105, algorithm 1.
"""

import os

import bitopk
import bitopk.torch
import torch

LOCAL_STEPS = 10
SPEC = bitopk.Compression.topk(0.2, dense_below=0, rules=[("*bias", "dense")])


def main() -> None:
    """Fit a line, each rank on data of its own."""
    torch.manual_seed(0)
    model = torch.nn.Linear(100, 1)
    target = torch.randn(100, 1)
    outer = [p.detach().clone().requires_grad_() for p in model.parameters()]
    names = [name for name, _ in model.named_parameters()]
    inner_optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    outer_optimizer = torch.optim.SGD(outer, lr=0.7, momentum=0.5, nesterov=True)
    data = torch.Generator().manual_seed(1 + int(os.environ["RANK"]))
    with bitopk.torch.Reducer(SPEC) as reducer:
        for _ in range(30):
            for _ in range(LOCAL_STEPS):
                x = torch.randn(32, 100, generator=data)
                inner_optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(x), x @ target)
                loss.backward()
                inner_optimizer.step()
            works = []
            for name, old, new in zip(names, outer, model.parameters()):
                old.grad = old.detach() - new.detach()
                works.append(reducer.all_reduce_(old.grad, name))
            for work in works:
                work.wait()
            outer_optimizer.step()
            with torch.no_grad():  # every rank goes on from the same point
                for old, new in zip(outer, model.parameters()):
                    new.copy_(old)
        print(f"loss at last {float(loss):.3f}, {reducer.stats().bytes_sent} bytes sent")


if __name__ == "__main__":
    main()
