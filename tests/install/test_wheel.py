# SPDX-License-Identifier: Apache-2.0
"""``./run wheel`` makes a wheel that runs in an empty environment, with nothing but NumPy."""

from __future__ import annotations

import os
import subprocess
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Of the test alone: .venv has the distribution's NumPy, which its torch needs.
NUMPY = "numpy==1.26.4"

JOB = """
import numpy as np

import bitopk

assert ".venv" not in bitopk.__file__ and "integration" not in bitopk.__file__, bitopk.__file__
spec = bitopk.Compression.topk(k=1, dense_below=0)
with bitopk.init(spec, timeout=30.0) as group:
    gradient = np.zeros(8, np.float32)
    gradient[3] = 1.0 + group.rank
    result = group.allreduce({"w": gradient}, op="average")["w"]
    expected = np.zeros(8, np.float32)
    expected[3] = 1.5
    np.testing.assert_array_equal(result, expected)
    print(f"rank {group.rank} of {group.size} is done", flush=True)
"""


def run(*command: object, **options: object) -> str:
    """Run a command outside the project's environment; return its output, or fail with it."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH")
    }
    process = subprocess.run(
        [str(part) for part in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        **options,
    )
    assert process.returncode == 0, f"{command} ended with {process.returncode}:\n{process.stdout}"
    return process.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(ROOT / "run", "wheel", "--output", folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has the wheel and NumPy, and sees nothing else."""
    environment = tmp_path_factory.mktemp("environment")
    run("/usr/bin/python3", "-m", "venv", environment)
    interpreter = environment / "bin/python"
    run(interpreter, "-m", "pip", "install", "-q", "--prefer-binary", NUMPY, wheel)
    return interpreter


@pytest.mark.timeout(900)
def test_has_a_manylinux_tag_and_its_libraries_inside(wheel: Path) -> None:
    assert "manylinux" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert any(name.startswith("bitopk.libs/libgloo") for name in names)
    assert "bitopk/py.typed" in names
    assert any(name.endswith(".pyi") for name in names)
    (extension,) = [name for name in names if name.startswith("bitopk/_core.") and ".so" in name]
    assert extension.endswith(".so")


@pytest.mark.timeout(900)
def test_takes_gloo_from_the_wheel(python: Path, tmp_path: Path) -> None:
    loaded = run(
        python,
        "-c",
        "import bitopk._core; print(open('/proc/self/maps').read())",
        cwd=tmp_path,
    )
    libraries = {line.split()[-1] for line in loaded.splitlines() if "libgloo" in line}
    assert libraries
    assert all("bitopk.libs" in library for library in libraries), libraries


@pytest.mark.timeout(900)
def test_exports_only_its_entry_point(python: Path, tmp_path: Path) -> None:
    module = run(
        python, "-c", "import bitopk._core; print(bitopk._core.__file__)", cwd=tmp_path
    ).strip()
    symbols = run("nm", "--dynamic", "--defined-only", "--format=just-symbols", module).split()
    assert symbols == ["PyInit__core"]


@pytest.mark.timeout(900)
def test_runs_two_ranks(python: Path, tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(JOB, encoding="utf-8")
    output = run(python.parent / "bitopk", "launch", "-np", "2", script, cwd=tmp_path, timeout=120)
    assert "rank 0 of 2 is done" in output
    assert "rank 1 of 2 is done" in output


def test_names_the_version_of_the_project(wheel: Path) -> None:
    listed = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
    version = wheel.name.split("-")[1]
    assert f"project(bitopk VERSION {version} " in listed
