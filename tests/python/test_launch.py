# SPDX-License-Identifier: Apache-2.0
"""``bitopk launch`` by itself: environment, output, exit status, signals, and no orphans."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import bitopk
import pytest
from bitopk.launch import _Stream
from support import last_line, launch


@pytest.fixture
def script(tmp_path):
    """Return a function that writes a script, which knows its `rank`."""

    def write(body):
        path = tmp_path / "job.py"
        path.write_text(
            "import os, signal, subprocess, sys, time\n"
            f"rank = int(os.environ['RANK'])\nfolder = {str(tmp_path)!r}\n{body}\n"
        )
        return path

    return write


def start(path, num_ranks, *options):
    """Start a launcher without waiting for it."""
    command = [sys.executable, "-m", "bitopk", "launch", "-np", str(num_ranks), *options, str(path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def is_running(pid):
    """Say whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds=15.0):
    """Poll until a condition holds; return whether it did."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def read_pids(folder, count):
    """Wait for files named pid.* and return their numbers."""
    assert wait_until(lambda: len(list(folder.glob("pid.*"))) == count)
    time.sleep(0.05)
    return [int(path.read_text()) for path in folder.glob("pid.*")]


WRITE_PID = "open(f'{folder}/pid.{rank}', 'w').write(str(os.getpid()))"


def test_every_rank_finds_its_place_in_the_environment(script):
    path = script(
        "names = 'RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE PYTHONUNBUFFERED'.split()\n"
        "print(*(os.environ[n] for n in names), os.path.isdir(os.environ['BITOPK_LAUNCH_STORE']))"
    )
    result = launch(3, path)
    assert result.returncode == 0
    expected = [f"[{rank}] {rank} 3 {rank} 3 1 True" for rank in range(3)]
    assert sorted(result.stdout.splitlines()) == expected
    assert result.stderr == ""


def test_threads_are_shared_out_unless_set(script):
    path = script("print(os.environ['OMP_NUM_THREADS'], os.environ['OPENBLAS_NUM_THREADS'])")
    environment = {n: "" for n in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    result = launch(64, path, env={**environment, "OMP_NUM_THREADS": "7"}, options=("--no-prefix",))
    assert result.stdout.splitlines() == ["7 "] * 64
    cores = len(os.sched_getaffinity(0))
    for name in environment:
        os.environ.pop(name, None)
    result = launch(2, path)
    share = max(1, cores // 2)
    assert sorted(result.stdout.splitlines()) == [f"[{r}] {share} {share}" for r in range(2)]


def test_the_store_folder_is_removed(script):
    result = launch(1, script("print(os.environ['BITOPK_LAUNCH_STORE'])"), options=("--no-prefix",))
    assert not Path(result.stdout.strip()).exists()


def test_arguments_are_passed_on(script, tmp_path):
    script("print(sys.argv[1:], __name__)")
    arguments = ("--epochs", "3", "-np", "9", "--", "-x")
    result = launch(1, tmp_path / "job.py", *arguments)
    assert result.stdout == f"[0] {list(arguments)} __main__\n"


def test_a_module_runs_by_name(tmp_path):
    (tmp_path / "some_module.py").write_text("import sys\nprint(__name__, sys.argv[1:])\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*filter(None, sys.path)])}
    result = subprocess.run(
        [sys.executable, "-m", "bitopk", "launch", "-np", "2", "-m", "some_module", "--flag"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    expected = [f"[{r}] __main__ ['--flag']" for r in range(2)]
    assert sorted(result.stdout.splitlines()) == expected, result.stderr


def test_lines_are_prefixed_and_never_mixed(script):
    path = script(
        "for i in range(300):\n"
        "    sys.stdout.write(f'{rank}-{i}-'); sys.stdout.flush()\n"
        "    sys.stdout.write('x' * 50 + '\\n'); sys.stderr.write(f'e{rank}-{i}\\n')\n"
        "sys.stdout.write('unfinished')"
    )
    result = launch(3, path)
    lines = result.stdout.splitlines()
    for rank in range(3):
        mine = [line for line in lines if line.startswith(f"[{rank}] ")]
        expected = [f"[{rank}] {rank}-{i}-" + "x" * 50 for i in range(300)]
        assert mine == [*expected, f"[{rank}] unfinished"]
    assert len(lines) == 903
    errors = result.stderr.splitlines()
    assert sorted(errors) == sorted(f"[{r}] e{r}-{i}" for r in range(3) for i in range(300))


def test_rank0_output_passes_through_untouched(script):
    result = launch(2, script("sys.stdout.write(f'<{rank}')"), options=("--output", "rank0"))
    assert result.stdout in ("<0[1] <1\n", "[1] <1\n<0")


def feed(*chunks):
    """Give chunks of output to a stream and return the lines it shows."""
    stream = _Stream(fd=-1, sink=1, prefix=b"")
    lines = []
    for chunk in chunks:
        stream.pending += chunk
        lines += stream.take_lines(at_end=False)
    return lines + stream.take_lines(at_end=True)


def test_a_rewritten_line_shows_its_last_state():
    assert feed(b"\r 1%\r 2%", b"\r 3%\n", b"done\n") == [b" 1%", b" 3%", b"done"]


def test_progress_is_thinned_but_the_last_state_stays():
    states = [b"\r%d/1000" % i for i in range(1000)]
    lines = feed(*states, b"\n")
    assert lines[-1] == b"999/1000"
    assert len(lines) <= 4


def test_windows_line_ends_and_empty_lines_survive():
    assert feed(b"a\r\n", b"\n", b"b\r", b"\n") == [b"a", b"", b"b"]


def test_status_is_that_of_the_first_rank_that_failed(script):
    path = script("sys.exit(3) if rank == 1 else time.sleep(60)")
    begin = time.monotonic()
    result = launch(3, path)
    assert time.monotonic() - begin < 10
    assert result.returncode == 3
    expected = "bitopk launch: rank 1 exited with status 3; stopped the other 2 ranks"
    assert last_line(result.stderr) == expected


def test_a_signal_is_named_and_stubborn_ranks_are_killed_within_ten_seconds(script):
    path = script(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WRITE_PID + "\n"
        "while len(os.listdir(folder)) < 5: time.sleep(0.01)\n"
        "os.kill(os.getpid(), 9) if rank == 2 else time.sleep(60)"
    )
    begin = time.monotonic()
    result = launch(4, path)
    assert time.monotonic() - begin < 10
    assert result.returncode == 128 + 9
    expected = "bitopk launch: rank 2 died of signal 9 (SIGKILL); stopped the other 3 ranks"
    assert last_line(result.stderr) == expected
    assert not any(is_running(pid) for pid in read_pids(path.parent, 4))


def test_other_ranks_have_time_to_say_what_they_saw(script):
    path = script(
        "sys.exit(5) if rank == 0 else (time.sleep(1), print('rank 0 is gone'), sys.exit(1))"
    )
    result = launch(2, path)
    assert result.returncode == 5
    assert "[1] rank 0 is gone" in result.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_are_passed_on_to_every_rank(script, number):
    path = script(
        "def stop(number, frame):\n    print('got', number); sys.exit(1)\n"
        f"signal.signal({int(number)}, stop)\n{WRITE_PID}\ntime.sleep(60)"
    )
    launcher = start(path, 2)
    read_pids(path.parent, 2)
    launcher.send_signal(number)
    out, err = launcher.communicate(timeout=10)
    assert sorted(out.splitlines()) == [f"[{r}] got {int(number)}" for r in range(2)]
    assert launcher.returncode == 128 + number
    assert last_line(err) == f"bitopk launch: stopped by signal {int(number)} ({number.name})"


def test_ranks_that_end_well_after_a_signal_give_status_zero(script):
    path = script(f"signal.signal(15, lambda *_: sys.exit(0))\n{WRITE_PID}\ntime.sleep(60)")
    launcher = start(path, 2)
    read_pids(path.parent, 2)
    launcher.send_signal(signal.SIGTERM)
    launcher.communicate(timeout=10)
    assert launcher.returncode == 0


def test_a_second_interrupt_kills_at_once(script):
    path = script(f"signal.signal(2, signal.SIG_IGN)\n{WRITE_PID}\ntime.sleep(60)")
    launcher = start(path, 2)
    read_pids(path.parent, 2)
    begin = time.monotonic()
    launcher.send_signal(signal.SIGINT)
    time.sleep(0.2)
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=10)
    assert time.monotonic() - begin < 3
    assert launcher.returncode == 128 + 2


@pytest.mark.parametrize("how", ["launcher is killed", "rank ends"])
def test_no_process_is_left_behind(script, how):
    path = script(
        f"{WRITE_PID}\n"
        "helper = subprocess.Popen(['sleep', '60'])\n"
        "open(f'{folder}/pid.helper{rank}', 'w').write(str(helper.pid))\n"
        f"time.sleep(60 if {how!r} == 'launcher is killed' else 0.3)"
    )
    launcher = start(path, 2)
    pids = read_pids(path.parent, 4)
    if how == "launcher is killed":
        assert all(is_running(pid) for pid in pids)
        launcher.kill()
    launcher.communicate(timeout=20)
    assert wait_until(lambda: not any(is_running(pid) for pid in pids), 5)


def test_a_closed_output_ends_the_job(script):
    path = script("while True:\n    print('y'); time.sleep(0.01)")
    launcher = start(path, 2)
    launcher.stdout.readline()
    launcher.stdout.close()
    launcher.wait(timeout=15)
    launcher.stderr.close()
    assert launcher.returncode == 128 + signal.SIGPIPE


@pytest.mark.parametrize("count", ["0", "-1", "two", "1.5"])
def test_a_bad_number_of_ranks_is_refused(script, count):
    result = launch(count, script(""))
    assert result.returncode == 2
    assert "integer >= 1" in result.stderr
    assert count in result.stderr


def test_a_missing_script_is_named():
    result = launch(2, "/nowhere/train.py")
    assert result.returncode == 2
    assert "no such file: '/nowhere/train.py'" in last_line(result.stderr)


def test_the_version_is_printed():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    result = subprocess.run(
        [sys.executable, "-m", "bitopk", "--version"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == f"bitopk {bitopk.__version__}\n"
