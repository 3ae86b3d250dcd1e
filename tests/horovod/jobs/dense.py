# SPDX-License-Identifier: Apache-2.0
"""Density 1 gives what plain Horovod gives: all ways to attach, all that plain Horovod can do.

usage: dense.py EXCHANGE [PART OF A CASE'S NAME]
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import bitopk
import horovod.torch as hvd
import torch
from common import (
    WAYS,
    Cases,
    ParameterBag,
    assert_close,
    backward_exactly,
    batch,
    coefficients,
    digest,
    make_model,
    owner_of,
    same_on_all_ranks,
    twin,
    wrap,
)
from torch import nn

STEPS = 10
SPEC = bitopk.Compression.topk(1.0, dense_below=0, exchange=sys.argv[1])

Train = Callable[[nn.Module, Any, int], None]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train_mlp(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    model(batch(step)).square().mean().backward()
    optimizer.step()


def compare(
    way: str,
    model: nn.Module,
    train: Train = train_mlp,
    *,
    make: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    named: bool = True,
    exact: bool | None = None,
    rtol: float = 1e-6,
    atol: float = 1e-7,
    extras: dict[str, Any] | None = None,
    options: Callable[[nn.Module], dict[str, Any]] = lambda model: {},
    check: Callable[[Any], None] = lambda optimizer: None,
) -> None:
    """Train twins, one with plain Horovod, and compare their parameters."""
    dense, ours = model, twin(model)
    names = dense.named_parameters() if named else None
    plain = hvd.DistributedOptimizer(make(dense), names, **options(dense))
    for step in range(STEPS):
        train(dense, plain, step)
    names = ours.named_parameters() if named else None
    wrapped = wrap(way, make(ours), SPEC, names, extras=extras, **options(ours))
    for step in range(STEPS):
        train(ours, wrapped, step)
    if exact is None:
        exact = hvd.size() == 2
    assert_close(ours, dense, exact=exact, rtol=rtol, atol=atol)
    if "process_set" not in options(ours):
        same_on_all_ranks(digest(ours), "parameters")
        stats = owner_of(wrapped).stats()
        assert stats.steps == STEPS, stats
        assert stats.entries_up > 0, stats
    check(wrapped)


# --- the cases -----------------------------------------------------------------------------------


def average(way: str) -> None:
    compare(way, make_model())


def average_with_adamw(way: str) -> None:
    compare(way, make_model(), make=lambda m: torch.optim.AdamW(m.parameters(), lr=0.01), atol=1e-6)


def sum_(way: str) -> None:
    # N times the mean, in the first way, is not the sum in the last bit for some N.
    compare(way, make_model(), options=lambda model: {"op": hvd.Sum})


def predivide(way: str) -> None:
    options = {"gradient_predivide_factor": 3.0}
    compare(way, make_model(), exact=False, options=lambda model: options)


def without_names(way: str) -> None:
    compare(way, make_model(), named=False)


def two_backward_passes(way: str) -> None:
    def train(model: nn.Module, optimizer: Any, step: int) -> None:
        optimizer.zero_grad()
        for part in range(2):
            model(batch(2 * step + part)).square().mean().backward()
        optimizer.step()

    compare(way, make_model(), train, options=lambda model: {"backward_passes_per_step": 2})


def step_before_all_backward_passes(way: str) -> None:
    compare(way, make_model(), options=lambda model: {"backward_passes_per_step": 3})


def groups_by_number(way: str) -> None:
    compare(way, make_model(), options=lambda model: {"groups": 2})


def groups_by_list(way: str) -> None:
    def options(model: nn.Module) -> dict[str, Any]:
        parameters = list(model.parameters())
        return {"groups": [parameters[:1], parameters[2:]]}

    compare(way, make_model(), options=options)


def process_set(way: str, members: hvd.ProcessSet) -> None:
    # Members alone reduce; the others train on their own.
    exact = members.included() and members.size() == 2
    compare(way, make_model(), exact=bool(exact), options=lambda model: {"process_set": members})


def gradient_clipping(way: str) -> None:
    def train(model: nn.Module, optimizer: Any, step: int) -> None:
        optimizer.zero_grad()
        (100 * model(batch(step)).square().mean()).backward()
        optimizer.synchronize()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert norm > 0.1, norm
        with optimizer.skip_synchronize():
            optimizer.step()

    compare(way, make_model(), train, rtol=1e-5)


class TwoHeads(nn.Module):
    """Ranks use different heads."""

    def __init__(self) -> None:
        super().__init__()
        self.body = make_model(2)
        self.heads = nn.ModuleList([nn.Linear(10, 4), nn.Linear(10, 4)])

    def forward(self, x: torch.Tensor, head: int) -> torch.Tensor:
        return self.heads[head](torch.tanh(self.body(x)))


def different_heads(way: str) -> None:
    def train(model: nn.Module, optimizer: Any, step: int) -> None:
        optimizer.zero_grad()
        model(batch(step), (hvd.rank() + step) % 2).square().mean().backward()
        optimizer.step()

    compare(way, TwoHeads(), train)


def unused_and_frozen_parameters(way: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = make_model(3)
            self.unused = nn.Linear(5, 5)
            self.frozen = nn.Linear(10, 10).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.frozen(self.used(x))

    compare(way, Model())


def train_bag(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    parameters = dict(model.named_parameters())
    for name, gradient in coefficients(parameters, step).items():
        backward_exactly(parameters[name], gradient)
    optimizer.step()


def odd_shapes(way: str) -> None:
    bag = ParameterBag({"scalar": (), "empty": (0, 3), "one": (1,), "matrix": (7, 5)})
    compare(way, bag, train_bag)


def fortran_order(way: str) -> None:
    """A gradient that is no contiguous memory, which plain Horovod refuses."""
    dense = ParameterBag({"a": (7, 5), "b": (3,)})
    ours = twin(dense)
    ours.a = nn.Parameter(ours.a.detach().t().contiguous().t())
    assert not ours.a.is_contiguous()
    plain = hvd.DistributedOptimizer(sgd(dense), dense.named_parameters())
    wrapped = wrap(way, sgd(ours), SPEC, ours.named_parameters())
    for step in range(STEPS):
        train_bag(dense, plain, step)
    for step in range(STEPS):
        train_bag(ours, wrapped, step)
    named = dict(ours.named_parameters())
    for name, p in dense.named_parameters():
        torch.testing.assert_close(named[name], p, rtol=1e-6, atol=1e-7)


def sparse_embedding(way: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.rows = nn.Embedding(40, 20, sparse=True)
            self.rest = make_model(4)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.rest(self.rows(rows))

    def train(model: nn.Module, optimizer: Any, step: int) -> None:
        optimizer.zero_grad()
        random = torch.Generator().manual_seed(10 * step + hvd.rank())
        rows = torch.randint(40, (6,), generator=random)
        model(rows).square().mean().backward()
        optimizer.step()

    compare(way, Model(), train, make=lambda m: torch.optim.SGD(m.parameters(), lr=0.05))


def gradients_set_to_none(way: str) -> None:
    def train(model: nn.Module, optimizer: Any, step: int) -> None:
        if hasattr(optimizer, "bitopk"):
            optimizer.zero_grad(set_to_none=True)  # plain Horovod takes no arguments
        else:
            model.zero_grad(set_to_none=True)
        model(batch(step), step % 2).square().mean().backward()
        optimizer.step()

    compare(way, TwoHeads(), train)


def learning_rate_schedule(way: str) -> None:
    # With density 1 nothing is remembered, so no scale may show in the result.
    rates = [0.1, 0.05, 0.0, 0.2, 0.2, 0.01, 0.3, 0.0, 0.0, 0.1]

    def train(model: nn.Module, optimizer: Any, step: int) -> None:
        optimizer.param_groups[0]["lr"] = rates[step]
        train_mlp(model, optimizer, step)

    extras = {} if way == "compression" else {"scale": "lr"}
    compare(way, make_model(), train, extras=extras)


def loss_scale(way: str) -> None:
    scales = [2.0**10, 2.0**10, 2.0**9, 2.0**12] * 3
    now = [1.0]

    def train(model: nn.Module, optimizer: Any, step: int) -> None:
        now[0] = scales[step]
        optimizer.zero_grad()
        (model(batch(step)).square().mean() * now[0]).backward()
        optimizer.synchronize()
        for p in model.parameters():
            p.grad.div_(now[0])
        with optimizer.skip_synchronize():
            optimizer.step()

    compare(way, make_model(), train, extras={"scale": lambda: now[0]})


def float64(way: str) -> None:
    def train(model: nn.Module, optimizer: Any, step: int) -> None:
        optimizer.zero_grad()
        model(batch(step).double()).square().mean().backward()
        optimizer.step()

    model = nn.Sequential(make_model().double())
    # float64 always travels dense: there is nothing for the compressed units.
    dense, ours = model, twin(model)
    plain = hvd.DistributedOptimizer(sgd(dense), dense.named_parameters())
    wrapped = wrap(way, sgd(ours), SPEC, ours.named_parameters())
    for step in range(STEPS):
        train(dense, plain, step)
    for step in range(STEPS):
        train(ours, wrapped, step)
    assert_close(ours, dense, exact=hvd.size() == 2, rtol=1e-13, atol=1e-15)
    same_on_all_ranks(digest(ours), "parameters")


def narrow_type(way: str, dtype: torch.dtype) -> None:
    """The mean of the gradients, rounded once; plain Horovod has no bfloat16 to compare with."""
    ours = ParameterBag({"a": (30, 7), "b": (11,)}, dtype)
    expected = twin(ours)
    optimizer = wrap(way, sgd(ours), SPEC, ours.named_parameters())
    reference = sgd(expected)
    for step in range(STEPS):
        optimizer.zero_grad()
        parameters = dict(ours.named_parameters())
        for name, gradient in coefficients(parameters, step).items():
            backward_exactly(parameters[name], gradient)
        optimizer.step()
        everyone = [coefficients(parameters, step, rank) for rank in range(hvd.size())]
        for name, p in expected.named_parameters():
            total = torch.zeros(p.shape)
            for rank in everyone:
                total += rank[name].to(dtype).float()
            p.grad = (total / hvd.size()).to(dtype)
        reference.step()
    assert_close(ours, expected, exact=True, rtol=0, atol=0)
    same_on_all_ranks(digest(ours), "parameters")


def other_tensors_pass(way: str) -> None:
    """``hvd.allreduce(metric, compression=ours)`` is left alone, within a step and outside."""
    model = make_model()
    ours = bitopk.horovod.compression(SPEC, model.named_parameters())
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), compression=ours)
    model(batch(0)).square().mean().backward()
    metric = torch.tensor([hvd.rank() + 1.0])
    for _ in range(2):
        mean = hvd.allreduce(metric, name="metric", compression=ours)
        assert mean.item() == (hvd.size() + 1) / 2, mean
        optimizer.step()


def main() -> None:
    """Run all cases that match."""
    members = hvd.ProcessSet([0, 2])
    has_set = int(os.environ.get("HOROVOD_SIZE", os.environ.get("OMPI_COMM_WORLD_SIZE", "0"))) > 2
    hvd.init(process_sets=[members] if has_set else [])
    torch.set_num_threads(1)
    cases = Cases(sys.argv[2] if len(sys.argv) > 2 else "")
    plain_cases = (
        average,
        average_with_adamw,
        sum_,
        predivide,
        without_names,
        two_backward_passes,
        step_before_all_backward_passes,
        groups_by_number,
        groups_by_list,
        gradient_clipping,
        different_heads,
        unused_and_frozen_parameters,
        odd_shapes,
        fortran_order,
        sparse_embedding,
        gradients_set_to_none,
        learning_rate_schedule,
        loss_scale,
        float64,
    )
    for way in WAYS:
        for case in plain_cases:
            cases.run(f"{case.__name__}-{way}", case, way)
        for dtype in (torch.float16, torch.bfloat16):
            cases.run(f"{str(dtype)[6:]}-{way}", narrow_type, way, dtype)
        if has_set:
            cases.run(f"process_set-{way}", process_set, way, members)
    cases.run("other_tensors_pass-compression", other_tensors_pass, "compression")
    cases.close()
    hvd.shutdown()


if __name__ == "__main__":
    main()
