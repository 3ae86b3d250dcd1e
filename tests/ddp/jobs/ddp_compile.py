# SPDX-License-Identifier: Apache-2.0
"""One rank of a job with compiled models: by default, and with DDP's reducer in Python."""

import sys

import bitopk
import torch
import torch._dynamo
from ddp_models import Branching, batch, check_close, hooked, loss_of, make, start, train


def main():
    """Compare a compiled model with one that is not; then see the other reducer refused."""
    start()
    plain, plain_state = hooked(make(Branching))
    ours, state = hooked(make(Branching))
    train(plain, range(6))
    compiled = torch.compile(ours, backend="aot_eager")
    train(compiled, range(6))
    check_close(ours, plain, "compiled", rtol=1e-5, atol=1e-6)
    assert state.stats().entries_up == plain_state.stats().entries_up

    torch._dynamo.config.optimize_ddp = "python_reducer"
    model, _ = hooked(make(Branching))
    try:
        loss_of(model, batch(0)).backward()
    except bitopk.InvalidArgumentError as error:
        assert "got a tuple, not a GradBucket" in str(error)
        assert "python_reducer" in str(error)
        print("refused")
    else:
        sys.exit("no error")


if __name__ == "__main__":
    main()
