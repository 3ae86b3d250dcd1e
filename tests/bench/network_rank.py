# SPDX-License-Identifier: Apache-2.0
"""One rank of a row of network_bench.py."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import bitopk
import torch
import torch.distributed as dist

NUM_GRADIENTS = 3  # taken in turn, so that no two repetitions in a row see the same


def main() -> None:
    """Time all cases in turn."""
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # Before torch.distributed is initialised, which bitopk.init would take for its host.
    cases, groups = make_cases(options)
    dist.init_process_group(
        "gloo", init_method=f"file://{options['store']}", rank=rank, world_size=size
    )
    generator = torch.Generator().manual_seed(rank)
    gradients = [torch.randn(options["entries"], generator=generator) for _ in range(NUM_GRADIENTS)]
    work = torch.empty(options["entries"])
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    sent: dict[str, int] = {}
    for repetition in range(-2, options["repetitions"]):  # two to warm up
        for name, step in cases.items():
            work.copy_(gradients[repetition % NUM_GRADIENTS])
            before = groups[name].stats().bytes_sent if name in groups else 0
            dist.barrier()
            start = time.perf_counter()
            step(work)
            slowest = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            if repetition >= 0:
                seconds[name].append(float(slowest))
            if name in groups:
                sent[name] = groups[name].stats().bytes_sent - before
    if rank == 0:
        result = {"seconds": seconds, "bytes_sent": sent}
        Path(options["out"]).write_text(json.dumps(result), encoding="utf-8")
    dist.barrier()
    for group in groups.values():
        group.close()


def make_cases(
    options: dict[str, object],
) -> tuple[dict[str, Callable[[torch.Tensor], object]], dict[str, bitopk.Group]]:
    """Return what each case does with a gradient, in place, and the groups behind ours."""
    density = float(options["density"])
    cases: dict[str, Callable[[torch.Tensor], object]] = {}
    groups: dict[str, bitopk.Group] = {}
    for name in options["cases"]:
        if name == "dense":
            cases[name] = dist.all_reduce
        elif name == "dense-fp16":
            cases[name] = allreduce_fp16
        elif name == "sparse-allgather":
            cases[name] = SparseAllgather(density, int(options["entries"]))
        else:
            exchange, _, narrow = name.partition("-")
            spec = bitopk.Compression.topk(
                density, exchange=exchange, value_format="float16" if narrow else "float32"
            )
            groups[name] = bitopk.init(spec)
            cases[name] = make_step(groups[name])
    return cases, groups


def make_step(group: bitopk.Group) -> Callable[[torch.Tensor], object]:
    """Return one step of a group, in place."""

    def step(work: torch.Tensor) -> object:
        gradient = {"gradient": work}
        return group.allreduce(gradient, out=gradient)

    return step


def allreduce_fp16(work: torch.Tensor) -> None:
    """Do what fp16 compression of Horovod and DDP does."""
    half = work.half()
    dist.all_reduce(half)
    work.copy_(half)


class SparseAllgather:
    """What most topK compressors do: torch.topk, allgather of values and indices, dense sums."""

    def __init__(self, density: float, entries: int) -> None:
        self._k = max(1, round(density * entries))
        self._memory = torch.zeros(entries)

    def __call__(self, work: torch.Tensor) -> None:
        """Make one step, in place."""
        self._memory += work
        _, indices = torch.topk(self._memory.abs(), self._k, sorted=False)
        values = self._memory[indices]
        self._memory[indices] = 0
        size = dist.get_world_size()
        all_values = [torch.empty_like(values) for _ in range(size)]
        all_indices = [torch.empty_like(indices, dtype=torch.int32) for _ in range(size)]
        dist.all_gather(all_values, values)
        dist.all_gather(all_indices, indices.int())
        work.zero_()
        for each_values, each_indices in zip(all_values, all_indices):
            work.index_add_(0, each_indices.long(), each_values)
        work /= size


if __name__ == "__main__":
    main()
