# SPDX-License-Identifier: Apache-2.0
"""The README's diffs of training scripts as programs, for the tests that run them."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"

__all__ = ["after_diff"]


def after_diff(word: str) -> list[str]:
    """Return the lines of a script after the one diff of the README that mentions `word`."""
    diffs = re.findall(r"```diff\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    (diff,) = [diff for diff in diffs if word in diff]
    return [line[1:] for line in diff.splitlines() if not line.startswith("-")]
