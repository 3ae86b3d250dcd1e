# SPDX-License-Identifier: Apache-2.0
"""Every rank hands over its gradients in an order of its own, another one at every step.

usage: scrambled.py STEPS
"""

from __future__ import annotations

import sys

import bitopk
import horovod.torch as hvd
import numpy as np
import torch
from common import (
    ParameterBag,
    backward_exactly,
    coefficients,
    digest,
    generator,
    same_on_all_ranks,
    wrap,
)

SHAPES = {"a": (40,), "b": (5, 7), "c": (3,), "d": (200,), "e": (1,), "f": (64,)}


def main() -> None:
    """Compare two ways, both scrambled, with `LocalGroup`, which has no order."""
    hvd.init()
    torch.set_num_threads(1)
    num_steps = int(sys.argv[1])
    # Small messages, so that there are several of them and their order matters.
    spec = bitopk.Compression.topk(0.05, dense_below=4)
    models = {way: ParameterBag(SHAPES) for way in ("compression", "wrapper")}
    optimizers = {
        way: wrap(way, torch.optim.SGD(m.parameters(), lr=0.01), spec, m.named_parameters())
        for way, m in models.items()
    }
    expected = ParameterBag(SHAPES)
    simulated = dict(expected.named_parameters())
    group = bitopk.LocalGroup(hvd.size(), spec)
    reference = torch.optim.SGD(expected.parameters(), lr=0.01)
    for step in range(num_steps):
        everyone = []
        for rank in range(hvd.size()):
            gradients = coefficients(simulated, step, rank)
            random = generator(step, rank + 100)
            order = [list(SHAPES)[i] for i in torch.randperm(len(SHAPES), generator=random)]
            # One has no gradient, so that Horovod hands it over last, by the order of a set.
            gradients[order.pop()].zero_()
            everyone.append((order, gradients))
        order, gradients = everyone[hvd.rank()]
        for way, optimizer in optimizers.items():
            optimizer.zero_grad()
            parameters = dict(models[way].named_parameters())
            for name in order if way == "wrapper" else reversed(order):
                backward_exactly(parameters[name], gradients[name])
            optimizer.step()
        grads = [{n: g.numpy() for n, g in gradients.items()} for _, gradients in everyone]
        results = group.allreduce(grads)[0]
        for name, p in simulated.items():
            p.grad = torch.from_numpy(np.array(results[name]))
        reference.step()
    for way, model in models.items():
        assert digest(model) == digest(expected), f"{way} differs"
    same_on_all_ranks(digest(expected), "parameters")
    print(f"{num_steps} scrambled steps: right", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
