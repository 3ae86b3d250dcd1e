# SPDX-License-Identifier: Apache-2.0
"""The README's diff makes a working DDP script."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from readme import after_diff
from support import launch

BEFORE = """
import os
import sys
import torch
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = f"file://{sys.argv[1]}"
torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
model = torch.nn.Linear(200, 100)
"""
AFTER = """
for step in range(3):
    model(torch.randn(8, 200)).square().mean().backward()
stats = state.stats()
print("entries", stats.entries_up, "of", stats.steps, "steps")
"""


def test_the_script_after_the_diff_trains(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(BEFORE + "\n".join(after_diff("register_comm_hook")) + AFTER)
    done = launch(2, script, tmp_path / "store")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("entries 600 of 3 steps") == 2, done.stdout
