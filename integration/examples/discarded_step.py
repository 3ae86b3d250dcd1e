# SPDX-License-Identifier: Apache-2.0
"""Steps that the ranks may decide to throw away, as torchft's should_commit does.

    ./run exec bitopk launch -np 2 integration/examples/discarded_step.py

The model is left alone and `rollback` takes the step out of the memories, so that nothing of it is
sent later. All ranks must decide the same; here they do by the same seed, in a real job by a vote.
"""

import os
import random

import bitopk
import bitopk.torch
import numpy as np
import torch

SPEC = bitopk.Compression.topk(0.1, dense_below=0, rules=[("*bias", "dense")])


def main() -> None:
    """Fit a line; every fourth step or so is discarded."""
    torch.manual_seed(0)
    model = torch.nn.Linear(100, 1)
    target = torch.randn(100, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(1 + int(os.environ["RANK"]))
    vote = random.Random(7)
    discarded = 0
    with bitopk.torch.Reducer(SPEC) as reducer:
        for _ in range(100):
            x = torch.randn(128, 100, generator=data)
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), x @ target)
            loss.backward()
            works = [reducer.all_reduce_(p.grad, name) for name, p in model.named_parameters()]
            for work in works:
                work.wait()
            if vote.random() < 0.75:
                optimizer.step()
                reducer.commit()
                kept = reducer.worker_memory()["weight"]
            else:
                reducer.rollback()
                discarded += 1
                if discarded > 1:  # the memory is that of the last step that was kept
                    assert np.array_equal(reducer.worker_memory()["weight"], kept)
        print(f"loss at last {float(loss):.3f}, {discarded} steps discarded")


if __name__ == "__main__":
    main()
