# SPDX-License-Identifier: Apache-2.0
"""One rank of a job with compiled models: by default, and with DDP's reducer in Python."""

import torch
import torch._dynamo
from ddp_models import Branching, batch, check_close, error_of, hooked, loss_of, make, start, train


def main():
    """Compare a compiled model with one that is not; then see the other reducer refused."""
    start()
    large = {"bucket_cap_mb": 25}  # the compiler of DDP wants no bucket smaller than the first
    plain, plain_state = hooked(make(Branching), options=large)
    ours, state = hooked(make(Branching), options=large)
    train(plain, range(6))
    compiled = torch.compile(ours, backend="aot_eager")
    train(compiled, range(6))
    check_close(ours, plain, "compiled", rtol=1e-5, atol=1e-6)
    assert state.stats().entries_up == plain_state.stats().entries_up

    torch._dynamo.config.optimize_ddp = "python_reducer"
    model, _ = hooked(make(Branching))
    error = error_of(lambda: loss_of(model, batch(0)).backward())
    assert "got a tuple, not a GradBucket" in str(error)
    assert "python_reducer" in str(error)
    print("refused")


if __name__ == "__main__":
    main()
