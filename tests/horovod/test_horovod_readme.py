# SPDX-License-Identifier: Apache-2.0
"""The README's diff makes a working Horovod script."""

from __future__ import annotations

import sys
from pathlib import Path

from jobs_support import horovodrun

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from readme import after_diff

BEFORE = """
import torch
model = torch.nn.Linear(200, 100)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
AFTER = """
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 200)).square().mean().backward()
    optimizer.step()
stats = optimizer._compression.bitopk.stats()
print("entries", stats.entries_up, "of", stats.steps, "steps")
"""


def test_the_script_after_the_diff_trains(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(BEFORE + "\n".join(after_diff("hvd.DistributedOptimizer")) + AFTER)
    done = horovodrun(2, script)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("entries 600 of 3 steps") == 2, done.stdout
