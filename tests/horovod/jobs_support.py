# SPDX-License-Identifier: Apache-2.0
"""Jobs of several ranks under Horovod's launcher and under mpirun, for the tests of this folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

JOBS = Path(__file__).parent / "jobs"

# In the environment of all processes of a job. Both launchers put the ranks into sessions or
# process groups of their own, and a rank outlives a launcher that is killed: this finds them all.
_MARK = "BITOPK_TEST_JOB"


def horovodrun(
    num_ranks: int,
    script: str | Path,
    *arguments: Any,
    mpi: bool = False,
    timeout: float = 120.0,
    env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a job of tests/horovod/jobs (or any path) under ``horovodrun`` on this machine.

    Parameters
    ----------
    num_ranks : int
        World size.
    script : str or Path
        Name of a file in tests/horovod/jobs, or a path.
    *arguments
        Of the script, as text.
    mpi : bool
        Launch through MPI and use its controller, not Gloo's.
    timeout : float
        Seconds after which all processes of the job are killed.
    env : dict, optional
        Variables to add to the environment.

    Returns
    -------
    subprocess.CompletedProcess
        Whatever the exit status; Horovod writes ``[RANK]<stdout>:`` before each line of a rank.

    Raises
    ------
    TimeoutError
        With the output up to then.
    """
    controller = ["--mpi"] if mpi else ["--gloo", "--network-interfaces", "lo"]
    launcher = [_program("horovodrun"), "-np", str(num_ranks), *controller]
    launcher += ["-H", f"localhost:{num_ranks}"]
    return _run(launcher, script, arguments, timeout, env or {})


def mpirun_job(
    num_ranks: int,
    script: str | Path,
    *arguments: Any,
    timeout: float = 120.0,
    env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a job under a plain ``mpirun``, with Horovod's MPI controller; see `horovodrun`."""
    launcher = [_program("mpirun"), "--allow-run-as-root", "--oversubscribe", "-np", str(num_ranks)]
    return _run(launcher, script, arguments, timeout, {"HOROVOD_CONTROLLER": "mpi", **(env or {})})


def _program(name: str) -> str:
    """Return the path of a launcher; this environment's own comes first."""
    folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    found = shutil.which(name, path=folders)
    assert found, f"{name} is missing; ./run test horovod sets it up"
    return found


def _run(
    launcher: list[str],
    script: str | Path,
    arguments: tuple[Any, ...],
    timeout: float,
    env: dict[str, str],
) -> subprocess.CompletedProcess[str]:
    command = [*launcher, sys.executable, str(JOBS / script), *map(str, arguments)]
    helpers = Path(__file__).parents[1] / "python"
    python_path = os.pathsep.join(
        [str(Path(__file__).parent), str(helpers), *filter(None, sys.path)]
    )
    job = uuid.uuid4().hex
    mark = f"{_MARK}={job}"
    environment = {
        **os.environ,
        "PYTHONPATH": python_path,
        # The ranks share one machine: threads of several would only wait for each other.
        "OMP_NUM_THREADS": "1",
        **env,
        _MARK: job,
    }
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        _kill_marked(mark)
        stdout, stderr = process.communicate()
        raise TimeoutError(
            f"{' '.join(command)}: not done after {timeout} s, killed\n"
            f"--- stdout\n{stdout}\n--- stderr\n{stderr}"
        ) from None
    finally:
        # Also when the test is interrupted, and ranks that the launcher left behind.
        _kill_marked(mark)
        process.wait()
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def _kill_marked(mark: str) -> None:
    """Kill every process with `mark` in its environment, and those that they start meanwhile."""
    end = time.monotonic() + 10
    while pids := _marked(mark):
        assert time.monotonic() < end, f"processes {pids} of a test do not die"
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _marked(mark: str) -> list[int]:
    """Return the processes with `mark` in their environment; the dead have none."""
    pids = []
    for folder in Path("/proc").iterdir():
        # Processes of others are not readable, and some end while this looks at them.
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and mark.encode() in (folder / "environ").read_bytes():
                pids.append(int(folder.name))
    return pids


def elastic_job(
    discovery: Path,
    script: str | Path,
    *arguments: Any,
    min_ranks: int,
    max_ranks: int,
    timeout: float = 150.0,
) -> subprocess.CompletedProcess[str]:
    """Run an elastic job whose hosts `discovery` prints; see `horovodrun`."""
    launcher = [_program("horovodrun"), "--gloo", "--network-interfaces", "lo"]
    launcher += ["-np", str(min_ranks + 1), "--min-np", str(min_ranks), "--max-np", str(max_ranks)]
    launcher += ["--host-discovery-script", str(discovery), "--elastic-timeout", "60"]
    return _run(launcher, script, arguments, timeout, {})
