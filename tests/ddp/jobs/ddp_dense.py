# SPDX-License-Identifier: Apache-2.0
"""One rank of a job that compares `topk_hook` at density 1 with DDP itself, in many modes."""

import contextlib

import bitopk
import torch
from bitopk.ddp import TopKState, topk_hook
from ddp_models import (
    RANK,
    TORCH_2,
    WORLD_SIZE,
    Bag,
    Branching,
    all_objects,
    batch,
    check_close,
    check_replicas,
    descend,
    loss_of,
    make,
    start,
    wrap,
)
from torch.utils.checkpoint import checkpoint

ALL = bitopk.Compression.topk(1.0, dense_below=0)
NUM_STEPS = 10


def always(step, part):
    """Every rank uses the branch."""
    return True


def sometimes(step, part):
    """Some ranks use the branch in some steps, no rank in others."""
    return step % 3 == 0 or (step % 3 == 1 and RANK == 0)


def in_one_part(step, part):
    """Use the branch in only one of the backward passes of a step, never in the last."""
    return part == 0 and step % 3 > 0


def run_steps(model, uses, parts, set_to_none):
    """Train; yield after every step."""
    for step in range(NUM_STEPS):
        # A static graph has to see one synchronised pass first.
        num_parts = parts if step > 0 else 1
        for part in range(num_parts):
            last = part == num_parts - 1
            with contextlib.nullcontext() if last else model.no_sync():
                options = {} if uses is always else {"use_branch": uses(step, part)}
                loss_of(model, batch(step, part), **options).backward()
        descend(model)
        model.zero_grad(set_to_none=set_to_none)
        yield step


def compare(what, kind=Branching, uses=always, parts=1, set_to_none=True, model=None, **options):
    """Train one model with the hook and one without, and compare after every step."""
    dense = wrap(make(kind, **(model or {})), **options)
    ours = wrap(make(kind, **(model or {})), **options)
    state = TopKState(ALL, ours.named_parameters())
    ours.register_comm_hook(state, topk_hook)
    steps = zip(
        run_steps(dense, uses, parts, set_to_none), run_steps(ours, uses, parts, set_to_none)
    )
    for step, _ in steps:
        check_close(ours, dense, f"{what}, step {step}", bits=WORLD_SIZE == 2)
    torch_1_forgets = not TORCH_2 and uses is in_one_part  # replicas diverge, without a hook too
    if not torch_1_forgets:
        check_replicas(ours, what)
    assert state.stats().residual_norm == 0.0
    assert state.stats().steps == NUM_STEPS
    state.close()
    print(what, flush=True)


def compare_narrow(dtype):
    """Compare a narrow model with averages in float32; the rounding of a result is not lost."""
    ours = wrap(Bag(dtype, dtype))
    reference = Bag(dtype, dtype)
    state = TopKState(ALL, ours.named_parameters())
    ours.register_comm_hook(state, topk_hook)
    for step in range(NUM_STEPS):
        loss_of(ours, batch(step)).backward()
        local = Bag(dtype, dtype)
        local.load_state_dict(reference.state_dict())
        loss_of(local, batch(step)).backward()
        everywhere = all_objects([p.grad.float() for p in local.parameters()])
        for p, *parts in zip(reference.parameters(), *everywhere):
            p.grad = torch.stack(parts).mean(dim=0).to(dtype)
        descend(ours)
        descend(reference)
        ours.zero_grad(set_to_none=True)
    step_of_type = torch.finfo(dtype).eps
    check_close(ours.module, reference, f"{dtype}", rtol=4 * step_of_type, atol=step_of_type)
    check_replicas(ours, f"{dtype}")
    state.close()
    print(dtype, flush=True)


def main():
    """Run all cases."""
    start()
    compare("plain")
    compare("one large bucket", bucket_cap_mb=25)
    compare("static graph", static_graph=True)
    compare("static graph, unused", static_graph=True, model={"unused": True})
    compare("static graph, checkpointed", kind=Checkpointed, static_graph=True)
    compare("bucket views", gradient_as_bucket_view=True)
    compare("bucket views, zeroed", gradient_as_bucket_view=True, set_to_none=False)
    compare("no_sync", parts=3)
    compare("no_sync, bucket views", parts=2, gradient_as_bucket_view=True, set_to_none=False)
    for views in (False, True):
        for set_to_none in (False, True):
            options = {
                "find_unused_parameters": True,
                "gradient_as_bucket_view": views,
                "set_to_none": set_to_none,
                "model": {"unused": True},
            }
            what = f"find unused, views={views}, set_to_none={set_to_none}"
            compare(what, uses=sometimes, **options)
            compare(f"{what}, no_sync", uses=sometimes, parts=2, **options)
            compare(f"{what}, no_sync in one part", uses=in_one_part, parts=2, **options)
    if TORCH_2:  # torch 1 has an internal error there, without a hook too
        compare("static graph, no_sync", static_graph=True, parts=2)
        compare(
            "static graph, no_sync, views, unused",
            static_graph=True,
            gradient_as_bucket_view=True,
            parts=2,
            model={"unused": True},
        )
    types = {"dtypes": (torch.float32, torch.float64, torch.float32)}
    compare("float64", kind=MixedBag, model=types)
    compare("float64, static graph", kind=MixedBag, model=types, static_graph=True)
    for dtype in [torch.float16] + [torch.bfloat16] * TORCH_2:  # Gloo of torch 1 knows no bfloat16
        compare_narrow(dtype)
    print("all equal")


class Checkpointed(Branching):
    """The branch is computed again in the backward pass, and used twice."""

    def forward(self, x):
        """Return the outputs."""
        x = torch.tanh(self.first(x))
        for _ in range(2):
            x = x + checkpoint(lambda y: torch.tanh(self.branch(y)), x, use_reentrant=True)
        return self.last(x)


class MixedBag(Bag):
    """Parameters of several types."""

    def __init__(self, dtypes):
        super().__init__(*dtypes)


if __name__ == "__main__":
    main()
