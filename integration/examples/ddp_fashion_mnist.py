# SPDX-License-Identifier: Apache-2.0
"""Train Fashion-MNIST with DistributedDataParallel, dense, with fp16 or with bidirectional topK.

    torchrun --nproc-per-node 4 integration/examples/ddp_fashion_mnist.py --topk-density 0.01

Without ``--topk-density`` it is plain DDP. At the end it says what the compression saved.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import bitopk
import bitopk.ddp
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "demo"))
from fashion_mnist_data import DEBIAN_DATA, load_data, make_model


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Fashion-MNIST with DDP and bitopk",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--batch-size", type=int, default=16, help="samples per rank and step")
    add("--epochs", type=int, default=5, help="passes over the data")
    add("--lr", type=float, default=0.1, help="step size of SGD")
    add("--seed", type=int, default=42, help="of the weights and of the order of the data")
    add("--fp16-allreduce", action="store_true", help="torch's fp16 communication hook")
    add("--topk-density", type=float, help="fraction of the gradients' entries that travel")
    add("--start-step", type=int, default=0, help="steps before this one are dense")
    add("--data-dir", type=Path, default=DEBIAN_DATA, help="folder with the four idx .gz files")
    arguments = parser.parse_args()
    if arguments.fp16_allreduce and arguments.topk_density:
        parser.error("--fp16-allreduce and --topk-density exclude each other")
    if "MASTER_ADDR" not in os.environ:
        parser.error("start it with torchrun, which tells the ranks of each other")
    return arguments


def main() -> None:
    """Train, and evaluate after each epoch."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()

    train_set, test_set = (TensorDataset(*part) for part in load_data(arguments.data_dir))
    sampler = DistributedSampler(train_set, seed=arguments.seed)
    loader = DataLoader(train_set, batch_size=arguments.batch_size, sampler=sampler)
    model = DistributedDataParallel(make_model(arguments.seed))
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr)

    # The one place that differs from plain DDP.
    state = None
    if arguments.topk_density:
        spec = bitopk.Compression.topk(arguments.topk_density, start_step=arguments.start_step)
        state = bitopk.ddp.TopKState(spec, model.module.named_parameters())
        model.register_comm_hook(state, bitopk.ddp.topk_hook)
    elif arguments.fp16_allreduce:
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)

    num_steps, seconds = 0, 0.0
    for epoch in range(1, arguments.epochs + 1):
        sampler.set_epoch(epoch)
        started = time.perf_counter()
        for images, labels in loader:
            optimizer.zero_grad()
            functional.nll_loss(model(images), labels).backward()
            optimizer.step()
            num_steps += 1
        seconds += time.perf_counter() - started
        if rank == 0:
            print(f"epoch {epoch}: test accuracy {test_accuracy(model.module, test_set):.2f} %")
    if rank == 0:
        print(f"{num_steps} steps of {size} ranks, {1e3 * seconds / num_steps:.2f} ms each")
        if state is not None:
            rate, before, after = state.compression_stats()
            print(
                f"sent per step: {after / num_steps:,.0f} bytes instead of "
                f"{before / num_steps:,.0f} ({rate:.1f} times fewer)"
            )
    dist.barrier()
    if state is not None:
        state.close()
    dist.destroy_process_group()


@torch.no_grad()
def test_accuracy(model: torch.nn.Module, test_set: TensorDataset) -> float:
    """Return the per cent of test samples that are classified rightly."""
    images, labels = test_set.tensors
    right = (model(images).argmax(dim=1) == labels).sum()
    return 100.0 * right.item() / len(labels)


if __name__ == "__main__":
    main()
