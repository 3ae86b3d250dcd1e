# SPDX-License-Identifier: Apache-2.0
"""One rank of a job with a loss scale that changes, as under automatic mixed precision."""

import bitopk
import numpy as np
import torch
from ddp_models import (
    LR,
    RANK,
    SPEC,
    TORCH_2,
    Bag,
    Branching,
    all_objects,
    batch,
    check_close,
    check_replicas,
    descend,
    hooked,
    loss_of,
    make,
    start,
)
from support import assert_bits, assert_dicts

GROWTH_INTERVAL = 4


class Scaler:
    """What GradScaler does, which torch 1 has for GPUs only."""

    def __init__(self, scale):
        self.value = scale
        self._good_steps = 0

    def get_scale(self):
        """Return the factor of the loss."""
        return self.value

    def step(self, model):
        """Unscale and descend, unless a gradient overflowed; return whether it did."""
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        if not all(bool(g.isfinite().all()) for g in grads):
            self.value /= 2.0
            self._good_steps = 0
            return True
        for g in grads:
            g.div_(self.value)
        descend(model)
        self._good_steps += 1
        if self._good_steps % GROWTH_INTERVAL == 0:
            self.value *= 2.0
        return False


def powers_of_two():
    """A scale that is a power of two, and changes, is as good as none, bit for bit."""
    plain, plain_state = hooked(make(Branching))
    scaler = Scaler(1024.0)
    scaled, scaled_state = hooked(make(Branching), scale=scaler.get_scale)
    for step in range(3 * GROWTH_INTERVAL):
        loss_of(plain, batch(step)).backward()
        descend(plain)
        scale = scaler.get_scale()
        (loss_of(scaled, batch(step)) * scale).backward()
        assert not scaler.step(scaled)
        check_close(scaled, plain, f"scale {scale}", bits=True)
        for read in ("worker_memory", "server_memory"):
            expected = getattr(plain_state, read)()
            for name, memory in getattr(scaled_state, read)().items():
                assert_bits(memory / np.float32(scale), expected[name], f"{read} of {name}")
        plain.zero_grad()
        scaled.zero_grad()
    assert scaler.get_scale() == 1024.0 * 8
    plain_state.close()
    scaled_state.close()


def overflow(make_model, step_of_rank_1, **options):
    """An overflow on one rank skips the step everywhere and leaves all memories as they were."""
    scaler = Scaler(2.0**8)
    model, state = hooked(
        make_model(), bitopk.Compression.topk(0.1), options, scale=scaler.get_scale
    )
    losses = []
    for step in range(20):
        before = (state.worker_memory(), state.server_memory()) if step else None
        loss = loss_of(model, batch(0))
        bad = step == step_of_rank_1 and RANK == 1
        (loss * (float("inf") if bad else scaler.get_scale())).backward()
        scale = scaler.get_scale()
        skipped = scaler.step(model)
        assert skipped == (step == step_of_rank_1), step
        assert all_objects(scaler.get_scale()) == [scaler.get_scale()] * len(all_objects(0))
        if skipped:
            assert scaler.get_scale() == scale / 2
            assert_dicts(state.worker_memory(), before[0], "worker memory after an overflow")
            assert_dicts(state.server_memory(), before[1], "server memory after an overflow")
        losses.append(loss.item())
        model.zero_grad()
    assert state.stats().dropped_steps == 1
    check_replicas(model, "after an overflow")
    assert losses[-1] < losses[0]
    state.close()


def grad_scaler():
    """The same with torch's own GradScaler, and half precision as autocast makes it."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=GROWTH_INTERVAL)
    model, state = hooked(make(Branching), scale=scaler.get_scale)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(12):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, batch(step))
        before = state.worker_memory() if step else None
        scale = scaler.get_scale()
        (scaler.scale(loss) * (float("inf") if step == 6 and RANK == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        if step == 6:
            assert scaler.get_scale() == scale / 2
            assert_dicts(state.worker_memory(), before, "worker memory after an overflow")
        assert len(set(all_objects(scaler.get_scale()))) == 1
    assert state.stats().dropped_steps == 1
    check_replicas(model, "GradScaler")
    state.close()


def main():
    """Run all cases."""
    start()
    powers_of_two()
    overflow(lambda: make(Branching), 7)
    overflow(lambda: make(Branching), 7, find_unused_parameters=True)
    overflow(lambda: Bag(torch.float16, torch.float16), 9, gradient_as_bucket_view=True)
    if TORCH_2:  # Gloo of torch 1 knows no bfloat16
        overflow(lambda: Bag(torch.bfloat16, torch.float32), 9)
        grad_scaler()
    assert SPEC.density == 0.01
    print("all equal")


if __name__ == "__main__":
    main()
