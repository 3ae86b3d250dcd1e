# SPDX-License-Identifier: Apache-2.0
"""The README's programs run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_readme_has_the_three_programs():
    assert len(SNIPPETS) == 3


def test_two_ranks(tmp_path):
    script = tmp_path / "sum.py"
    script.write_text(SNIPPETS[0])
    done = subprocess.run(
        [sys.executable, "-m", "bitopk", "launch", "-np", "2", str(script)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "[0] rank 0: 1000 entries" in done.stdout
    assert "[1] rank 1: 1000 entries" in done.stdout


def test_any_loop(tmp_path):
    pytest.importorskip("torch")
    script = tmp_path / "loop.py"
    script.write_text(SNIPPETS[1])
    done = subprocess.run(
        [sys.executable, "-m", "bitopk", "launch", "-np", "2", str(script)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr


def test_one_process(tmp_path):
    script = tmp_path / "local.py"
    script.write_text(SNIPPETS[2])
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("target", re.findall(r"\]\((?!https?:)([^)#]+)\)", README))
def test_links_of_the_readme_lead_somewhere(target):
    assert (ROOT / target).exists()


def test_cpp_headers_named_in_the_readme_exist():
    for name in re.findall(r"`(plugin/src/[a-z_]+\.h|integration/[a-z_/]+\.py)`", README):
        assert (ROOT / name).exists(), name
