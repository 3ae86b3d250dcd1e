# SPDX-License-Identifier: Apache-2.0
"""``bitopk launch``: runs N ranks of a training script on this machine.

Every rank is a fresh process (never a fork of one with threads) in a session of its own. The
launcher passes signals on, writes the ranks' output line by line, stops everybody when one rank
dies, and leaves no process behind even if it is killed itself. Across machines use horovodrun,
mpirun or torchrun instead.
"""

from __future__ import annotations

import argparse
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bitopk.hosts import LAUNCH_STORE

__all__ = ["add_command", "launch"]


OUTPUT_MODES = ("prefix", "plain", "rank0")
FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# After a rank died the others have this long to notice and to say so, before they are told to stop.
NOTICE_SECONDS = 2.0
# From SIGTERM (or a signal passed on) to SIGKILL.
GRACE_SECONDS = 5.0
# A progress bar that rewrites its line is shown this often, when lines are prefixed.
PROGRESS_SECONDS = 1.0
# A longer line is written in pieces, so that a rank cannot fill the launcher's memory.
MAX_LINE_BYTES = 1 << 20


def launch(command: Sequence[str], num_ranks: int, output: str = "prefix") -> int:
    """Run a command as ranks 0 to N-1 and wait for all of them.

    Must be called from the main thread, which receives the signals.

    Parameters
    ----------
    command : sequence of str
        What each rank executes; the first item is the path of an executable.
    num_ranks : int
        Number of processes N, at least 1.
    output : {"prefix", "plain", "rank0"}
        Whole lines with ``[rank]`` before each; the same without it; or the output of rank 0
        untouched (for progress bars) and prefixed lines of the others.

    Returns
    -------
    int
        0 if every rank ended with 0. Else the exit status of the rank that died first, 128 + n for
        signal n; the last line on standard error names it.
    """
    with _Job(list(command), num_ranks, output) as job:
        return job.run()


def add_command(commands: Any) -> None:
    """Add ``launch`` to the subcommands of the command line.

    Parameters
    ----------
    commands : argparse subparsers object
        Where the command goes; its ``run`` default takes the parsed arguments.
    """
    parser = commands.add_parser(
        "launch",
        help="run N ranks of a Python script on this machine",
        description="Run N fresh processes of a Python script on this machine. Each finds its "
        "place in RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE; bitopk.init() connects them.",
        epilog="example: bitopk launch -np 4 train.py --epochs 3",
        allow_abbrev=False,
    )
    parser.add_argument(
        "-np",
        "--num-ranks",
        type=_rank_count,
        required=True,
        metavar="N",
        help="number of processes",
    )
    parser.add_argument(
        "--output",
        choices=OUTPUT_MODES,
        default="prefix",
        help="prefix: lines marked [rank] (default); plain: lines as they are; rank0: rank 0 "
        "writes to the terminal itself, for progress bars",
    )
    parser.add_argument(
        "--no-prefix",
        dest="output",
        action="store_const",
        const="plain",
        help="same as --output plain",
    )
    parser.add_argument(
        "-m", dest="is_module", action="store_true", help="SCRIPT is a module's name"
    )
    parser.add_argument("script", metavar="SCRIPT", help="Python script (or module, with -m)")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    parser.set_defaults(run=_run_command, parser=parser)


def _run_command(arguments: argparse.Namespace) -> int:
    if arguments.is_module:
        target = ["-m", arguments.script]
    elif Path(arguments.script).exists():
        target = [arguments.script]
    else:
        arguments.parser.error(f"no such file: {arguments.script!r} (for a module use -m)")
    command = [sys.executable, *target, *arguments.arguments]
    return launch(command, arguments.num_ranks, arguments.output)


def _rank_count(text: str) -> int:
    try:
        count = int(text)
    except ValueError:
        count = 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"must be an integer >= 1; got {text!r}")
    return count


def _rank_environment(rank: int, num_ranks: int, store: str) -> dict[str, str]:
    environment = dict(os.environ)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        environment.setdefault(name, str(max(1, (cores or 1) // num_ranks)))
    environment.update(
        RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(num_ranks),
        PYTHONUNBUFFERED="1",
    )
    environment[LAUNCH_STORE] = store
    return environment


class _Job:
    """All ranks of one launch. Used by the main thread only."""

    def __init__(self, command: list[str], num_ranks: int, output: str) -> None:
        if num_ranks < 1:
            raise ValueError(f"launch: num_ranks must be >= 1; got {num_ranks}")
        if output not in OUTPUT_MODES:
            raise ValueError(f"launch: output must be one of {OUTPUT_MODES}; got {output!r}")
        self._command = command
        self._num_ranks = num_ranks
        self._output = output
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._stopped: set[int] = set()  # ranks that have ended and whose group is gone
        self._dead_rank: int | None = None  # the first that ended with anything but 0
        self._num_stopped_by_us = 0
        self._signal: int | None = None  # the first one that was passed on
        self._term_at = self._kill_at = float("inf")  # on the clock of time.monotonic
        self._pump = _OutputPump()

    def __enter__(self) -> _Job:
        self._store = tempfile.mkdtemp(prefix="bitopk-launch-")
        self._wakeup_read, self._wakeup_write = os.pipe()
        for fd in (self._wakeup_read, self._wakeup_write):
            os.set_blocking(fd, False)
        self._old_wakeup = signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        self._old_handlers = {s: signal.signal(s, self._forward) for s in FORWARDED_SIGNALS}
        self._old_handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", _sibling("_launch_guard.py"), self._store],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        for rank in range(len(self._ranks)):
            self._kill_group(rank)
            self._ranks[rank].wait()
        self._pump.close()
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_wakeup)
        os.close(self._wakeup_read)
        os.close(self._wakeup_write)
        shutil.rmtree(self._store, ignore_errors=True)
        self._guard.stdin.close()  # type: ignore[union-attr]
        self._guard.wait()

    def run(self) -> int:
        """Start the ranks, wait for their end and return the exit status."""
        for rank in range(self._num_ranks):
            if self._signal is None:
                self._start(rank)
        self._pump.start()
        while len(self._stopped) < len(self._ranks):
            self._wait_for_event()
            self._collect_ended_ranks()
            self._escalate()
        self._pump.close()
        return self._conclude()

    def _start(self, rank: int) -> None:
        raw = self._output == "rank0" and rank == 0
        child = [sys.executable, "-I", "-S", _sibling("_launch_child.py"), str(os.getpid())]
        process = subprocess.Popen(
            [*child, *self._command],
            env=_rank_environment(rank, self._num_ranks, self._store),
            stdin=subprocess.DEVNULL,
            stdout=None if raw else subprocess.PIPE,
            stderr=None if raw else subprocess.PIPE,
            start_new_session=True,  # a process group of its own: rank and whatever it starts
        )
        self._ranks.append(process)
        self._tell_guard(f"+{process.pid}\n")
        if not raw:
            prefix = b"" if self._output == "plain" else f"[{rank}] ".encode()
            self._pump.add(process.stdout, 1, prefix)
            self._pump.add(process.stderr, 2, prefix)

    def _wait_for_event(self) -> None:
        """Sleep until a child ends, a signal comes, the output breaks or a deadline passes."""
        now = time.monotonic()
        timeout = max(0.0, min(self._term_at - now, self._kill_at - now, 0.5))
        with selectors.DefaultSelector() as selector:
            selector.register(self._wakeup_read, selectors.EVENT_READ)
            selector.select(timeout)
        try:
            os.read(self._wakeup_read, 4096)
        except BlockingIOError:
            pass

    def _collect_ended_ranks(self) -> None:
        ended = [
            rank
            for rank, process in enumerate(self._ranks)
            if rank not in self._stopped and process.poll() is not None
        ]
        failed = [rank for rank in ended if self._ranks[rank].returncode != 0]
        for rank in ended:
            self._kill_group(rank)
            self._stopped.add(rank)
        if failed and self._dead_rank is None:
            # Several at once: the one that a signal killed is the likelier cause of the others.
            self._dead_rank = min(failed, key=lambda rank: (self._ranks[rank].returncode > 0, rank))
            self._num_stopped_by_us = len(self._ranks) - len(self._stopped) + len(failed) - 1
            if self._signal is None:
                self._term_at = time.monotonic() + NOTICE_SECONDS
        if self._pump.is_broken and self._signal is None:
            self._forward(signal.SIGPIPE, None)

    def _escalate(self) -> None:
        now = time.monotonic()
        if now >= self._term_at:
            self._term_at = float("inf")
            self._kill_at = min(self._kill_at, now + GRACE_SECONDS)
            self._signal_all(signal.SIGTERM)
        if now >= self._kill_at:
            self._kill_at = float("inf")
            self._signal_all(signal.SIGKILL)

    def _forward(self, number: int, _frame: object) -> None:
        """Signal handler: pass the signal on; the second one kills."""
        if self._signal is None:
            self._signal = number
            self._kill_at = time.monotonic() + GRACE_SECONDS
        else:
            self._kill_at = time.monotonic()
        self._signal_all(signal.SIGTERM if number == signal.SIGPIPE else number)

    def _signal_all(self, number: int) -> None:
        for rank, process in enumerate(self._ranks):
            # An unreaped process keeps its group's number from being given to anybody else.
            if rank not in self._stopped and process.returncode is None:
                _kill_process_group(process.pid, number)

    def _kill_group(self, rank: int) -> None:
        """Kill what is left of a rank's group, for example its data loaders."""
        if rank not in self._stopped:
            _kill_process_group(self._ranks[rank].pid, signal.SIGKILL)
            self._tell_guard(f"-{self._ranks[rank].pid}\n")

    def _tell_guard(self, line: str) -> None:
        try:
            self._guard.stdin.write(line.encode())  # type: ignore[union-attr]
            self._guard.stdin.flush()  # type: ignore[union-attr]
        except OSError:
            pass  # somebody killed the guard; the ranks still die by PR_SET_PDEATHSIG

    def _conclude(self) -> int:
        if self._signal is not None and (self._dead_rank is not None or not self._ranks):
            _report(f"stopped by {_signal_name(self._signal)}")
            return 128 + self._signal
        if self._dead_rank is None:
            return 0
        code = self._ranks[self._dead_rank].returncode
        how = f"exited with status {code}" if code > 0 else f"died of {_signal_name(-code)}"
        others = ""
        if self._num_stopped_by_us > 0:
            plural = "s" if self._num_stopped_by_us > 1 else ""
            others = f"; stopped the other {self._num_stopped_by_us} rank{plural}"
        _report(f"rank {self._dead_rank} {how}{others}")
        return code if code > 0 else 128 - code


@dataclass
class _Stream:
    """One pipe of one rank and what has not been written yet."""

    fd: int
    sink: int
    prefix: bytes
    pending: bytearray = field(default_factory=bytearray)
    shown_at: float = 0.0
    is_rewritten: bool = False  # part of the line that is pending was shown as progress

    def take_lines(self, at_end: bool) -> list[bytes]:
        """Remove what can be shown from `pending` and return it as whole lines."""
        *complete, rest = bytes(self.pending).split(b"\n")
        self.pending = bytearray(rest)
        lines = [_last_progress(line) for line in complete]
        if complete:
            if self.is_rewritten and not lines[0]:
                del lines[0]  # its text was shown before the newline came
            self.is_rewritten = False
            self.shown_at = 0.0  # a progress bar after ordinary output shows at once
        progress, separator, tail = rest.rpartition(b"\r")
        if separator:
            self._take_progress(lines, progress, tail, at_end)
        if self.pending and (at_end or len(self.pending) > MAX_LINE_BYTES):
            text = _last_progress(bytes(self.pending))
            self.pending.clear()
            lines += [text] if text else []
        return lines

    def _take_progress(
        self, lines: list[bytes], progress: bytes, tail: bytes, at_end: bool
    ) -> None:
        """Show the latest state of a line that is rewritten with carriage returns, now and then."""
        now = time.monotonic()
        newest = _last_progress(progress)
        if at_end or now - self.shown_at < PROGRESS_SECONDS or not newest.strip():
            # Keep one finished state: the newline, or the end, may come right after it.
            self.pending = bytearray(newest + b"\r" + tail)
            return
        self.shown_at = now
        self.is_rewritten = True
        lines.append(newest)
        self.pending = bytearray(b"\r" + tail)


class _OutputPump(threading.Thread):
    """Copies the ranks' output to ours by line; a slow reader never blocks the main thread."""

    def __init__(self) -> None:
        super().__init__(name="bitopk-launch-output", daemon=True)
        self._selector = selectors.DefaultSelector()
        self.is_broken = False  # our own output was closed, for example by `| head`

    def add(self, pipe: Any, sink: int, prefix: bytes) -> None:
        """Copy `pipe` to file descriptor `sink`; only before the thread starts."""
        os.set_blocking(pipe.fileno(), False)
        self._selector.register(pipe, selectors.EVENT_READ, _Stream(pipe.fileno(), sink, prefix))

    def run(self) -> None:
        """Copy until every pipe has ended."""
        while self._selector.get_map():
            for key, _ in self._selector.select():
                self._copy(key)

    def close(self) -> None:
        """Wait until everything is written, at most a grace period, if the thread was started."""
        if self.ident is not None:
            self.join(GRACE_SECONDS)

    def _copy(self, key: selectors.SelectorKey) -> None:
        stream: _Stream = key.data
        try:
            data = os.read(stream.fd, 1 << 16)
        except BlockingIOError:
            return
        stream.pending += data
        lines = stream.take_lines(at_end=not data)
        if lines:
            self._write(stream.sink, b"".join(stream.prefix + line + b"\n" for line in lines))
        if not data:
            self._selector.unregister(key.fileobj)
            key.fileobj.close()  # type: ignore[union-attr]

    def _write(self, sink: int, data: bytes) -> None:
        view = memoryview(data)
        while view and not self.is_broken:
            try:
                view = view[os.write(sink, view) :]
            except BlockingIOError:
                time.sleep(0.01)  # our output is a non-blocking pipe of somebody else's making
            except OSError:
                self.is_broken = True


def _last_progress(line: bytes) -> bytes:
    """Return what a terminal shows of a line with carriage returns: the last non-empty state."""
    states = [state for state in line.split(b"\r") if state]
    return states[-1] if states else b""


def _kill_process_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except OSError:
        pass  # gone already


def _signal_name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def _report(text: str) -> None:
    try:
        print(f"bitopk launch: {text}", file=sys.stderr, flush=True)
    except OSError:
        pass  # nobody reads


def _sibling(name: str) -> str:
    return str(Path(__file__).with_name(name))
