# SPDX-License-Identifier: Apache-2.0
"""Train Fashion-MNIST on several processes, dense and with topK in one or both directions.

One rank of the demo; `./run demo` starts four with ``bitopk launch -np 4``. Three trainings run one
after the other from the same weights on the same data in the same order, and differ only in how
gradients are exchanged. At the end rank 0 prints a table and writes a plot (PNG) and all numbers
(JSON).

Model, batch size, densities and plain SGD are those of [ZDL22]: an MLP 784-256-128-64-10 with
d = 242,762 parameters, batch 10 per worker, topK over the whole gradient.

References
----------
.. [ZDL22] W. Zou, H. De Sterck, J. Liu, arXiv 2209.15203.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import bitopk
import numpy as np
import torch
from fashion_mnist_data import DEBIAN_DATA, accuracy, load_data, make_model
from torch.nn import functional

METHODS = ("dense", "unidirectional", "bidirectional")
EVALUATIONS_PER_EPOCH = 4


@dataclass
class Result:
    """What one training gave, as rank 0 knows it at the end."""

    method: str
    spec: str
    num_steps: int = 0
    epochs: list[float] = field(default_factory=list)  # at each evaluation
    test_accuracy: list[float] = field(default_factory=list)  # per cent
    megabytes_sent: list[float] = field(default_factory=list)  # so far, rank that sends most
    train_loss: list[float] = field(default_factory=list)  # mean since the last evaluation, rank 0
    bytes_sent_per_step: list[float] = field(default_factory=list)  # per rank
    bytes_received_per_step: list[float] = field(default_factory=list)  # per rank
    dense_bytes_per_step: float = 0.0
    compression_ratio: float = 0.0
    milliseconds_per_step: dict[str, float] = field(default_factory=dict)  # by stage, rank 0
    seconds: float = 0.0  # wall clock of the training without evaluations


def main() -> None:
    """Run all trainings on this rank."""
    arguments = parse_arguments()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    train_set, test_set = load_data(arguments.data)
    results = []
    # A second group, not compressed, carries what the report needs; its traffic is not counted.
    with bitopk.init(bitopk.Compression.none) as control:
        check_ranks(arguments, control.size)
        for method in arguments.methods:
            result = train(method, arguments, train_set, test_set, control)
            results.append(result)
        if control.rank == 0:
            report(results, arguments, control.size)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="./run demo",
        description="Train Fashion-MNIST with dense, unidirectional and bidirectional exchange.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--epochs", type=int, default=5, help="passes over the data, for each method")
    add("--ranks", type=int, help="number of processes (./run demo: 4)")
    add("--methods", default=",".join(METHODS), help="which trainings to run, with commas between")
    add("--density", type=float, default=0.001, help="fraction of entries that go up")
    add("--density-down", type=float, help="fraction that comes back (as --density by default)")
    add(
        "--exchange",
        default="sharded",
        choices=("auto", "allgather", "sharded"),
        help="exchange of the compressed trainings",
    )
    add("--lr", type=float, default=0.08, help="step size, constant")
    add("--batch", type=int, default=10, help="samples per rank and step")
    add("--seed", type=int, default=0, help="of the weights and of the order of the data")
    add("--data", type=Path, default=DEBIAN_DATA, help="folder with the four idx .gz files")
    add("--out", type=Path, default=Path("build/demo"), help="folder for the plot and the numbers")
    arguments = parser.parse_args()
    arguments.methods = arguments.methods.split(",")
    for method in arguments.methods:
        if method not in METHODS:
            parser.error(f"--methods: unknown {method!r}; known: {', '.join(METHODS)}")
    for name in ("epochs", "batch", "lr"):
        if not getattr(arguments, name) > 0:
            parser.error(f"--{name} must be positive; got {getattr(arguments, name)}")
    return arguments


def check_ranks(arguments: argparse.Namespace, world_size: int) -> None:
    """Refuse a number of ranks that is not the number of processes."""
    if arguments.ranks not in (None, world_size):
        sys.exit(f"--ranks {arguments.ranks}, but {world_size} processes were started")


def make_spec(method: str, arguments: argparse.Namespace) -> bitopk.Compression:
    """Return the compression of one of the three trainings."""
    down = {
        "dense": 1.0,
        "unidirectional": 1.0,
        "bidirectional": arguments.density_down or arguments.density,
    }
    return bitopk.Compression.topk(
        arguments.density,
        down[method],
        scope="global",  # one selection over the whole gradient, as in the paper
        dense_below=0,
        exchange="dense" if method == "dense" else arguments.exchange,
    )


# --- data ----------------------------------------------------------------------------------------


def batches(
    num_samples: int, epoch: int, rank: int, world_size: int, arguments: argparse.Namespace
) -> Iterator[torch.Tensor]:
    """Yield the sample numbers of each step of this rank.

    A permutation that depends on the seed alone deals the samples to the ranks (IID, equal parts);
    each epoch shuffles the rank's own part anew.
    """
    deal = np.random.default_rng(arguments.seed).permutation(num_samples)
    own = deal[rank : num_samples - num_samples % world_size : world_size]
    order = np.random.default_rng([arguments.seed, epoch, rank]).permutation(own)
    for begin in range(0, len(order) - arguments.batch + 1, arguments.batch):
        yield torch.from_numpy(order[begin : begin + arguments.batch])


# --- training ------------------------------------------------------------------------------------


class Stopwatch:
    """Adds up the time of each stage of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def restart(self) -> None:
        """Leave the time since the last lap out."""
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        """Add the time since the last lap to `stage`."""
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now


def train(
    method: str,
    arguments: argparse.Namespace,
    train_set: tuple[torch.Tensor, torch.Tensor],
    test_set: tuple[torch.Tensor, torch.Tensor],
    control: bitopk.Group,
) -> Result:
    """Train from the start with one method; every rank must call it."""
    images, labels = train_set
    model = make_model(arguments.seed)
    parameters = dict(model.named_parameters())
    spec = make_spec(method, arguments)
    result = Result(method, repr(spec))
    steps_per_epoch = len(labels) // control.size // arguments.batch
    evaluate_every = max(1, steps_per_epoch // EVALUATIONS_PER_EPOCH)
    num_steps = steps_per_epoch * arguments.epochs
    bytes_sent, losses, watch = [], [], Stopwatch()

    with bitopk.init(spec) as group, Progress(method, num_steps, group.rank) as progress:
        for epoch in range(arguments.epochs):
            watch.restart()
            for batch in batches(len(labels), epoch, group.rank, group.size, arguments):
                loss = functional.nll_loss(model(images[batch]), labels[batch])
                model.zero_grad(set_to_none=False)
                loss.backward()
                watch.lap("forward and backward")

                # The paper puts lr * gradient into the memories. The group gets the gradient
                # itself, which is 1 / lr times that: hence the scale. Memories then keep their
                # meaning when lr changes; with the constant lr here it makes no difference.
                gradients = {name: p.grad for name, p in parameters.items()}
                group.allreduce(gradients, op="average", scale=1.0 / arguments.lr, out=gradients)
                watch.lap("exchange")

                with torch.no_grad():
                    for p in parameters.values():
                        p.add_(p.grad, alpha=-arguments.lr)
                losses.append(loss.item())
                watch.lap("update")

                result.num_steps += 1
                if result.num_steps % evaluate_every == 0 or result.num_steps == num_steps:
                    bytes_sent.append(group.stats().bytes_sent)
                    if group.rank == 0:
                        result.epochs.append(result.num_steps / steps_per_epoch)
                        result.test_accuracy.append(accuracy(model, test_set))
                        result.train_loss.append(float(np.mean(losses)))
                    losses.clear()
                progress.advance(result)
                watch.restart()
        collect(result, group.stats(), bytes_sent, watch, control)
    return result


def collect(
    result: Result,
    stats: bitopk.Stats,
    bytes_sent: list[int],
    watch: Stopwatch,
    control: bitopk.Group,
) -> None:
    """Bring together what the ranks counted; every rank must call it."""
    row = [stats.bytes_sent, stats.bytes_received, stats.dense_bytes, *bytes_sent]
    # A gather by a sum: each rank fills its own row of a table of zeros. Integers travel exactly.
    table = np.zeros((control.size, len(row)), np.int64)
    table[control.rank] = row
    table = np.asarray(control.allreduce({"counters": table}, op="sum")["counters"])
    result.bytes_sent_per_step = (table[:, 0] / result.num_steps).tolist()
    result.bytes_received_per_step = (table[:, 1] / result.num_steps).tolist()
    result.dense_bytes_per_step = float(table[:, 2].mean()) / result.num_steps
    total_sent = table[:, 0].sum()
    result.compression_ratio = float(table[:, 2].sum() / total_sent) if total_sent else 1.0
    busiest = int(table[:, 0].argmax())
    result.megabytes_sent = (table[busiest, 3:] / 1e6).tolist()
    result.seconds = sum(watch.seconds.values())
    engine = {f"exchange: {stage}": seconds for stage, seconds in stats.seconds.items()}
    stages = {}
    for stage, seconds in watch.seconds.items():
        stages.update({stage: seconds, **(engine if stage == "exchange" else {})})
    result.milliseconds_per_step = {
        stage: 1e3 * seconds / result.num_steps for stage, seconds in stages.items()
    }


class Progress:
    """Progress of one training on rank 0: a bar on a terminal, else a line per evaluation."""

    def __init__(self, method: str, num_steps: int, rank: int) -> None:
        self._method, self._num_steps, self._is_shown = method, num_steps, rank == 0
        self._bar = make_bar(f"{method:>14}", num_steps) if rank == 0 else None
        self._num_evaluations = 0

    def __enter__(self) -> Progress:
        """Return the object itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the bar, if there is one."""
        if self._bar is not None:
            self._bar.close()

    def advance(self, result: Result) -> None:
        """Count one step; show the accuracy after an evaluation."""
        if self._bar is not None:
            self._bar.update()
        if not self._is_shown or len(result.test_accuracy) == self._num_evaluations:
            return
        self._num_evaluations = len(result.test_accuracy)
        if self._bar is not None:
            self._bar.set_postfix_str(f"test accuracy {result.test_accuracy[-1]:.1f} %")
        elif (
            self._num_evaluations % EVALUATIONS_PER_EPOCH == 0
            or result.num_steps == self._num_steps
        ):
            print(
                f"{self._method}: step {result.num_steps} of {self._num_steps}, "
                f"test accuracy {result.test_accuracy[-1]:.2f} %",
                flush=True,
            )


def make_bar(label: str, num_steps: int) -> object | None:
    """Return a tqdm bar, or None where there is no terminal or no tqdm."""
    if not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    style = (
        "{desc} {percentage:3.0f} % |{bar}| {n_fmt}/{total_fmt} steps, {remaining} left{postfix}"
    )
    return tqdm(total=num_steps, desc=label, bar_format=style, mininterval=0.2, dynamic_ncols=True)


# --- report --------------------------------------------------------------------------------------


def report(results: list[Result], arguments: argparse.Namespace, world_size: int) -> None:
    """Print the table and write demo.json and demo.png."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    print(format_table(results, world_size))
    numbers = {
        "ranks": world_size,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "bitopk": bitopk.__version__,
        "torch": torch.__version__,
        "options": {n: v if v is None else str(v) for n, v in vars(arguments).items()},
        "results": [asdict(result) for result in results],
    }
    numbers_path = arguments.out / "fashion_mnist.json"
    numbers_path.write_text(json.dumps(numbers, indent=2) + "\n")
    plot_path = arguments.out / "fashion_mnist.png"
    wrote = f"wrote {numbers_path}"
    try:
        draw(results, world_size, plot_path)
        wrote += f" and {plot_path}"
    except ImportError as error:
        wrote += f"; no plot, since matplotlib is missing ({error})"
    print(wrote, flush=True)


def format_table(results: list[Result], world_size: int) -> str:
    """Return the closing table as text."""
    rows = [("", *(result.method for result in results))]

    def add(label: str, values: list[str]) -> None:
        rows.append((label, *values))

    add("test accuracy, last", [f"{r.test_accuracy[-1]:.2f} %" for r in results])
    add("test accuracy, best", [f"{max(r.test_accuracy):.2f} %" for r in results])
    for label, attribute in (
        ("sent", "bytes_sent_per_step"),
        ("received", "bytes_received_per_step"),
    ):
        values = [getattr(r, attribute) for r in results]
        add(f"bytes {label} per rank and step, mean", [f"{np.mean(v):,.0f}" for v in values])
        add(f"bytes {label} per rank and step, max", [f"{np.max(v):,.0f}" for v in values])
    add("compression ratio (sent)", [f"{r.compression_ratio:,.1f}" for r in results])
    add("ms per step", [f"{1e3 * r.seconds / r.num_steps:.2f}" for r in results])
    for stage in dict.fromkeys(s for r in results for s in r.milliseconds_per_step):
        indent = "    " if stage.startswith("exchange: ") else "  "
        values = [r.milliseconds_per_step.get(stage) for r in results]
        shown = ["-" if v is None else f"{v:.2f}" for v in values]
        add(indent + stage.replace("exchange: ", ""), shown)
    add("training time", [f"{r.seconds:.1f} s" for r in results])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))])
        for row in rows
    ]
    lines.insert(1, "-" * len(lines[0]))
    title = f"Fashion-MNIST, MLP with 242,762 parameters, {world_size} ranks"
    note = f"{results[0].num_steps} steps each; times are rank 0's, evaluations not counted"
    return "\n".join(["", f"{title}, {note}", "", *lines, ""])


COLOURS = {"dense": "#6b7280", "unidirectional": "#0f8b8d", "bidirectional": "#d1495b"}


def draw(results: list[Result], world_size: int, path: Path) -> None:
    """Draw accuracy against epochs and against bytes sent."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    style = {
        "font.size": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#e5e7eb",
        "axes.axisbelow": True,
    }
    with plt.rc_context(style):
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), sharey=True)
        for result in results:
            line = {
                "color": COLOURS[result.method],
                "linewidth": 2,
                "marker": "o",
                "markersize": 3.5,
            }
            last = f"{result.method} ({result.test_accuracy[-1]:.1f} %)"
            fewer = f" ({result.compression_ratio:,.0f}x fewer)" if result.method != "dense" else ""
            ratio = f"{result.method}{fewer}"
            left.plot(result.epochs, result.test_accuracy, label=last, **line)
            right.plot(result.megabytes_sent, result.test_accuracy, label=ratio, **line)
        left.set(xlabel="epochs", ylabel="test accuracy in %", title="accuracy per epoch")
        left.set_xlim(left=0)
        left.set_ylim(*accuracy_limits(results))
        right.set(xlabel="MB sent by the busiest rank", title="accuracy per byte")
        if all(min(result.megabytes_sent) > 0 for result in results):  # one rank sends nothing
            right.set_xscale("log")
            right.margins(x=0.12)
            right.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        left.legend(frameon=False, loc="lower right")
        right.legend(frameon=False, loc="lower right")
        figure.suptitle(f"Fashion-MNIST, MLP 784-256-128-64-10, {world_size} ranks", y=0.99)
        figure.tight_layout()
        figure.savefig(path, dpi=150)
        plt.close(figure)


def accuracy_limits(results: list[Result]) -> tuple[float, float]:
    """Leave out the steep start, so that the ends can be told apart."""
    values = np.concatenate([result.test_accuracy for result in results])
    top = float(values.max()) + 1.5
    return max(float(values.min()) - 0.5, top - 16.0), top


if __name__ == "__main__":
    main()
