# SPDX-License-Identifier: Apache-2.0
"""Tests under Horovod: skipped where it cannot be imported; in CI nothing here may be skipped."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import pytest

IN_CI = os.environ.get("CI") == "true"


@functools.cache
def why_no_horovod() -> str:
    """Return "" if ``import horovod.torch`` works, else its error.

    Tried in another process: `bitopk.init` of the tests in this one looks for an imported Horovod.
    """
    code = "import horovod.torch"
    done = subprocess.run(
        [sys.executable, "-c", code], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return f"{code} failed: {lines[-1]}; ./run test horovod sets up Horovod"


class ModuleWithoutHorovod(pytest.Module):
    """Stands for a test module that cannot be imported here, and never is."""

    def collect(self):
        if IN_CI:
            raise self.CollectError(why_no_horovod())
        pytest.skip(why_no_horovod(), allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    if not why_no_horovod():
        return None
    return ModuleWithoutHorovod.from_parent(parent, path=module_path)


def fail_if_skipped(report):
    """Turn a skip into a failure in CI, so that no test gets lost there; xfail stays what it is."""
    if IN_CI and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"with CI=true no test of Horovod may be skipped: {reason}"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    fail_if_skipped((yield).get_result())


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(collector):
    fail_if_skipped((yield).get_result())
