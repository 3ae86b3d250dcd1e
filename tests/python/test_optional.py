# SPDX-License-Identifier: Apache-2.0
"""Frameworks are optional; `bitopk doctor` says what is there and whether it fits together."""

from __future__ import annotations

import subprocess
import sys
import textwrap

WITHOUT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""


def run(code, absent=()):
    """Run code in a process where some packages do not exist."""
    script = WITHOUT.format(names=list(absent)) + textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False
    )


def test_the_package_needs_numpy_alone():
    done = run(
        """
        import bitopk, numpy as np
        group = bitopk.LocalGroup(2, bitopk.Compression.topk(0.5, dense_below=0))
        group.allreduce([{"x": np.ones(4, np.float32)}] * 2)
        state = group.state_dict()
        assert isinstance(state["parts"][0]["worker_memory"]["x"], np.ndarray)
        group.load_state_dict(state)
        """,
        absent=("torch", "horovod", "mpi4py", "matplotlib"),
    )
    assert done.returncode == 0, done.stderr


def test_importing_the_package_imports_no_framework():
    done = run("import bitopk, sys; print({'torch', 'horovod', 'mpi4py'} & set(sys.modules))")
    assert done.stdout.strip() == "set()", done.stdout + done.stderr


def test_the_horovod_module_without_horovod_says_so_in_one_sentence():
    done = run("import bitopk.horovod", absent=("horovod",))
    last = done.stderr.strip().splitlines()[-1]
    assert "bitopk.horovod needs Horovod" in last, done.stderr


def test_the_ddp_module_without_torch_says_so_in_one_sentence():
    for module in ("ddp", "torch"):
        done = run(f"import bitopk.{module}", absent=("torch",))
        last = done.stderr.strip().splitlines()[-1]
        assert f"bitopk.{module} needs PyTorch" in last, done.stderr


def test_the_doctor_names_what_is_missing_and_what_is_there():
    done = run("import sys; from bitopk.cli import main; sys.exit(main(['doctor']))", ("horovod",))
    assert done.returncode == 0, done.stderr
    for words in ("bitopk ", "instruction sets", "horovod    not installed", "interfaces lo"):
        assert words in done.stdout, done.stdout


def test_the_doctor_says_when_horovod_does_not_fit():
    done = run(
        """
        import sys, types
        class Broken:
            def find_spec(self, name, path=None, target=None):
                if name == "horovod.torch":
                    raise ImportError("undefined symbol: _ZN3c10")
        sys.meta_path.insert(0, Broken())
        import importlib.machinery
        package = types.ModuleType("horovod")
        package.__path__ = []
        package.__spec__ = importlib.machinery.ModuleSpec("horovod", None, is_package=True)
        sys.modules["horovod"] = package
        from bitopk.cli import main
        sys.exit(main(["doctor"]))
        """
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "problem: bitopk.horovod needs Horovod" in done.stdout, done.stdout
    assert "build it against the torch that is installed" in done.stdout


def test_the_doctor_measures_the_links_between_ranks():
    command = [sys.executable, "-m", "bitopk", "launch", "-np", "2", "-m", "bitopk", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks through bitopk launch" in done.stdout
    assert done.stdout.count("Gbit/s") == 2
