# SPDX-License-Identifier: Apache-2.0
"""One rank of a job that saves and goes on. Usage: ddp_restart.py CASE..."""

import io
import logging
import pickle
import sys

import bitopk
import torch
from bitopk.ddp import TopKState, topk_hook
from ddp_models import (
    RANK,
    SPEC,
    WORLD_SIZE,
    Branching,
    check_close,
    check_replicas,
    error_of,
    hooked,
    make,
    start,
    train,
    wrap,
)
from support import assert_dicts

# Resumed runs form other buckets than the first did.
OTHER_BUCKETS = {"bucket_cap_mb": 25, "gradient_as_bucket_view": True}


def saved_and_loaded(thing):
    """Return what a checkpoint makes of something that it holds."""
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resumed(model):
    """Return a new model in the state of another one."""
    copy = make(Branching, seed=9)
    copy.load_state_dict(saved_and_loaded(model.module.state_dict()))
    return copy


def check_same(left, right, left_state, right_state, what):
    """Fail unless two trainings are at the same point, bit for bit."""
    check_close(left, right, what, bits=True)
    check_replicas(right, what)
    assert_dicts(left_state.worker_memory(), right_state.worker_memory(), f"{what}: worker")
    assert_dicts(left_state.server_memory(), right_state.server_memory(), f"{what}: server")


def checkpoint():
    """Training that goes on from a checkpoint is training that was never interrupted."""
    for exchange in ("allgather", "sharded"):
        spec = bitopk.Compression.topk(0.01, exchange=exchange)
        model, state = hooked(make(Branching), spec)
        train(model, range(7))
        part = saved_and_loaded(state.state_dict())
        assert part["rank"] == RANK
        again, again_state = hooked(resumed(model), spec, OTHER_BUCKETS)
        again_state.load_state_dict(part)
        late, late_state = hooked(resumed(model), spec, OTHER_BUCKETS)
        train(late, [99])  # in the middle of something else, which loading ends
        late.module.load_state_dict(model.module.state_dict())
        late_state.load_state_dict(part)
        for each in (model, again, late):
            train(each, range(7, 14))
        check_same(model, again, state, again_state, f"{exchange}, resumed")
        check_same(model, late, state, late_state, f"{exchange}, loaded late")
        for each in (state, again_state, late_state):
            each.close()


def whole_checkpoint():
    """One rank collects what all of them have; it loads like the parts do."""
    model, state = hooked(make(Branching))
    train(model, range(4))
    whole = bitopk.checkpoint.gather(state)
    assert (whole is None) == (RANK != 0)
    box = [whole]
    torch.distributed.broadcast_object_list(box)
    again, again_state = hooked(resumed(model), options=OTHER_BUCKETS)
    again_state.load_state_dict(saved_and_loaded(box[0]))
    for each in (model, again):
        train(each, range(4, 9))
    check_same(model, again, state, again_state, "whole")


def refusals():
    """Damaged states are refused at once, those of other models by name in the next step."""
    model, state = hooked(make(Branching))
    for call in (state.state_dict, state.worker_memory, state.stats, state.commit):
        assert "no step yet" in str(error_of(call, bitopk.Error))
    assert "format" in str(error_of(lambda: state.load_state_dict({"format": 0})))
    assert state.compression_stats() == (0.0, 0, 0)
    train(model, range(2))
    other, other_state = hooked(make(Branching, unused=True), options={"static_graph": True})
    other_state.load_state_dict(state.state_dict())
    error = error_of(lambda: train(other, [0]))
    assert "of 6 parameters, DDP reduces 8; the first that differ are None in the state" in str(
        error
    )
    assert "'never.weight' here" in str(error)


class Lines(logging.Handler):
    """Collects what is logged."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        """Keep one line."""
        self.lines.append(record.getMessage())


def pickled():
    """A pickled state keeps memories and settings, and says what it does not keep."""
    lines = Lines()
    logging.getLogger("bitopk").addHandler(lines)
    logging.getLogger("bitopk").setLevel(logging.WARNING)
    group = torch.distributed.new_group(list(range(WORLD_SIZE)))
    model, state = hooked(
        make(Branching), process_group=group, scale=lambda: 4.0, timeout=20.0, transport="torch"
    )
    train(model, range(5))
    lines.lines.clear()
    data = pickle.dumps({"state": state, "hook": topk_hook})
    assert any("process group" in line and "scale" in line for line in lines.lines)
    lines.lines.clear()
    loaded = pickle.loads(data)
    assert any("default group" in line for line in lines.lines)
    assert loaded["hook"] is topk_hook
    loaded = loaded["state"]
    assert loaded.process_group is None
    assert loaded.spec == SPEC
    logging.getLogger("bitopk").setLevel(logging.ERROR)

    unbound = wrap(resumed(model))
    unbound.register_comm_hook(pickle.loads(data)["state"], topk_hook)
    assert "bind" in str(error_of(lambda: train(unbound, [0])))
    again = wrap(resumed(model), **OTHER_BUCKETS)
    loaded.bind(again.named_parameters(), scale=lambda: 4.0)
    again.register_comm_hook(loaded, topk_hook)
    for each in (model, again):
        train(each, range(5, 10))
    check_same(model, again, state, loaded, "pickled")
    # Before the first step, too, and with what waits to be loaded.
    fresh = TopKState(0.5, model.named_parameters(), scale=2.0)
    fresh.load_state_dict(state.state_dict())
    copy = pickle.loads(pickle.dumps(fresh))
    assert copy.scale == 2.0
    assert copy.spec == bitopk.Compression.topk(0.5)
    for each in (state, loaded):
        each.close()


if __name__ == "__main__":
    start()
    for case in sys.argv[1:]:
        globals()[case]()
        print(case, flush=True)
    print("all equal")
