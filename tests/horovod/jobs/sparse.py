# SPDX-License-Identifier: Apache-2.0
"""Density 0.01: what the ranks get is what `bitopk.LocalGroup` gives for the same gradients.

usage: sparse.py [PART OF A CASE'S NAME]
"""

from __future__ import annotations

import sys
from typing import Any

import bitopk
import horovod.torch as hvd
import numpy as np
import torch
from common import (
    WAYS,
    Cases,
    ParameterBag,
    assert_close,
    backward_exactly,
    coefficients,
    digest,
    owner_of,
    same_on_all_ranks,
    twin,
    wrap,
)

STEPS = 200
SHAPES = {"a": (60, 50), "b": (700,), "c": (3,), "d": (2, 20, 20)}
NAMES = list(SHAPES)


def make_step(model: torch.nn.Module, optimizer: Any, gradients: dict[str, torch.Tensor]) -> None:
    """Make one step with given gradients, through backward passes."""
    optimizer.zero_grad()
    parameters = dict(model.named_parameters())
    for name in reversed(NAMES):
        backward_exactly(parameters[name], gradients[name])
    optimizer.step()


class Simulation:
    """The same training by `LocalGroup`, on each rank alone."""

    def __init__(self, spec: bitopk.Compression, model: torch.nn.Module, optimizer: Any, **options):
        self._group = bitopk.LocalGroup(hvd.size(), spec)
        self._parameters = dict(model.named_parameters())
        self._optimizer = optimizer
        self._options = options

    def step(self, everyone: list[dict[str, torch.Tensor]], **options: Any) -> None:
        """Make one step with the gradients of all ranks."""
        grads = [{name: g.numpy() for name, g in gradients.items()} for gradients in everyone]
        results = self._group.allreduce(grads, **{**self._options, **options})[0]
        for name, p in self._parameters.items():
            p.grad = torch.from_numpy(np.array(results[name]))
        self._optimizer.step()

    def worker_memory(self) -> dict[str, np.ndarray]:
        """Return the memory of this rank."""
        return self._group.worker_memory(hvd.rank())

    def server_memory(self) -> dict[str, np.ndarray]:
        """Return the whole memory of the server."""
        return self._group.server_memory()


def everyones(model: torch.nn.Module, step: int) -> list[dict[str, torch.Tensor]]:
    """Return the gradients of all ranks."""
    parameters = dict(model.named_parameters())
    return [coefficients(parameters, step, rank) for rank in range(hvd.size())]


def check(model: torch.nn.Module, expected: torch.nn.Module, owner: Any, simulation: Any) -> None:
    """Compare parameters and memories bit for bit."""
    assert_close(model, expected, exact=True, rtol=0, atol=0)
    same_on_all_ranks(digest(model), "parameters")
    for kind in ("worker_memory", "server_memory"):
        found, wanted = getattr(owner, kind)(), getattr(simulation, kind)()
        assert found.keys() == wanted.keys() == set(NAMES)
        for name, array in wanted.items():
            assert found[name].tobytes() == array.tobytes(), f"{kind}[{name!r}] differs"
    assert any(np.any(array) for array in wanted.values())


def simulated(way: str, spec: bitopk.Compression) -> None:
    def make(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    model = ParameterBag(SHAPES)
    expected = twin(model)
    optimizer = wrap(way, make(model), spec, model.named_parameters())
    simulation = Simulation(spec, expected, make(expected))
    for step in range(STEPS):
        gradients = everyones(model, step)
        make_step(model, optimizer, gradients[hvd.rank()])
        simulation.step(gradients)
    check(model, expected, owner_of(optimizer), simulation)
    stats = owner_of(optimizer).stats()
    assert stats.steps == STEPS, stats
    assert stats.entries_up < 0.02 * STEPS * 4503, stats


def sum_(way: str) -> None:
    """The first way learns the operation from the placeholders: N times the mean."""
    spec = bitopk.Compression.topk(0.01, dense_below=0)
    model = ParameterBag(SHAPES)
    expected = twin(model)
    base = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer = wrap(way, base, spec, model.named_parameters(), op=hvd.Sum)
    if way == "compression":
        # The means times N, applied with the rate, are the means applied with N times the rate.
        rate, op = 0.5 * hvd.size(), "average"
    else:
        rate, op = 0.5, "sum"
    simulation = Simulation(spec, expected, torch.optim.SGD(expected.parameters(), lr=rate), op=op)
    for step in range(20):
        gradients = everyones(model, step)
        make_step(model, optimizer, gradients[hvd.rank()])
        simulation.step(gradients)
    same_on_all_ranks(digest(model), "parameters")
    exact = way != "compression"
    assert_close(model, expected, exact=exact, rtol=1e-6, atol=1e-6)


def rate_of(step: int, group: int) -> float:
    """Return a learning rate that changes, and is 0 now and then."""
    rates = ((0.1, 0.1, 0.05, 0.0, 0.02, 0.2), (0.3, 0.03, 0.03, 0.1, 0.0, 0.0))
    return rates[group][step % 6]


def learning_rates(way: str) -> None:
    """With "lr" each tensor's memory follows the rate of its group: as two groups of ranks do."""
    spec = bitopk.Compression.topk(0.05, dense_below=0)
    model = ParameterBag(SHAPES)
    expected = twin(model)
    parts = (["a", "c"], ["b", "d"])

    def make(model: torch.nn.Module, names: tuple[list[str], ...]) -> torch.optim.Optimizer:
        named = dict(model.named_parameters())
        groups = [{"params": [named[n] for n in part], "lr": 1.0} for part in names]
        return torch.optim.SGD(groups, lr=1.0)

    base = make(model, parts)
    optimizer = wrap(way, base, spec, model.named_parameters(), extras={"scale": "lr"})
    engines = [bitopk.LocalGroup(hvd.size(), spec) for _ in parts]
    reference = make(expected, parts)
    last = [1.0, 1.0]
    for step in range(60):
        gradients = everyones(model, step)
        for number, part in enumerate(parts):
            rate = rate_of(step, number)
            optimizer.param_groups[number]["lr"] = reference.param_groups[number]["lr"] = rate
            last[number] = 1.0 / rate if rate else last[number]
            grads = [{n: every[n].numpy() for n in part} for every in gradients]
            results = engines[number].allreduce(grads, scale=last[number])[0]
            for name in part:
                getattr(expected, name).grad = torch.from_numpy(np.array(results[name]))
        make_step(model, optimizer, gradients[hvd.rank()])
        reference.step()
    assert_close(model, expected, exact=True, rtol=0, atol=0)
    same_on_all_ranks(digest(model), "parameters")


def schedule_and_set_density(way: str) -> None:
    """A schedule, and later `set_density`, change how much travels."""
    spec = bitopk.Compression.topk(0.01, dense_below=0)
    model = ParameterBag({"a": (1000,)})
    extras = {"schedule": lambda step: 0.5 if step < 3 else 0.1}
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = wrap(way, base, spec, model.named_parameters(), extras=extras)
    sent = [0]
    for step in range(6):
        if step == 5:
            owner_of(optimizer).set_density(0.02)
        optimizer.zero_grad()
        backward_exactly(model.a, coefficients({"a": model.a}, step)["a"])
        optimizer.step()
        sent.append(owner_of(optimizer).stats().entries_up)
    assert np.diff(sent).tolist() == [500, 500, 500, 100, 100, 20], sent


def commit_and_rollback(way: str) -> None:
    spec = bitopk.Compression.topk(0.01, dense_below=0)
    model = ParameterBag(SHAPES)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = wrap(way, base, spec, model.named_parameters())
    owner = owner_of(optimizer)
    make_step(model, optimizer, everyones(model, 0)[hvd.rank()])
    owner.commit()
    kept = owner.worker_memory()
    make_step(model, optimizer, everyones(model, 1)[hvd.rank()])
    moved = owner.worker_memory()
    owner.rollback()
    for name, array in owner.worker_memory().items():
        assert array.tobytes() == kept[name].tobytes(), name
        assert array.tobytes() != moved[name].tobytes(), name


def main() -> None:
    """Run all cases that match."""
    hvd.init()
    torch.set_num_threads(1)
    cases = Cases(sys.argv[1] if len(sys.argv) > 1 else "")
    topk = bitopk.Compression.topk
    specs = {
        "compression": topk(0.01, dense_below=0, exchange="sharded"),
        "wrapper": topk(0.01, dense_below=0, scope="global", rules=[("c", "dense")]),
        "attach": topk(0.01, 0.05, dense_below=0, value_format="float16", exchange="allgather"),
    }
    for way in WAYS:
        cases.run(f"simulated-{way}", simulated, way, specs[way])
        cases.run(f"sum_-{way}", sum_, way)
        cases.run(f"schedule_and_set_density-{way}", schedule_and_set_density, way)
        cases.run(f"commit_and_rollback-{way}", commit_and_rollback, way)
    for way in ("wrapper", "attach"):
        cases.run(f"learning_rates-{way}", learning_rates, way)
    cases.close()
    hvd.shutdown()


if __name__ == "__main__":
    main()
