# SPDX-License-Identifier: Apache-2.0
"""Real processes over real Gloo under ``bitopk launch``: results, disagreement, death, stops."""

import json
import os
import re
import subprocess
import sys

import pytest
from support import last_line, launch

SHAPES = {"large": [60_007], "fc.weight": [50, 40], "fc.bias": [50], "scalar": [], "empty": [0]}


@pytest.mark.parametrize(
    ("num_ranks", "job"),
    [
        (1, {"spec": {"density": 0.05}}),
        (2, {"spec": {"density": 0.05, "exchange": "allgather"}, "library": "torch"}),
        (2, {"spec": {"density": 0.05, "exchange": "dense"}, "steps": 3}),
        (3, {"spec": {"density": 0.05, "exchange": "sharded"}, "op": "sum", "mode": "async"}),
        (3, {"spec": {"density": 0.06, "scope": "global", "dense_below": 0}, "mode": "out"}),
        (3, {"spec": {"k": 2500, "exchange": "sharded"}, "bucket_bytes": 4096}),
        (
            4,
            {
                "spec": {"density": 0.05, "exchange": "sharded", "value_format": "bfloat16"},
                "library": "torch",
                "mode": "out",
            },
        ),
        (4, {"spec": {"density": 0.05, "density_down": 1.0, "exchange": "allgather"}}),
    ],
    ids=str,
)
def test_processes_equal_the_oracle(num_ranks, job):
    result = launch(num_ranks, "steps.py", json.dumps({"shapes": SHAPES, **job}))
    assert result.returncode == 0, result.stdout + result.stderr
    for rank in range(num_ranks):
        assert f"[{rank}] rank {rank} of {num_ranks}: all equal" in result.stdout.splitlines()


@pytest.mark.parametrize("exchange", ["allgather", "sharded"])
@pytest.mark.parametrize("policy", ["propagate", "skip", "raise"])
def test_processes_stay_in_step_after_a_nan(policy, exchange):
    result = launch(3, "nonfinite.py", policy, exchange)
    assert result.returncode == 0, result.stdout + result.stderr
    assert sorted(result.stdout.split("\n")) == ["", "[0] in step", "[1] in step", "[2] in step"]


@pytest.mark.parametrize("exchange", ["allgather", "sharded"])
def test_state_is_saved_and_loaded(exchange):
    result = launch(3, "state.py", exchange)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("state kept") == 3


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("density", ["0.01", "0.02"]),
        ("value_format", ["float16", "float32"]),
        ("size", ["a", "2000", "2001"]),
        ("name", ["a", "b"]),
        ("op", ["average", "sum"]),
    ],
)
def test_ranks_that_disagree_are_told_so_at_the_start(kind, words):
    result = launch(2, "mismatch.py", kind)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = [line for line in result.stdout.splitlines() if "Error: " in line]
    assert len(lines) == 2, result.stdout + result.stderr
    for line in lines:
        assert re.search(r"rank 0\b", line), line
        assert re.search(r"rank 1\b", line), line
        for word in words:
            assert re.search(rf"(?<![\w.]){re.escape(word)}(?!\w)", line), (word, line)


@pytest.mark.parametrize("exchange", ["allgather", "sharded", "dense"])
def test_a_killed_rank_is_named_by_all_others_and_by_the_launcher(exchange):
    result = launch(4, "victim.py", "SIGKILL", 2, 20, exchange)
    output = result.stdout + result.stderr
    assert result.returncode == 128 + 9, output
    assert re.match(
        r"bitopk launch: rank 2 died of signal 9 \(SIGKILL\)", last_line(result.stderr)
    ), output
    for rank in (0, 1, 3):
        (line,) = [s for s in result.stdout.splitlines() if s.startswith(f"[{rank}] waited")]
        assert re.search(r"CommunicationError: .*rank 2\b", line), output


@pytest.mark.parametrize("exchange", ["allgather", "sharded"])
def test_a_stopped_rank_is_named_within_the_timeout(exchange):
    result = launch(3, "victim.py", "SIGSTOP", 1, 3, exchange)
    output = result.stdout + result.stderr
    assert result.returncode == 7, output
    for rank in (0, 2):
        (line,) = [s for s in result.stdout.splitlines() if s.startswith(f"[{rank}] waited")]
        assert re.search(r"CommunicationError: .*rank 1\b", line), output
        waited = float(re.search(r"waited ([\d.]+) s", line)[1])
        assert 1.0 <= waited <= 8.0, output


def test_init_outside_of_a_job_lists_the_hosts():
    code = "import bitopk; bitopk.init(bitopk.Compression.topk(0.1))"
    environment = {n: v for n, v in os.environ.items() if n not in ("RANK", "WORLD_SIZE")}
    environment.pop("BITOPK_LAUNCH_STORE", None)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode != 0
    for word in ("torch.distributed", "mpi4py", "bitopk launch"):
        assert word.lower() in result.stderr.lower()
