# SPDX-License-Identifier: Apache-2.0
"""One rank of a job that saves its state, goes on, and goes back. Usage: state.py EXCHANGE."""

import sys

import bitopk
from oracle import OracleGroup
from support import assert_dicts, make_grads

SHAPES = {"a": (60_000,), "b": (1500,), "small": (9,)}


def main():
    """Compare a run that was interrupted with one that was not."""
    spec = bitopk.Compression.topk(0.05, exchange=sys.argv[1])
    with bitopk.init(spec, timeout=30.0) as group:
        oracle = OracleGroup.from_spec(group.size, spec)

        def step(seed, what):
            grads = make_grads(SHAPES, group.size, "normal", seed)
            assert_dicts(group.allreduce(grads[group.rank]), oracle.allreduce(grads)[0], what)

        for seed in range(3):
            step(seed, f"step {seed}")
        group.commit()
        oracle.commit()
        state = group.state_dict()
        for seed in (50, 51):
            group.allreduce(make_grads(SHAPES, group.size, "few", seed)[group.rank])
        group.load_state_dict(state)
        assert_dicts(group.worker_memory(), oracle.worker_memory(group.rank), "m", rest_zero=True)
        assert_dicts(group.server_memory(), oracle.server_memory(), "delta", rest_zero=True)
        step(3, "step after loading")
        group.allreduce(make_grads(SHAPES, group.size, "few", 60)[group.rank])
        group.rollback()
        step(4, "step after rollback")
        group.commit()
        group.set_density(0.01, 1.0)
        oracle.commit()
        oracle.set_density(0.01, 1.0)
        step(5, "step with another density")
    with bitopk.init(spec, timeout=30.0) as again:  # a second, independent context
        oracle = OracleGroup.from_spec(again.size, spec)
        again.allreduce(make_grads(SHAPES, again.size, "few", 70)[again.rank])  # fixes the tensors
        again.load_state_dict(state)
        for seed in range(3):
            oracle.allreduce(make_grads(SHAPES, again.size, "normal", seed))
        grads = make_grads(SHAPES, again.size, "normal", 3)
        assert_dicts(again.allreduce(grads[again.rank]), oracle.allreduce(grads)[0], "resumed")
    print("state kept")


if __name__ == "__main__":
    main()
