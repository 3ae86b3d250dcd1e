# SPDX-License-Identifier: Apache-2.0
"""Hosts: what launched the ranks and can carry their addresses to each other once.

A host is only asked for its rank, its size and one allgather of bytes; everything after that goes
over connections of our own.
"""

from __future__ import annotations

import itertools
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bitopk import _core
from bitopk.errors import Error, InvalidArgumentError

__all__ = ["LAUNCH_STORE", "connect"]

LAUNCH_STORE = "BITOPK_LAUNCH_STORE"  # folder that the ranks of `bitopk launch` meet in
INTERFACE = "BITOPK_IFACE"

_launch_contexts = itertools.count()


@dataclass(frozen=True)
class _Host:
    name: str
    rank: int
    size: int
    all_gather: Callable[[bytes], list[bytes]]


def connect(
    config: _core.Config, timeout: float, interface: str | None
) -> tuple[_core.Engine, str]:
    """Connect this process with the other ranks of its job.

    Hosts are looked for in this order: torch.distributed (initialised), mpi4py (imported, more than
    one rank), ``bitopk launch``.

    Parameters
    ----------
    config : _core.Config
        Settings of the engine.
    timeout : float
        Seconds that any wait for a peer may last.
    interface : str or None
        Network interface; by default that of BITOPK_IFACE, else loopback if all ranks are on one
        machine, else the one of the host name's address.

    Returns
    -------
    engine : _core.Engine
    description : str
        The host and the interface, for a log.

    Raises
    ------
    Error
        If there is no host; the message lists those that were looked for.
    """
    interface = interface if interface is not None else os.environ.get(INTERFACE, "")
    host = _torch_host() or _mpi_host()
    if host is not None:
        return _connect_through(host, config, timeout, interface)
    if LAUNCH_STORE in os.environ:
        return _connect_launched(config, timeout, interface)
    raise Error(
        "init: found nothing that launched this process as a rank. Looked for: an initialised "
        "torch.distributed process group; mpi4py with more than one rank; bitopk launch -np N "
        "script.py. For several ranks in one process use bitopk.LocalGroup"
    )


def _connect_through(
    host: _Host, config: _core.Config, timeout: float, interface: str
) -> tuple[_core.Engine, str]:
    machines = host.all_gather(socket.gethostname().encode())
    alone = len(set(machines)) == 1 and not interface
    bootstrap = _core.GlooBootstrap(
        host.rank, host.size, interface, "127.0.0.1" if alone else "", timeout
    )
    addresses = host.all_gather(bootstrap.address)
    description = f"{host.name}, interface {bootstrap.interface_description}"
    return bootstrap.connect(addresses, config), description


def _connect_launched(
    config: _core.Config, timeout: float, interface: str
) -> tuple[_core.Engine, str]:
    rank, size = _environment_number("RANK"), _environment_number("WORLD_SIZE")
    # All ranks make their contexts in the same order, so counting them pairs them up.
    directory = Path(os.environ[LAUNCH_STORE]) / f"context{next(_launch_contexts)}"
    hostname = "" if interface else "127.0.0.1"
    engine = _core.connect_file_store(
        str(directory), rank, size, interface, hostname, timeout, config
    )
    return engine, f"bitopk launch, interface {interface or 'loopback'}"


def _environment_number(name: str) -> int:
    text = os.environ.get(name, "")
    if not text.isdigit():
        raise InvalidArgumentError(f"init: {LAUNCH_STORE} is set, but {name} is {text!r}")
    return int(text)


def _torch_host() -> _Host | None:
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None

    def all_gather(own: bytes) -> list[bytes]:
        parts = [None] * distributed.get_world_size()
        distributed.all_gather_object(parts, own)
        return parts

    return _Host(
        "torch.distributed", distributed.get_rank(), distributed.get_world_size(), all_gather
    )


def _mpi_host() -> _Host | None:
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.COMM_WORLD.Get_size() == 1:
        return None
    world = mpi.COMM_WORLD
    return _Host("mpi4py", world.Get_rank(), world.Get_size(), world.allgather)
