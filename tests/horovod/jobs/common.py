# SPDX-License-Identifier: Apache-2.0
"""What the jobs of this folder share: ways to attach bitopk, models, and cases that report."""

from __future__ import annotations

import copy
import logging
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import bitopk
import bitopk.horovod
import horovod.torch as hvd
import numpy as np
import torch
from torch import nn

# Small tensors are no use to compress, which is not the point here.
logging.getLogger("bitopk").setLevel(logging.ERROR)

WAYS = ("compression", "wrapper", "attach")


def wrap(
    way: str,
    optimizer: torch.optim.Optimizer,
    spec: Any,
    named_parameters: Any,
    *,
    extras: dict[str, Any] | None = None,
    **options: Any,
) -> torch.optim.Optimizer:
    """Wrap an optimizer with Horovod and bitopk; `owner_of` finds the memories."""
    named_parameters = None if named_parameters is None else list(named_parameters)
    extras = extras or {}
    if way == "compression":
        if named_parameters is None:
            groups = enumerate(optimizer.param_groups)
            known = [(f"{i}.{j}", p) for i, g in groups for j, p in enumerate(g["params"])]
        else:
            known = named_parameters
        ours = bitopk.horovod.compression(
            spec, known, process_set=options.get("process_set"), **extras
        )
        return hvd.DistributedOptimizer(optimizer, named_parameters, compression=ours, **options)
    if way == "wrapper":
        return bitopk.horovod.DistributedOptimizer(
            optimizer, named_parameters, compression=spec, **options, **extras
        )
    assert way == "attach"
    wrapped = hvd.DistributedOptimizer(optimizer, named_parameters, **options)
    return bitopk.horovod.attach(wrapped, spec, **extras)


def owner_of(optimizer: Any) -> Any:
    """Return the object that has the memories, whichever way they came."""
    return optimizer.bitopk if hasattr(optimizer, "bitopk") else optimizer._compression.bitopk


def make_model(seed: int = 1, sizes: tuple[int, ...] = (20, 30, 10)) -> nn.Module:
    """Build an MLP, the same on all ranks."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs in zip(sizes, sizes[1:]):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def twin(model: nn.Module) -> nn.Module:
    """Return a copy with the same parameters."""
    return copy.deepcopy(model)


def generator(step: int, rank: int | None = None) -> torch.Generator:
    """Return a random generator for one step of one rank."""
    rank = hvd.rank() if rank is None else rank
    return torch.Generator().manual_seed(1000 * step + rank)


def batch(step: int, features: int = 20, rank: int | None = None) -> torch.Tensor:
    """Return the samples of one step of one rank."""
    return torch.randn(8, features, generator=generator(step, rank))


def coefficients(
    parameters: dict[str, torch.Tensor], step: int, rank: int | None = None
) -> dict[str, torch.Tensor]:
    """Return random float32 gradients for one step of one rank, exact in bfloat16."""
    random = generator(step, rank)
    return {
        name: torch.randn(p.shape, generator=random).bfloat16().float()
        for name, p in parameters.items()
    }


def backward_exactly(p: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add `gradient` to the gradient of `p` by a backward pass, hooks included."""
    (p.float() * gradient).sum().backward()


class ParameterBag(nn.Module):
    """Parameters of given shapes and no layers, for gradients made by `backward_exactly`."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32):
        super().__init__()
        for number, (name, shape) in enumerate(shapes.items()):
            random = torch.Generator().manual_seed(number)
            values = torch.randn(shape, generator=random).to(dtype)
            self.register_parameter(name, nn.Parameter(values))


def digest(model: nn.Module) -> bytes:
    """Return all parameters as bytes."""
    return b"".join(p.detach().float().contiguous().numpy().tobytes() for p in model.parameters())


def same_on_all_ranks(data: bytes, what: str) -> None:
    """Fail unless all ranks have the same bytes."""
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    everything = hvd.allgather(mine, name="test.same").reshape(hvd.size(), -1)
    differ = [
        rank for rank in range(hvd.size()) if not torch.equal(everything[rank], everything[0])
    ]
    assert not differ, f"{what}: ranks {differ} differ from rank 0"


def assert_close(ours: nn.Module, dense: nn.Module, *, exact: bool, rtol: float, atol: float):
    """Compare the parameters of two models."""
    for (name, p), q in zip(ours.named_parameters(), dense.parameters()):
        if exact:
            assert torch.equal(p, q), f"{name}: {(p != q).sum()} entries differ"
        else:
            np.testing.assert_allclose(
                p.detach().double().numpy(), q.detach().double().numpy(), rtol, atol, err_msg=name
            )


class Cases:
    """Runs named cases one after the other."""

    def __init__(self, wanted: str = "") -> None:
        self._wanted = wanted
        self._num_right = 0

    def run(self, name: str, case: Callable[..., None], *arguments: Any, **options: Any) -> None:
        """Run one case; a failure is printed and ends the job."""
        if self._wanted not in name:
            return
        try:
            case(*arguments, **options)
            self._num_right += 1
        except Exception:
            print(f"case {name}: WRONG\n{traceback.format_exc()}", flush=True)
            # Ranks that are not at the same place would only wait for each other.
            sys.stdout.flush()
            os._exit(1)

    def close(self) -> None:
        """Say how many cases there were."""
        print(f"all {self._num_right} cases right", flush=True)
