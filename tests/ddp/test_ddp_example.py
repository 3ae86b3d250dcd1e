# SPDX-License-Identifier: Apache-2.0
"""The DDP example trains, dense and compressed."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

EXAMPLE = Path(__file__).parents[2] / "integration" / "examples" / "ddp_fashion_mnist.py"


def train(*arguments):
    """Run two ranks as torchrun would, and return the output of rank 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [
        sys.executable,
        str(EXAMPLE),
        "--epochs",
        "1",
        "--batch-size",
        "200",
        "--lr",
        "0.2",
        *arguments,
    ]
    ranks = [
        subprocess.Popen(
            command,
            env={**env, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, output in zip(ranks, outputs):
        assert rank.returncode == 0, output
    return outputs[0]


def test_the_example_learns_with_and_without_compression():
    accuracies = []
    for arguments in ((), ("--topk-density", "0.01")):
        output = train(*arguments)
        accuracies.append(float(re.search(r"epoch 1: test accuracy ([\d.]+) %", output)[1]))
    assert "times fewer" in output
    # One short epoch: a sign of life, no measurement.
    assert min(accuracies) > 60, accuracies
