# SPDX-License-Identifier: Apache-2.0
"""One rank of a job that trains with `topk_hook`. Usage: ddp_topk.py CASE..."""

import contextlib
import sys

import bitopk
import bitopk.torch
import numpy as np
import torch
import torch.distributed as dist
from bitopk import LocalGroup
from bitopk.ddp import TopKState, topk_hook
from bitopk.hosts import torch_host
from ddp_models import (
    LR,
    RANK,
    SPEC,
    WORLD_SIZE,
    Bag,
    Branching,
    all_objects,
    as_numpy,
    batch,
    check_close,
    check_replicas,
    descend,
    error_of,
    gradients,
    hooked,
    loss_of,
    make,
    start,
    wrap,
)
from support import assert_bits, assert_dicts, make_grads
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper

ALL = bitopk.Compression.topk(1.0, dense_below=0)


def local_gradients(model, x, **options):
    """Return the gradients of one rank without DDP."""
    copy = make(Branching)
    copy.load_state_dict(model.module.state_dict())
    loss_of(copy, x, **options).backward()
    return as_numpy(gradients(copy))


def equals_a_local_group():
    """100 steps are those of a LocalGroup that gets the same gradients, whatever the transport."""
    for transport in ("gloo", "torch"):
        model, state = hooked(make(Branching), transport=transport, timeout=30.0)
        group = LocalGroup(WORLD_SIZE, SPEC)
        num_steps = 100 if transport == "gloo" else 20
        for step in range(num_steps):
            expected = group.allreduce(all_objects(local_gradients(model, batch(step))))
            loss_of(model, batch(step)).backward()
            what = f"{transport} step {step}"
            assert_dicts(as_numpy(gradients(model)), expected[RANK], what)
            descend(model)
            model.zero_grad()
        assert_dicts(state.worker_memory(), group.worker_memory(RANK), "worker", rest_zero=True)
        assert_dicts(state.server_memory(), group.server_memory(), "server", rest_zero=True)
        check_replicas(model, transport)
        rate, before, after = state.compression_stats()
        assert state.stats().steps == num_steps
        assert rate == before / after
        state.close()


def virtual_iterate(model, state):
    """Return the parameters less all that the memories hold: plain SGD's, says the paper."""
    memories = all_objects(state.worker_memory())
    server = state.server_memory()
    out = {}
    for name, p in model.module.named_parameters():
        left = (
            server.get(name, 0.0) + sum(memory.get(name, 0.0) for memory in memories) / WORLD_SIZE
        )
        out[name] = p.detach().numpy() - LR * np.asarray(left)
    return out


def what_no_rank_uses_stays_in_the_memories():
    """A branch is left out by all ranks for some steps; nothing is lost, nothing is twice."""
    for views in (False, True):
        for set_to_none in (False, True):
            check_unused(views, set_to_none)


def check_unused(views, set_to_none):
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": views}
    model, state = hooked(make(Branching), options=options)
    plain = {
        name: p.detach().numpy().astype(np.float64)
        for name, p in make(Branching).named_parameters()
    }
    given_back = 0
    for step in range(30):
        use = step % 5 < 2 or (step % 5 == 2 and RANK == 0)
        for grads in all_objects(local_gradients(model, batch(step), use_branch=use)):
            for name, g in grads.items():
                plain[name] -= LR * g / WORLD_SIZE
        before = model.module.branch.weight.detach().clone()
        loss_of(model, batch(step), use_branch=use).backward()
        descend(model)
        if step % 5 > 2:
            given_back += 1
            assert torch.equal(model.module.branch.weight, before)
        model.zero_grad(set_to_none=set_to_none)
    assert given_back == 12
    for name, array in virtual_iterate(model, state).items():
        assert np.abs(array - plain[name]).max() < 1e-5, (views, set_to_none, name)
    check_replicas(model, "unused")
    state.close()


def gradients_of_another_step_are_left_alone():
    """What a parameter that no rank uses still has as gradient is neither sent nor changed."""
    for views in (False, True):
        options = {"find_unused_parameters": True, "gradient_as_bucket_view": views}
        model, state = hooked(make(Branching), options=options)
        for step in range(6):
            loss_of(model, batch(step)).backward()
        memories = state.worker_memory(), state.server_memory()
        old = model.module.branch.weight.grad.clone()
        assert old.any()
        loss_of(model, batch(6), use_branch=False).backward()
        assert torch.equal(model.module.branch.weight.grad, old)
        left = [w["branch.weight"] for w in all_objects(state.worker_memory())]
        left = sum(left) / WORLD_SIZE + state.server_memory()["branch.weight"]
        then = [w["branch.weight"] for w in all_objects(memories[0])]
        then = sum(then) / WORLD_SIZE + memories[1]["branch.weight"]
        assert np.abs(left - then).max() < 1e-6
        state.close()


def uneven_inputs():
    """Ranks that have no more batches take part under Join; at density 1 as in DDP itself."""
    for spec in (SPEC, ALL):
        for find_unused in (False, True):
            ours, state = hooked(make(Branching), spec, {"find_unused_parameters": find_unused})
            dense = wrap(make(Branching), find_unused_parameters=find_unused)
            for model in (ours, dense):
                with model.join():
                    for step in range(3 * RANK):  # rank 0 has none at all
                        loss_of(model, batch(step)).backward()
                        descend(model)
                        model.zero_grad()
            check_replicas(ours, "join")
            assert state.stats().steps == 3 * (WORLD_SIZE - 1)
            if spec is ALL:
                check_close(ours, dense, "join", rtol=1e-5, atol=1e-6)
            state.close()


class Words(nn.Module):
    """An embedding with sparse gradients between others; half of the model in float64."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 80)
        self.words = nn.Embedding(100, 16, sparse=True)
        self.last = nn.Linear(80, 40).double()

    def forward(self, x):
        words = (10 * x[:, 0]).long().remainder(100)
        return self.last(self.first(self.words(words)).double())


def sparse_gradients():
    """Sparse buckets are torch's own; at density 1 all is as in DDP itself."""
    for options in ({}, {"static_graph": True}, {"find_unused_parameters": True}):
        for spec in (SPEC, ALL):
            ours, state = hooked(make(Words), spec, options)
            dense = wrap(make(Words), **options)
            for step in range(6):
                for model in (ours, dense):
                    model(batch(step)).square().mean().backward()
                    assert model.module.words.weight.grad.is_sparse
                    descend(model)
                    model.zero_grad()
            check_replicas(ours, f"sparse {options}")
            assert "words.weight" not in state.worker_memory()
            if spec is ALL:
                check_close(ours, dense, f"sparse {options}", rtol=1e-5, atol=1e-6)
            state.close()


def several_process_groups():
    """Two models with two groups at once; a rank that is in neither is not asked."""
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    trained = []
    for pair, ranks in zip(pairs, ([0, 1], [1, 2])):
        if RANK in ranks:
            model, state = hooked(
                make(Branching), options={"process_group": pair}, process_group=pair
            )
            trained.append((model, state, pair, ranks))
    groups = {tuple(ranks): LocalGroup(2, SPEC) for *_, ranks in trained}
    for step in range(5):
        for model, _, pair, ranks in trained:
            parts = [None, None]
            dist.all_gather_object(parts, local_gradients(model, batch(step)), group=pair)
            expected = groups[tuple(ranks)].allreduce(parts)[0]
            loss_of(model, batch(step)).backward()
            assert_dicts(as_numpy(gradients(model)), expected, f"ranks {ranks} step {step}")
            descend(model)
            model.zero_grad()
    for _, state, *_ in trained:
        state.close()
    if RANK == 0:
        error = error_of(lambda: torch_host(pairs[1]))
        assert "rank 0 of 3 is not in the process group" in str(error)


def memory_formats():
    """Memories are in the logical order of the parameters, whatever their memory format."""

    def convolution():
        torch.manual_seed(3)
        return nn.Conv2d(8, 16, 3)

    x = torch.randn(2, 8, 6, 6, generator=torch.Generator().manual_seed(RANK))
    results = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        model, state = hooked(convolution().to(memory_format=memory_format))
        model(x).square().mean().backward()
        results.append((model.module.weight.grad.numpy(), state.worker_memory()["weight"]))
        state.close()
    for left, right in zip(*results):
        assert np.allclose(left, right, rtol=1e-4, atol=1e-6)
        assert np.array_equal(left == 0, right == 0)


def schedules_and_densities():
    """A schedule is followed; set_density ends it."""
    model, state = hooked(make(Branching), schedule=lambda step: 0.5 if step < 2 else 0.01)
    entries = []
    for step in range(6):
        if step == 4:
            state.set_density(0.1)
        loss_of(model, batch(step)).backward()
        entries.append(state.stats().entries_up - sum(entries))
        model.zero_grad()
    compressed = 40 * 60 + 60 * 60 + 60 * 30
    assert [round(n / compressed, 2) for n in entries] == [0.5, 0.5, 0.01, 0.01, 0.1, 0.1], entries
    state.close()


def discarded_steps():
    """A rolled back step leaves nothing in the memories."""
    model, state = hooked(make(Branching))
    loss_of(model, batch(0)).backward()
    state.commit()
    before = state.worker_memory(), state.server_memory()
    loss_of(model, batch(1)).backward()
    state.rollback()
    assert_dicts(state.worker_memory(), before[0], "worker")
    assert_dicts(state.server_memory(), before[1], "server")
    state.close()


def wrapped_hooks():
    """The wrappers of torch compose with the hook."""
    model = wrap(make(Branching))
    state = TopKState(0.1, model.named_parameters())
    model.register_comm_hook(state, fp16_compress_wrapper(topk_hook))
    for step in range(4):
        loss_of(model, batch(step)).backward()
        descend(model)
        model.zero_grad()
    check_replicas(model, "wrapped")
    state.close()


def one_rank_alone():
    """A group of one rank works like any other."""
    alone = [dist.new_group([rank]) for rank in range(WORLD_SIZE)][RANK]
    model, state = hooked(make(Branching), ALL, {"process_group": alone}, process_group=alone)
    expected = local_gradients(model, batch(0))
    loss_of(model, batch(0)).backward()
    assert_dicts(as_numpy(gradients(model)), expected, "alone")
    assert state.compression_stats()[0] == 0.0
    state.close()


def named_parameters_are_checked():
    """Wrong parameters are refused by shape, on all ranks, before anything is sent."""
    with contextlib.suppress(bitopk.InvalidArgumentError):
        TopKState(0.1, [("a", nn.Parameter(torch.zeros(3)))] * 2)
        sys.exit("no error")
    model = wrap(make(Branching))
    others = [("x", nn.Parameter(torch.zeros(3))), *make(Branching).named_parameters()]
    model.register_comm_hook(TopKState(0.1, others), topk_hook)
    error = error_of(lambda: loss_of(model, batch(0)).backward())
    assert "parameter of shape [" in str(error)
    # All buckets come at once, and DDP does not say which is the last.
    bitopk.ddp._NEXT_BUCKET_SECONDS = 1.0
    words = wrap(make(Words), static_graph=True)
    state = TopKState(0.1, [*words.named_parameters(), ("x", nn.Parameter(torch.zeros(3)))])
    words.register_comm_hook(state, topk_hook)
    error = error_of(lambda: words(batch(0)).square().mean().backward())
    assert "'x' (1 of 6 parameters)" in str(error), error


def nonfinite_gradients():
    """With "raise" all ranks raise, and training goes on as if that step had not been."""
    for options in ({}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}):
        spec = bitopk.Compression.topk(0.01, nonfinite="raise")
        model, state = hooked(make(Branching), spec, options)
        other, other_state = hooked(make(Branching), spec, options)
        for step in range(6):
            for each, each_state in ((model, state), (other, other_state)):
                if each is other and step == 3:
                    continue
                bad = float("nan") if step == 3 and RANK == 1 else 1.0
                loss = bad * loss_of(each, batch(step))
                if step == 3:
                    error = error_of(loss.backward, bitopk.NonFiniteGradientError)
                    assert "rank 1" in str(error)
                    assert each_state.stats().dropped_steps == 1
                else:
                    loss.backward()
                    descend(each)
                each.zero_grad()
        check_close(model, other, "after NaN", bits=True)
        check_replicas(model, "after NaN")
        state.close()
        other_state.close()
    for policy in ("propagate", "skip"):
        spec = bitopk.Compression.topk(0.01, nonfinite=policy)
        model, state = hooked(make(Branching), spec, {"find_unused_parameters": True})
        loss_of(model, batch(0)).backward()
        state.commit()
        before = state.worker_memory()
        model.zero_grad()
        bad = float("nan") if RANK == 1 else 1.0
        (bad * loss_of(model, batch(1), use_branch=False)).backward()
        found = any(not g.isfinite().all() for g in gradients(model).values())
        assert found == (policy == "propagate")
        assert_dicts(state.worker_memory(), before, f"memories, {policy}")
        state.close()


def half_precision():
    """Narrow gradients keep what their result was rounded by."""
    model, state = hooked(Bag(torch.float16, torch.float32), bitopk.Compression.topk(0.1))
    for step in range(5):
        loss_of(model, batch(step)).backward()
        assert model.module.bag[0].grad.dtype == torch.float16
        descend(model)
        model.zero_grad()
    check_replicas(model, "float16")
    assert set(state.worker_memory()) == {"bag.0", "bag.1"}
    assert_bits(state.server_memory()["bag.0"].shape, (50, 40), "shape")
    state.close()


def reductions_by_hand():
    """A Reducer over torch.distributed: over a group of it, and through its collectives."""
    shapes = {"a": (300, 40), "b": (20,)}
    group = dist.new_group(list(range(WORLD_SIZE)))
    options = ({}, {"process_group": group}, {"transport": "torch", "timeout": 20.0})
    for option in options:
        local = LocalGroup(WORLD_SIZE, SPEC)
        with bitopk.torch.Reducer(SPEC, **option) as reducer:
            for step in range(5):
                grads = make_grads(shapes, WORLD_SIZE, "normal", step)
                expected = local.allreduce(grads)[RANK]
                for name, gradient in grads[RANK].items():
                    reducer.all_reduce_(torch.from_numpy(gradient), name).wait()
                assert_dicts(grads[RANK], expected, f"{option} step {step}")


if __name__ == "__main__":
    start()
    for case in sys.argv[1:]:
        globals()[case]()
        print(case, flush=True)
    print("all equal")
