# SPDX-License-Identifier: Apache-2.0
"""A job with a checkpoint of rank 0 only. Usage: gathered.py EXCHANGE save|load FILE."""

import sys

import bitopk
import numpy as np
import torch
from support import make_grads

SHAPES = {"a": (60_000,), "b": (1500,), "small": (9,)}


def main():
    """Save the state of all ranks in one file, or go on from it."""
    exchange, mode, path = sys.argv[1:]
    spec = bitopk.Compression.topk(0.05, exchange=exchange)
    with bitopk.init(spec, timeout=30.0) as group:
        if mode == "save":
            for seed in range(3):
                group.allreduce(make_grads(SHAPES, group.size, "normal", seed)[group.rank])
            state = bitopk.checkpoint.gather(group)
            assert (state is None) == (group.rank != 0)
            server = group.server_memory()
            if state is not None:
                torch.save({"state": state, "server": torch.from_numpy(server["a"])}, path)
        else:
            saved = torch.load(path, weights_only=True)
            group.load_state_dict(saved["state"])
            group.allreduce(make_grads(SHAPES, group.size, "zeros", 0)[group.rank])
            group.rollback()
            assert np.array_equal(group.server_memory()["a"], saved["server"].numpy())
            parts = saved["state"]["parts"]
            memory = group.worker_memory()["a"]
            if len(parts) == group.size:
                expected = parts[group.rank]["worker_memory"]["a"].numpy()
            else:
                chosen = [p["worker_memory"]["a"].numpy() for p in parts[group.rank :: group.size]]
                expected = np.float32(group.size / len(parts)) * sum(chosen)
            assert np.allclose(memory, expected, rtol=1e-6)
    print(f"{mode} with {group.size} ranks")


if __name__ == "__main__":
    main()
