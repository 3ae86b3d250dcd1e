#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Steps over networks of a given speed: ``./run bench --network``, as root.

Each rank gets a network namespace of its own, joined by a bridge in another; both ends of each link
have a token bucket of the rate asked for. All ranks share this machine's processors. Every case of
a row is timed in turn, within one job, on fresh data; a step's time is that of the slowest rank;
the table shows medians, and ratios are medians over pairs. The namespaces go away with the program,
also when it is interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

RANK_PROGRAM = Path(__file__).with_name("network_rank.py")
PREFIX = "bitopk-bench-"


@dataclass(frozen=True)
class Row:
    """One job: world, link and cases."""

    name: str
    ranks: int
    rate: str  # of tc, e.g. "1gbit"; "" for loopback without namespaces
    entries: int
    density: float
    cases: tuple[str, ...]
    baseline: str
    repetitions: int = 7


def rows(entries: int) -> list[Row]:
    """Return all rows."""
    common = ("dense", "dense-fp16", "sparse-allgather", "sharded", "allgather", "auto")
    out = [Row(f"loopback-n{n}", n, "", 4_000_000, 0.01, common, "dense", 15) for n in (2, 4)]
    out += [Row(f"1gbit-n{n}", n, "1gbit", entries, 0.01, common, "dense") for n in (4, 8, 16)]
    slow = ("dense", "dense-fp16", "sharded", "sharded-fp16", "auto")
    out.append(Row("100mbit-n8", 8, "100mbit", entries, 0.01, slow, "dense", 3))
    return out


class Network:
    """Namespaces of `ranks` ranks; a context manager."""

    def __init__(self, ranks: int, rate: str) -> None:
        self._rate = rate
        self._prefix = f"{PREFIX}{os.getpid()}-"
        self._switch = f"{self._prefix}switch"
        self.names = [f"{self._prefix}{rank}" for rank in range(ranks)]

    def __enter__(self) -> Network:
        """Make everything, or nothing."""
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove everything."""
        self._remove()

    def _make(self) -> None:
        for name in (self._switch, *self.names):
            _ip("netns", "add", name)
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        for rank, name in enumerate(self.names):
            port = f"port{rank}"
            ends = ("eth0", "netns", name, "type", "veth", "peer", "name", port)
            _ip("link", "add", *ends, "netns", self._switch)
            _ip("-n", self._switch, "link", "set", port, "master", "bridge", "up")
            _ip("-n", name, "addr", "add", f"10.77.0.{rank + 1}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                _ip("-n", name, "link", "set", device, "up")
            for namespace, device in ((name, "eth0"), (self._switch, port)):
                bucket = ("tbf", "rate", self._rate, "burst", "256kb", "limit", "4mb")
                _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *bucket)

    def _remove(self) -> None:
        for name in (self._switch, *self.names):
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)


def remove_leftovers() -> None:
    """Remove namespaces of earlier runs whose process is gone."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    for line in listed.stdout.splitlines():
        name = line.split()[0] if line.split() else ""
        if name.startswith(PREFIX):
            pid = name[len(PREFIX) :].split("-")[0]
            if not Path(f"/proc/{pid}").exists():
                subprocess.run(["ip", "netns", "del", name], check=False)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"network_bench: {' '.join(command)}: {done.stderr.strip()} (needs root)")


def run_row(row: Row) -> dict[str, Any]:
    """Run one row and return what it measured."""
    if not row.rate:
        return _run_ranks(row, [[] for _ in range(row.ranks)], "lo")
    with Network(row.ranks, row.rate) as network:
        prefixes = [["ip", "netns", "exec", name] for name in network.names]
        return _run_ranks(row, prefixes, "eth0")


def _run_ranks(row: Row, prefixes: list[list[str]], interface: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="bitopk-bench-") as folder:
        options = {
            "entries": row.entries,
            "density": row.density,
            "cases": row.cases,
            "repetitions": row.repetitions,
            "out": f"{folder}/result.json",
            "store": f"{folder}/torch",
        }
        ranks = []
        try:
            for rank, prefix in enumerate(prefixes):
                environment = {
                    **os.environ,
                    "RANK": str(rank),
                    "WORLD_SIZE": str(row.ranks),
                    "BITOPK_LAUNCH_STORE": f"{folder}/bitopk",
                    "BITOPK_IFACE": interface,
                    "GLOO_SOCKET_IFNAME": interface,
                    "OMP_NUM_THREADS": "1",
                }
                command = [*prefix, sys.executable, str(RANK_PROGRAM), json.dumps(options)]
                ranks.append(subprocess.Popen(command, env=environment))
            for rank, process in enumerate(ranks):
                if process.wait(timeout=1200) != 0:
                    sys.exit(f"network_bench: row {row.name}: rank {rank} failed")
        finally:
            for process in ranks:
                process.kill()
        result: dict[str, Any] = json.loads(Path(options["out"]).read_text(encoding="utf-8"))
    return result


def table(row: Row, result: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a row's table."""
    link = f"{row.rate} links" if row.rate else "loopback"
    yield f"{row.name}: {row.ranks} ranks, {link}, {row.entries:,} floats, density {row.density}"
    yield "  case               median     min     max   over baseline   MB sent per rank"
    base = result["seconds"][row.baseline]
    for case in row.cases:
        seconds = result["seconds"][case]
        ratio = statistics.median(b / s for b, s in zip(base, seconds))
        sent = result["bytes_sent"].get(case)
        yield (
            f"  {case:17} {statistics.median(seconds) * 1e3:7.1f} {min(seconds) * 1e3:7.1f} "
            f"{max(seconds) * 1e3:7.1f}  ms   {ratio:6.2f}x faster   "
            f"{'' if sent is None else f'{sent / 1e6:9.3f}'}"
        )


def main() -> None:
    """Run the rows asked for."""
    parser = argparse.ArgumentParser(prog="./run bench --network", description=__doc__)
    parser.add_argument("--rows", help="names with commas between; all by default")
    parser.add_argument("--entries", type=int, default=10_000_000, help="floats of the slow links")
    parser.add_argument("--list", action="store_true", help="only print the rows")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path, default=Path("build/bench/network.json"))
    arguments = parser.parse_args()
    chosen = rows(arguments.entries)
    if arguments.rows:
        names = arguments.rows.split(",")
        unknown = set(names) - {row.name for row in chosen}
        if unknown:
            parser.error(f"--rows: unknown {sorted(unknown)}; {[row.name for row in chosen]}")
        chosen = [row for row in chosen if row.name in names]
    if arguments.list:
        print("\n".join(row.name for row in chosen))
        return
    # Namespaces are removed on the way out; a signal must therefore be an exception.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    remove_leftovers()
    report = {
        "commit": arguments.commit,
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "rows": {},
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    for row in chosen:
        result = run_row(row)
        report["rows"][row.name] = {**row.__dict__, **result}
        arguments.out.write_text(json.dumps(report, indent=1), encoding="utf-8")
        print("\n".join(table(row, result)), flush=True)


if __name__ == "__main__":
    main()
