# SPDX-License-Identifier: Apache-2.0
"""`bitopk.torch.Reducer` over real ranks, and its examples."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))
from support import launch

JOB = Path(__file__).parent / "jobs" / "reducer.py"
EXAMPLES = Path(__file__).parents[2] / "integration" / "examples"
CASES = ("together", "one_by_one", "rollback", "resume", "types", "refusals")


@pytest.mark.parametrize("exchange", ["allgather", "sharded"])
def test_reductions_by_hand(exchange):
    done = launch(2, JOB, exchange, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    for case in CASES:
        assert done.stdout.count(f"{case}: ok") == 2, done.stdout


@pytest.mark.parametrize("name", ["accumulation", "discarded_step", "local_steps"])
def test_examples_learn(name):
    done = launch(2, EXAMPLES / f"{name}.py", timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(loss) for loss in re.findall(r"loss at last ([0-9.]+)", done.stdout)]
    assert len(losses) == 2
    assert max(losses) < 0.1, done.stdout
