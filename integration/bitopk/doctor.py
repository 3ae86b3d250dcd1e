# SPDX-License-Identifier: Apache-2.0
"""``bitopk doctor``: what is installed, what was found, and how fast the links between ranks are.

Alone it looks at this process; started as several ranks, by any launcher, it connects them and
measures too::

    bitopk doctor
    bitopk launch -np 2 -m bitopk doctor
    horovodrun -np 4 -H a:2,b:2 python -m bitopk doctor
    torchrun --nproc-per-node 2 -m bitopk doctor
    mpirun -np 4 python -m bitopk doctor
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import socket
from typing import Any

import bitopk
from bitopk import _core, hosts
from bitopk._frameworks import is_installed, require, version_of
from bitopk._settings import make_config
from bitopk.errors import Error

__all__ = ["add_command", "check_versions", "report"]

# Distribution -> (module, versions that the tests run with).
_FRAMEWORKS = {
    "numpy": ("numpy", "1.24 and 2.x"),
    "torch": ("torch", "1.13 and 2.15"),
    "horovod": ("horovod.torch", "0.28.1"),
    "mpi4py": ("mpi4py", "3.1"),
}
_PAYLOAD_BYTES = 8 << 20


def add_command(commands: Any) -> None:
    """Add ``doctor`` to the subcommands of the command line."""
    parser = commands.add_parser(
        "doctor",
        help="print versions, features and interfaces; as several ranks, measure their links",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds to wait for a peer")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    try:
        launcher = _start_launcher()
    except ImportError as error:
        print(report(), flush=True)
        print(f"problem: the launcher's framework cannot be imported: {error}")
        return 1
    # Ranks of one machine look alike: one speaks for all.
    if launcher is None or launcher[1] == 0:
        print(report(), flush=True)
    problem = check_versions()
    if problem:
        print(f"problem: {problem}")
    if launcher is None:
        print("\none process: start it as several ranks to measure links (bitopk doctor --help)")
        return 1 if problem else 0
    _measure(arguments.timeout)
    return 1 if problem else 0


def report() -> str:
    """Return versions, processor and interfaces as text."""
    lines = [
        f"bitopk     {bitopk.__version__} (compiled for {_core.compiled_for()}), "
        f"Python {platform.python_version()}, {platform.platform()}",
        f"processor  {os.cpu_count()} cores, instruction sets: {', '.join(_core.supported_isas())}",
    ]
    for name, (module, tested) in _FRAMEWORKS.items():
        lines.append(f"{name:10} {_describe_framework(name, module, tested)}")
    chosen = os.environ.get(hosts.INTERFACE)
    names = ", ".join(name for _, name in socket.if_nameindex())
    lines.append(f"interfaces {names}; {hosts.INTERFACE} {f'is {chosen}' if chosen else 'not set'}")
    return "\n".join(lines)


def check_versions() -> str | None:
    """Return what does not fit together in one sentence, or None."""
    if not is_installed("horovod"):
        return None
    try:
        require("horovod.torch", "Horovod with PyTorch", "bitopk.horovod")
    except ImportError as error:
        return str(error)
    return None


def _describe_framework(distribution: str, module: str, tested: str) -> str:
    package = module.split(".")[0]
    if not is_installed(package):
        return "not installed"
    try:
        loaded = importlib.import_module(module)
    except Exception as error:
        return f"{version_of(distribution)}, fails to import: {error}"
    version = getattr(loaded, "__version__", None) or version_of(distribution)
    extra = ""
    if package == "horovod":
        built = [
            name
            for name in ("gloo", "mpi", "nccl")
            if getattr(loaded, f"{name}_built", lambda: False)()
        ]
        extra = f", built with {', '.join(built) or 'nothing'}"
    if package == "torch":
        extra = f", distributed: {'yes' if loaded.distributed.is_available() else 'no'}"
    return f"{version}{extra} (tested with {tested})"


def _start_launcher() -> tuple[str, int] | None:
    """Initialise whatever launched this process as a rank; its name and the rank."""
    env = os.environ
    if "HOROVOD_RANK" in env:
        hvd = importlib.import_module("horovod.torch")
        hvd.init()
        return "Horovod", hvd.rank()
    if hosts.LAUNCH_STORE in env:
        return "bitopk launch", int(env["RANK"])
    if "MASTER_ADDR" in env and "RANK" in env:
        distributed = importlib.import_module("torch.distributed")
        distributed.init_process_group("gloo")
        return "torch.distributed", distributed.get_rank()
    if "OMPI_COMM_WORLD_RANK" in env or "PMI_RANK" in env:
        mpi = importlib.import_module("mpi4py.MPI")
        return "MPI", mpi.COMM_WORLD.Get_rank()
    return None


def _measure(timeout: float) -> None:
    config = make_config(bitopk.Compression.none, 32 << 20)
    try:
        engine, description = hosts.connect(config, timeout, None)
    except Error as error:
        print(f"problem: the ranks cannot be connected: {error}")
        raise SystemExit(1) from None
    # Hosts report the interface of this rank; names come from all.
    own = f"{socket.gethostname()}\t{description}".encode()
    names = [text.decode().split("\t") for text in engine.all_gather(own)]
    links = engine.measure_network(_PAYLOAD_BYTES)
    if engine.rank == 0:
        print(f"\n{engine.size} ranks through {names[0][1].split(',')[0]}")
        print("rank  host                  interface                     latency   to next rank")
        for rank, ((host, text), (latency, speed)) in enumerate(zip(names, links)):
            interface = text.partition("interface ")[2]
            bandwidth = f"{speed * 8 / 1e9:6.2f} Gbit/s" if speed else "             -"
            print(f"{rank:4}  {host:20}  {interface:26}  {latency * 1e6:7.0f} us  {bandwidth}")
        print(
            "latency: median of small allgathers over all ranks; to next rank: best of 4 messages "
            f"of {_PAYLOAD_BYTES >> 20} MiB while all ranks send"
        )
    engine.close()
