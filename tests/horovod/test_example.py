# SPDX-License-Identifier: Apache-2.0
"""The example runs, plain and compressed, and says what the compression saved."""

from __future__ import annotations

import re
from pathlib import Path

from jobs_support import horovodrun

EXAMPLE = Path(__file__).parents[2] / "integration" / "examples" / "horovod_fashion_mnist.py"


def test_the_example_trains_and_reports_what_it_saved():
    options = ("--epochs", 1, "--batch-size", 125, "--optimizer", "adamw")
    done = horovodrun(2, EXAMPLE, *options, "--topk-density", 0.01, "--start-step", 5)
    assert done.returncode == 0, done.stdout + done.stderr
    accuracy = re.search(r"epoch 1: test accuracy (\S+) %", done.stdout)
    assert accuracy, done.stdout
    assert float(accuracy[1]) > 60, done.stdout
    assert re.search(r"sent per step: [\d,]+ bytes instead of [\d,]+", done.stdout), done.stdout
    assert re.search(r"exchange per step: .* ms (gained|lost)", done.stdout), done.stdout
