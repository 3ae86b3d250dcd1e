# SPDX-License-Identifier: Apache-2.0
"""One rank of a job in which rank 1 submits a NaN. Usage: nonfinite.py POLICY EXCHANGE."""

import sys

import bitopk
import numpy as np
from oracle import OracleGroup
from support import assert_dicts, make_grads

SHAPES = {"a": (60_000,), "b": (1500,), "small": (9,)}


def main():
    """Run a good, a bad, and another good step."""
    policy = sys.argv[1]
    spec = bitopk.Compression.topk(0.05, nonfinite=policy, exchange=sys.argv[2])
    with bitopk.init(spec, timeout=30.0) as group:
        oracle = OracleGroup.from_spec(group.size, spec)
        grads = make_grads(SHAPES, group.size, "normal", 0)
        assert_dicts(group.allreduce(grads[group.rank]), oracle.allreduce(grads)[0], "step 0")
        memory = {n: np.array(x, copy=True) for n, x in group.worker_memory().items()}
        bad = make_grads(SHAPES, group.size, "normal", 1)
        bad[1]["b"][700] = np.nan
        was_raised = False
        try:
            out = group.allreduce(bad[group.rank])
        except bitopk.errors.NonFiniteGradientError:
            was_raised = True
        assert was_raised == (policy == "raise")
        if policy == "skip":
            assert not any(np.any(x) for x in out.values())
        if policy == "propagate":
            assert np.isnan(out["b"][700])
        assert_dicts(group.worker_memory(), memory, "memory after the bad step")
        oracle.commit()
        grads = make_grads(SHAPES, group.size, "normal", 2)
        assert_dicts(group.allreduce(grads[group.rank]), oracle.allreduce(grads)[0], "step 2")
        print("in step")


if __name__ == "__main__":
    main()
