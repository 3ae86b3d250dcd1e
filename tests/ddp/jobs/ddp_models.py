# SPDX-License-Identifier: Apache-2.0
"""Models, data and comparisons that the DDP jobs share."""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import warnings

import bitopk
import numpy as np
import torch
import torch.distributed as dist
from bitopk.ddp import TopKState, topk_hook
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RANK = int(os.environ["RANK"])
WORLD_SIZE = int(os.environ["WORLD_SIZE"])
TORCH_2 = int(torch.__version__.split(".")[0]) >= 2
LR = 0.05
SPEC = bitopk.Compression.topk(0.01)


def start(**options):
    """Initialise torch.distributed through the file of TORCH_STORE, or as torchrun has it."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("bitopk").setLevel(logging.ERROR)  # tiny tensors do not pay, it says
    if "TORCH_STORE" in os.environ:
        options["init_method"] = f"file://{os.environ['TORCH_STORE']}"
        options.update(rank=RANK, world_size=WORLD_SIZE)
    dist.init_process_group("gloo", **options)


class Branching(nn.Module):
    """Two layers that are always used, one that a call may leave out, and one that nobody uses."""

    def __init__(self, unused=False):
        super().__init__()
        self.first = nn.Linear(40, 60)
        self.branch = nn.Linear(60, 60)
        self.last = nn.Linear(60, 30)
        if unused:
            self.never = nn.Linear(40, 50)

    def forward(self, x, use_branch=True):
        x = torch.tanh(self.first(x))
        if use_branch:
            x = x + torch.tanh(self.branch(x))
        return self.last(x)


class Bag(nn.Module):
    """Parameters of any type, used one by one: half precision has no matrix products on CPUs."""

    def __init__(self, *dtypes):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.bag = nn.ParameterList(
            [
                nn.Parameter(torch.randn(50, 40 + 7 * i, generator=generator).to(dtype))
                for i, dtype in enumerate(dtypes)
            ]
        )

    def forward(self, x, use_branch=True):
        return sum((p.to(x.dtype) * x[0, 0] + x[0, 1]).square().mean() for p in self.bag)


def make(kind, seed=0, **options):
    """Return a new model, equal on all ranks."""
    torch.manual_seed(seed)
    return kind(**options)


def wrap(model, **options):
    """Wrap a model with buckets small enough for several."""
    return DistributedDataParallel(model, **{"bucket_cap_mb": 0.01, **options})


def hooked(model, spec=SPEC, options=None, **state_options):
    """Wrap a model and register the hook; return both the wrapper and the state."""
    model = wrap(model, **(options or {}))
    state = TopKState(spec, model.named_parameters(), **state_options)
    model.register_comm_hook(state, topk_hook)
    return model, state


def batch(step, part=0, rank=RANK, size=8):
    """Return the inputs of one rank."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * part + rank)
    return torch.randn(size, 40, generator=generator)


def loss_of(model, x, **options):
    """Return a loss."""
    return model(x, **options).square().mean()


def gradients(model):
    """Return a copy of the gradients that there are, by name."""
    return {
        name.removeprefix("module."): p.grad.detach().clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def descend(model, lr=LR):
    """Make a step of plain SGD with the gradients that there are."""
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.add_(p.grad, alpha=-lr)


def train(model, steps):
    """Make some steps of plain SGD."""
    for step in steps:
        loss_of(model, batch(step)).backward()
        descend(model)
        model.zero_grad()


def error_of(call, kind=bitopk.InvalidArgumentError):
    """Return the error that a call raises."""
    try:
        call()
    except kind as error:
        return error
    sys.exit("no error")


def all_objects(value):
    """Return what every rank has."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, value)
    return parts


def fingerprint(model):
    """Return a text that differs where a parameter does."""
    digest = hashlib.sha256()
    for p in model.parameters():
        digest.update(p.detach().float().numpy().tobytes())
    return digest.hexdigest()


def check_replicas(model, what):
    """Fail unless all ranks have the same parameters."""
    assert len(set(all_objects(fingerprint(model)))) == 1, f"{what}: parameters differ"


def check_close(left, right, what, rtol=1e-6, atol=1e-7, bits=False):
    """Compare parameters of two models."""
    for (name, p), q in zip(left.named_parameters(), right.parameters()):
        if bits:
            assert torch.equal(p, q), f"{what}: {name} differs by {(p - q).abs().max()}"
        else:
            close = torch.allclose(p, q, rtol=rtol, atol=atol)
            assert close, f"{what}: {name} differs by {(p - q).abs().max()}"


def as_numpy(grads):
    """Return the arrays of a dict of tensors."""
    return {name: np.array(g.detach(), copy=True) for name, g in grads.items()}
