# SPDX-License-Identifier: Apache-2.0
"""What users of Horovod's optimizer rely on, and what is refused; two ranks.

usage: behaviours.py [PART OF A CASE'S NAME]
"""

from __future__ import annotations

import copy
import os
import sys
import warnings
from typing import Any

import bitopk
import bitopk.horovod
import cloudpickle
import horovod.torch as hvd
import torch
from common import (
    WAYS,
    Cases,
    ParameterBag,
    backward_exactly,
    batch,
    digest,
    make_model,
    owner_of,
    same_on_all_ranks,
    wrap,
)
from horovod.common.exceptions import HorovodInternalError
from torch import nn

SPEC = bitopk.Compression.topk(0.1, dense_below=0)


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.05, "momentum": 0.9, **options})


def step(model: nn.Module, optimizer: Any, number: int = 0) -> None:
    optimizer.zero_grad()
    model(batch(number)).square().mean().backward()
    optimizer.step()


def expect(kind: type, text: str, call: Any, *arguments: Any, **options: Any) -> Exception:
    """Fail unless the call raises `kind` with `text` in its message."""
    caught = None
    try:
        call(*arguments, **options)
    except kind as error:
        caught = error
    assert caught is not None, f"no {kind.__name__} with {text!r}"
    assert text in str(caught), f"no {text!r} in: {caught}"
    return caught


# --- training ------------------------------------------------------------------------------------


def every_optimizer_with_different_heads(way: str) -> None:
    """A rank without a gradient gets the others' result; no class of torch.optim is special."""
    skipped = {"Optimizer", "LBFGS", "SparseAdam"}  # what Horovod does not wrap, or sparse only
    kinds = [
        kind
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
        if name not in skipped
    ]
    assert len(kinds) >= 10, kinds
    for kind in kinds:
        torch.manual_seed(3)
        body, heads = nn.Linear(20, 8), nn.ModuleList([nn.Linear(8, 4) for _ in range(3)])
        model = nn.ModuleDict({"body": body, "heads": heads})
        optimizer = wrap(way, kind(model.parameters(), lr=0.01), SPEC, model.named_parameters())
        for number in range(2):
            optimizer.zero_grad()
            heads[hvd.rank()](body(batch(number))).square().mean().backward()
            optimizer.step()
            assert heads[1 - hvd.rank()].weight.grad.any(), kind
        same_on_all_ranks(digest(model), kind.__name__)


def alternating_requires_grad(way: str) -> None:
    """Two optimizers over one graph, each with the other's parameters frozen, as in a GAN."""
    torch.manual_seed(4)
    maker, judge = nn.Linear(20, 6), nn.Linear(6, 1)
    makers = [(f"maker.{name}", p) for name, p in maker.named_parameters()]
    judges = [(f"judge.{name}", p) for name, p in judge.named_parameters()]
    optimizers = [
        wrap(way, torch.optim.SGD([p for _, p in named], lr=0.1), SPEC, named)
        for named in (makers, judges)
    ]
    for number in range(6):
        active = number % 2
        for side, named in enumerate((makers, judges)):
            for _, p in named:
                p.requires_grad_(side == active)
        optimizers[active].zero_grad()
        judge(maker(batch(number))).square().mean().backward()
        optimizers[active].step()
    same_on_all_ranks(digest(maker) + digest(judge), "parameters")


def synchronize_twice_warns(way: str) -> None:
    model = make_model()
    optimizer = wrap(way, sgd(model), SPEC, model.named_parameters())
    model(batch(0)).square().mean().backward()
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    assert any("skip_synchronize" in str(w.message) for w in caught), caught
    same_on_all_ranks(digest(model), "parameters")


def no_names(way: str) -> None:
    """Without names, and with an empty list of them for a model that has parameters."""
    model = make_model()
    optimizer = wrap(way, sgd(model), SPEC, None)
    step(model, optimizer)
    same_on_all_ranks(digest(model), "parameters")
    expect(ValueError, "not named", wrap, way, sgd(make_model()), SPEC, [])


def wrong_names(way: str) -> None:
    model = make_model()
    names = list(model.named_parameters())
    expect(ValueError, "not named", wrap, way, sgd(model), SPEC, names[1:])
    twice = [("same", p) for _, p in names]
    expect(ValueError, "same", wrap, way, sgd(model), SPEC, twice)
    if way != "compression":
        expect(ValueError, "tuples", wrap, way, sgd(model), SPEC, [p for _, p in names])


def wrong_calls(way: str) -> None:
    """Horovod's own assertions stay."""
    model = make_model()
    optimizer = wrap(way, sgd(model), SPEC, model.named_parameters())
    model(batch(0)).square().mean().backward()
    expect(AssertionError, "zero_grad()", optimizer.zero_grad)
    expect(AssertionError, "backward_passes_per_step", model(batch(0)).square().mean().backward)
    optimizer.step()


def broadcast_state(way: str) -> None:
    """``hvd.broadcast_optimizer_state`` makes no step, and equal states follow."""
    for kind, options in ((torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adam, {})):
        for trained in (False, True):
            torch.manual_seed(hvd.rank() + 1)
            model = make_model(seed=hvd.rank() + 1)
            base = kind(model.parameters(), lr=0.1 * (1 + hvd.rank()), **options)
            optimizer = wrap(way, base, SPEC, model.named_parameters())
            if trained:
                step(model, optimizer)
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            assert optimizer.param_groups[0]["lr"] == 0.1
            state = optimizer.state_dict()
            assert set(state) == {"state", "param_groups"}
            assert all("bitopk" not in str(key) for key in state["param_groups"][0])
            step(model, optimizer, 1)
            same_on_all_ranks(digest(model), "parameters")


def broadcast_options(way: str) -> None:
    options = {"lr": 0.1, "momentum": 0.2, "weight_decay": 0.3, "nesterov": True}
    if hvd.rank() > 0:
        options = {"lr": 0.5, "momentum": 0.6, "weight_decay": 0.7, "nesterov": True}
    model = make_model()
    optimizer = wrap(way, sgd(model, **options), SPEC, model.named_parameters())
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.1, 0.2, 0.3), group


def broadcast_state_with_frozen_parameters(way: str) -> None:
    model = make_model()
    for p in list(model.parameters())[:2]:
        p.requires_grad_(False)
    optimizer = wrap(way, sgd(model), SPEC, model.named_parameters())
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    step(model, optimizer)
    same_on_all_ranks(digest(model), "parameters")


def a_row_that_only_one_rank_used(way: str) -> None:
    """A sparse gradient on one rank and none on the other, once both have seen it sparse."""
    model = nn.ModuleDict({"rows": nn.Embedding(9, 20, sparse=True), "rest": make_model()})
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = wrap(way, base, SPEC, model.named_parameters())
    for number in range(3):
        optimizer.zero_grad(set_to_none=True)
        used = number == 0 or hvd.rank() == number % 2
        x = model["rows"](torch.tensor([number, hvd.rank()])) if used else batch(number)
        model["rest"](x).square().mean().backward()
        optimizer.step()
    same_on_all_ranks(digest(model["rows"]), "rows")


def nonfinite_is_raised_and_training_goes_on(way: str) -> None:
    spec = bitopk.Compression.topk(0.1, dense_below=0, nonfinite="raise")
    model = make_model()
    optimizer = wrap(way, sgd(model), spec, model.named_parameters())
    step(model, optimizer)
    before = digest(model)
    optimizer.zero_grad()
    loss = model(batch(1)).square().mean()
    (loss * (float("nan") if hvd.rank() == 1 else 1.0)).backward()
    expect(bitopk.NonFiniteGradientError, "", optimizer.step)
    assert digest(model) == before
    step(model, optimizer, 2)
    same_on_all_ranks(digest(model), "parameters")


def the_engines_end_is_horovods_error(way: str) -> None:
    """So that elastic training recovers."""
    model = make_model()
    optimizer = wrap(way, sgd(model), SPEC, model.named_parameters())
    step(model, optimizer)
    if hvd.rank() == 1:
        owner_of(optimizer).session.abandon("a test ended it")
    error = expect(HorovodInternalError, "a test ended it", step, model, optimizer)
    assert isinstance(error.__cause__, bitopk.CommunicationError), error.__cause__


def loading_within_a_step(way: str) -> None:
    """``load_state_dict`` forgets gradients under way, as Horovod's does."""
    model = make_model()
    optimizer = wrap(way, sgd(model), SPEC, model.named_parameters())
    step(model, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    model(batch(1)).square().mean().backward()
    optimizer.load_state_dict(state)
    step(model, optimizer, 2)
    same_on_all_ranks(digest(model), "parameters")


# --- compressors as such -------------------------------------------------------------------------


def all_types_pass_through() -> None:
    """The shape of Horovod's own test of fp16, for tensors that are no gradients."""
    ours = bitopk.horovod.compression(0.01, make_model().named_parameters())
    for dtype in (
        torch.float16,
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.bool,
    ):
        tensor = torch.ones(5).to(dtype)
        payload, context = ours.compress(tensor)
        assert payload is tensor
        assert context is None
        assert ours.decompress(payload, context) is tensor


def copies_have_their_own_engine() -> None:
    """Pickled with the parameters, as Spark does, or copied, an object is not connected."""
    model = make_model()
    ours = bitopk.horovod.compression(0.1, model.named_parameters())
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), compression=ours)
    step(model, optimizer)
    assert ours.session.connected
    pairs = ((model, ours), cloudpickle.loads(cloudpickle.dumps((model, ours))))
    for model_copy, copied in (pairs[1], copy.deepcopy(pairs[0])):
        assert not copied.session.connected
        again = hvd.DistributedOptimizer(
            sgd(model_copy), model_copy.named_parameters(), compression=copied
        )
        step(model_copy, again, 1)
        assert copied.bitopk.stats().steps == 1
    assert ours.bitopk.stats().steps == 1


def horovods_compressors_stay_horovods() -> None:
    wrapper = bitopk.horovod.DistributedOptimizer
    for compressor in (hvd.Compression.none, hvd.Compression.fp16):
        model = make_model()
        names = list(model.named_parameters())
        optimizer = wrapper(sgd(model), names, compression=compressor)
        assert optimizer._compression is compressor
        assert not hasattr(optimizer, "bitopk")
        step(model, optimizer)
        same_on_all_ranks(digest(model), "parameters")
    expect(
        bitopk.InvalidArgumentError,
        "scale",
        wrapper,
        sgd(model),
        names,
        hvd.Compression.fp16,
        scale=2.0,
    )
    ours = bitopk.horovod.compression(0.01, names)
    assert wrapper(sgd(model), names, ours)._compression is ours


# --- what is refused -----------------------------------------------------------------------------


def other_operations_at_construction(way: str) -> None:
    model = make_model()
    for name in ("Adasum", "Min", "Max", "Product"):
        expect(
            bitopk.InvalidArgumentError,
            name,
            wrap,
            way,
            sgd(model),
            SPEC,
            model.named_parameters(),
            op=getattr(hvd, name),
        )


def other_operations_by_their_placeholders() -> None:
    for name in ("Min", "Max", "Product"):
        model = make_model()
        optimizer = wrap(
            "compression", sgd(model), SPEC, model.named_parameters(), op=getattr(hvd, name)
        )
        model(batch(0)).square().mean().backward()
        expect(bitopk.InvalidArgumentError, f"op={name}", optimizer.step)


def adasum_by_its_parameters() -> None:
    model = make_model()
    optimizer = wrap("compression", sgd(model), SPEC, model.named_parameters(), op=hvd.Adasum)
    loss = model(batch(0)).square().mean()
    expect(bitopk.InvalidArgumentError, "Adasum", loss.backward)
    del optimizer


def sparse_as_dense(way: str) -> None:
    model = nn.Sequential(nn.Embedding(9, 20, sparse=True), make_model())
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"sparse_as_dense": True}
    if way != "compression":
        expect(
            bitopk.InvalidArgumentError,
            "sparse_as_dense",
            wrap,
            way,
            base,
            SPEC,
            model.named_parameters(),
            **options,
        )
        return
    optimizer = wrap(way, base, SPEC, model.named_parameters(), **options)
    loss = model(torch.tensor([1, 2])).square().mean()

    def whole_step() -> None:
        loss.backward()
        optimizer.step()

    expect(bitopk.InvalidArgumentError, "sparse_as_dense", whole_step)


def bad_arguments() -> None:
    model = make_model()
    names = list(model.named_parameters())
    error, wrapper = bitopk.InvalidArgumentError, bitopk.horovod.DistributedOptimizer
    expect(error, "did you mean k=5", wrapper, sgd(model), names, 5)
    expect(error, "bitopk.Compression", wrapper, sgd(model), names, "topk")
    expect(error, "scale", wrapper, sgd(model), names, 0.1, scale="loss")
    expect(error, "hvd.DistributedOptimizer", bitopk.horovod.attach, sgd(model), 0.1)
    half = hvd.DistributedOptimizer(sgd(model), names, compression=hvd.Compression.fp16)
    expect(error, "Compression.none", bitopk.horovod.attach, half, 0.1)
    once = wrapper(sgd(model), names, 0.1)
    expect(error, "already", bitopk.horovod.attach, once, 0.1)
    expect(bitopk.Error, "not connected", once.bitopk.state_dict)
    bag = ParameterBag({"real": (3,)})
    bag.odd = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    expect(error, "'odd'", wrapper, sgd(bag), bag.named_parameters(), 0.1)
    expect(error, "'odd'", bitopk.horovod.compression, 0.1, bag.named_parameters())


def one_object_for_one_optimizer() -> None:
    """Reducing gradients one by one with it would lose what the others' memories give."""
    bag = ParameterBag({"a": (30,), "b": (40,)})
    for p in bag.parameters():
        backward_exactly(p, torch.ones_like(p))
    ours = bitopk.horovod.compression(SPEC, bag.named_parameters())
    hvd.allreduce(bag.a.grad, name="a", compression=ours)
    expect(
        bitopk.InvalidArgumentError,
        "one optimizer",
        hvd.allreduce,
        bag.b.grad,
        name="b",
        compression=ours,
    )
    strange = hvd.DistributedOptimizer(
        torch.optim.SGD(make_model().parameters(), lr=0.1), compression=ours
    )
    expect(bitopk.InvalidArgumentError, "named_parameters", strange.step)


def main() -> None:
    """Run all cases that match."""
    hvd.init()
    assert hvd.size() == 2
    torch.set_num_threads(1)
    cases = Cases(sys.argv[1] if len(sys.argv) > 1 else "")
    for way in WAYS:
        for case in (
            every_optimizer_with_different_heads,
            alternating_requires_grad,
            synchronize_twice_warns,
            no_names,
            wrong_names,
            wrong_calls,
            broadcast_state,
            broadcast_options,
            broadcast_state_with_frozen_parameters,
            the_engines_end_is_horovods_error,
            sparse_as_dense,
        ):
            cases.run(f"{case.__name__}-{way}", case, way)
    for way in ("wrapper", "attach"):
        for case in (
            nonfinite_is_raised_and_training_goes_on,
            a_row_that_only_one_rank_used,
            loading_within_a_step,
            other_operations_at_construction,
        ):
            cases.run(f"{case.__name__}-{way}", case, way)
    for case in (
        all_types_pass_through,
        copies_have_their_own_engine,
        horovods_compressors_stay_horovods,
        other_operations_by_their_placeholders,
        adasum_by_its_parameters,
        bad_arguments,
        one_object_for_one_optimizer,
    ):
        cases.run(case.__name__, case)
    cases.close()
    # Gradients that were refused within a step are under way in Horovod for ever.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
