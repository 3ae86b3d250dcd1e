# SPDX-License-Identifier: Apache-2.0
"""Train Fashion-MNIST under Horovod, dense, with fp16 or with bidirectional topK.

An example of Horovod for PyTorch in which one argument is new: ``--topk-density``. Run it with

    horovodrun -np 4 python integration/examples/horovod_fashion_mnist.py --topk-density 0.01

Without ``--topk-density`` it is plain Horovod. At the end it says what the compression saved.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import bitopk
import bitopk.horovod
import horovod.torch as hvd
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "demo"))
from fashion_mnist_data import DEBIAN_DATA, load_data, make_model

# Per rank; times the number of ranks, as in Horovod's own examples.
DEFAULT_LR = {"sgd": 0.025, "momentum": 0.0025, "adamw": 0.000125}


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Fashion-MNIST with Horovod and bitopk",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--batch-size", type=int, default=16, help="samples per rank and step")
    add("--epochs", type=int, default=5, help="passes over the data")
    add("--optimizer", choices=tuple(DEFAULT_LR), default="sgd")
    add("--lr", type=float, help=f"step size for one rank; by default {DEFAULT_LR}")
    add("--momentum", type=float, default=0.9, help="of --optimizer momentum")
    add("--seed", type=int, default=42, help="of the weights and of the order of the data")
    add("--fp16-allreduce", action="store_true", help="Horovod's fp16 compression")
    add("--topk-density", type=float, help="fraction of the gradients' entries that travel")
    add("--start-step", type=int, default=0, help="steps before this one are dense")
    add(
        "--gradient-predivide-factor",
        type=float,
        default=1.0,
        help="divide gradients by it before the sum, and multiply after",
    )
    add("--data-dir", type=Path, default=DEBIAN_DATA, help="folder with the four idx .gz files")
    arguments = parser.parse_args()
    if arguments.fp16_allreduce and arguments.topk_density:
        parser.error("--fp16-allreduce and --topk-density exclude each other")
    return arguments


def make_optimizer(arguments: argparse.Namespace, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Make the optimizer and wrap it."""
    lr = (arguments.lr or DEFAULT_LR[arguments.optimizer]) * hvd.size()
    if arguments.optimizer == "adamw":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    else:
        momentum = arguments.momentum if arguments.optimizer == "momentum" else 0.0
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)

    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    # The one place that differs from plain Horovod.
    compression = hvd.Compression.fp16 if arguments.fp16_allreduce else hvd.Compression.none
    if arguments.topk_density:
        compression = bitopk.Compression.topk(
            arguments.topk_density, start_step=arguments.start_step
        )
    return bitopk.horovod.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=compression,
        gradient_predivide_factor=arguments.gradient_predivide_factor,
    )


def main() -> None:
    """Train, and evaluate after each epoch."""
    arguments = parse_arguments()
    hvd.init()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)

    train_set, test_set = (TensorDataset(*part) for part in load_data(arguments.data_dir))
    sampler = DistributedSampler(
        train_set, num_replicas=hvd.size(), rank=hvd.rank(), seed=arguments.seed
    )
    # Every rank makes the same number of steps: the sampler pads.
    loader = DataLoader(train_set, batch_size=arguments.batch_size, sampler=sampler)
    model = make_model(arguments.seed)
    optimizer = make_optimizer(arguments, model)

    num_steps, seconds = 0, 0.0
    for epoch in range(1, arguments.epochs + 1):
        sampler.set_epoch(epoch)
        started = time.perf_counter()
        for images, labels in loader:
            optimizer.zero_grad()
            loss = functional.nll_loss(model(images), labels)
            loss.backward()
            optimizer.step()
            num_steps += 1
        seconds += time.perf_counter() - started
        accuracy = test_accuracy(model, test_set)
        if hvd.rank() == 0:
            print(f"epoch {epoch}: test accuracy {accuracy:.2f} %", flush=True)
    report(model, optimizer, num_steps, seconds)


@torch.no_grad()
def test_accuracy(model: torch.nn.Module, test_set: TensorDataset) -> float:
    """Return the per cent of test samples that are classified rightly, each rank doing a part."""
    images, labels = (part[hvd.rank() :: hvd.size()] for part in test_set.tensors)
    right = (model(images).argmax(dim=1) == labels).sum()
    counts = hvd.allreduce(torch.stack([right, torch.tensor(len(labels))]), op=hvd.Sum, name="acc")
    return 100.0 * counts[0].item() / counts[1].item()


def report(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, num_steps: int, seconds: float
) -> None:
    """Print what was saved against dense allreduce; every rank must call it."""
    dense_ms = 1e3 * time_dense_allreduce(model)
    if hvd.rank() != 0:
        return
    print(f"{num_steps} steps, {1e3 * seconds / num_steps:.2f} ms each")
    if not hasattr(optimizer, "bitopk") or hvd.size() == 1:
        return
    stats = optimizer.bitopk.stats()
    sent, dense = stats.bytes_sent / stats.steps, stats.dense_bytes / stats.steps
    print(
        f"sent per step: {sent:,.0f} bytes instead of {dense:,.0f} "
        f"({stats.compression_ratio:.1f} times fewer)"
    )
    # What the engine does; its wait for gradients is the backward pass.
    ms = {stage: 1e3 * s / stats.steps for stage, s in stats.seconds.items() if stage != "wait"}
    gained = dense_ms - sum(ms.values())
    print(
        f"exchange per step: {sum(ms.values()):.2f} ms instead of {dense_ms:.2f} "
        f"({abs(gained):.2f} ms {'gained' if gained > 0 else 'lost'}): "
        + ", ".join(f"{stage} {value:.2f}" for stage, value in ms.items() if value >= 0.005)
    )


def time_dense_allreduce(model: torch.nn.Module, rounds: int = 20) -> float:
    """Return the seconds that Horovod takes to reduce all gradients, dense and in one piece."""
    gradients = [torch.zeros_like(p) for p in model.parameters()]
    hvd.grouped_allreduce_(gradients, name="warm-up")
    started = time.perf_counter()
    for _ in range(rounds):
        hvd.grouped_allreduce_(gradients, name="dense")
    return (time.perf_counter() - started) / rounds


if __name__ == "__main__":
    main()
