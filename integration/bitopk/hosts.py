# SPDX-License-Identifier: Apache-2.0
"""Hosts: what launched the ranks and can carry their addresses to each other once.

A host is only asked for its rank, its size and two allgathers of bytes; everything after that goes
over connections of our own.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitopk import _core
from bitopk.errors import Error, InvalidArgumentError

__all__ = ["LAUNCH_STORE", "Host", "connect", "connect_through", "torch_host"]

LAUNCH_STORE = "BITOPK_LAUNCH_STORE"  # folder that the ranks of `bitopk launch` meet in
INTERFACE = "BITOPK_IFACE"

_launch_contexts = itertools.count()


@dataclass(frozen=True)
class Host:
    """What launched this process as one of several ranks.

    Attributes
    ----------
    name : str
        For the log.
    rank, size : int
        Of this process among those that connect.
    all_gather : callable
        Sends bytes to all ranks and returns those of every rank, in rank order; collective.
    interface : str
        Network interface that the host itself uses, if it says so.
    """

    name: str
    rank: int
    size: int
    all_gather: Callable[[bytes], list[bytes]]
    interface: str = ""


def connect(
    config: _core.Config, timeout: float, interface: str | None
) -> tuple[_core.Engine, str]:
    """Connect this process with the other ranks of its job.

    Hosts are looked for in this order: Horovod (initialised, with PyTorch), torch.distributed
    (initialised), mpi4py (imported, more than one rank), ``bitopk launch``.

    Parameters
    ----------
    config : _core.Config
        Settings of the engine.
    timeout : float
        Seconds that any wait for a peer may last.
    interface : str or None
        Network interface; see `connect_through` for the default.

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
    host = _horovod_host() or _torch_host() or _mpi_host()
    if host is not None:
        return connect_through(host, config, timeout, interface)
    if LAUNCH_STORE in os.environ:
        return _connect_launched(config, timeout, _given_interface(interface))
    raise Error(
        "init: found nothing that launched this process as a rank. Looked for: an initialised "
        "horovod.torch; an initialised torch.distributed process group; mpi4py with more than one "
        "rank; bitopk launch -np N script.py. For several ranks in one process use "
        "bitopk.LocalGroup"
    )


def connect_through(
    host: Host, config: _core.Config, timeout: float, interface: str | None
) -> tuple[_core.Engine, str]:
    """Connect with the other ranks of `host`; all of them must call it.

    Parameters
    ----------
    host : Host
        Carries the addresses.
    config, timeout
        See `connect`.
    interface : str or None
        Network interface. By default that of BITOPK_IFACE, else the host's own, else loopback if
        all ranks are on one machine, else the one from which packets leave for the first rank on
        another machine, else the one of the host name's address.

    Returns
    -------
    engine : _core.Engine
    description : str
        The host and the interface, for a log.
    """
    interface = _given_interface(interface) or host.interface
    ranks = [json.loads(text) for text in host.all_gather(_describe_machine())]
    own_address = ""
    if not interface:
        machine = ranks[host.rank]["machine"]
        elsewhere = [rank["names"] for rank in ranks if rank["machine"] != machine]
        own_address = _address_towards(elsewhere[0]) if elsewhere else "127.0.0.1"
    bootstrap = _core.GlooBootstrap(host.rank, host.size, interface, own_address, timeout)
    addresses = host.all_gather(bootstrap.address)
    description = f"{host.name}, interface {bootstrap.interface_description}"
    return bootstrap.connect(addresses, config), description


def _given_interface(interface: str | None) -> str:
    return interface if interface is not None else os.environ.get(INTERFACE, "")


def _describe_machine() -> bytes:
    """Tell where this process runs, and under which names others may reach the machine."""
    name = socket.gethostname()
    # Cloned machines may share a name, and containers a machine: what counts is one loopback.
    machine = [name]
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        machine += [boot, os.readlink("/proc/self/ns/net")]
    # The name by which horovodrun reached this machine comes first.
    names = [os.environ.get("HOROVOD_HOSTNAME", ""), name, socket.getfqdn(name)]
    known = list(dict.fromkeys(filter(None, names)))
    return json.dumps({"machine": " ".join(machine), "names": known}).encode()


def _address_towards(names: Iterable[str]) -> str:
    """Return this machine's address on the way to another known by `names`; "" if there is none.

    Nothing is sent: connecting a UDP socket only asks the routing table.
    """
    for name in names:
        with contextlib.suppress(OSError):
            for family, kind, _, _, address in socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM):
                own = _own_address(family, kind, address)
                if own and not own.startswith("127.") and own != "::1":
                    return own
    return ""


def _own_address(family: int, kind: int, address: tuple) -> str:
    with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
    return ""


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


def _horovod_host() -> Host | None:
    if "horovod.torch" not in sys.modules:
        return None
    from bitopk.horovod._host import initialised_host

    return initialised_host()


def _torch_host() -> Host | None:
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return torch_host()


def torch_host(process_group: Any = None) -> Host:
    """Return the ranks of a group of torch.distributed, for `connect_through`.

    Parameters
    ----------
    process_group : torch.distributed.ProcessGroup, optional
        The default group if None. Its all_gather carries the addresses; with NCCL that takes the
        current device.

    Raises
    ------
    InvalidArgumentError
        If torch.distributed is not initialised, or this rank is not in the group.
    """
    import torch.distributed as distributed

    if not distributed.is_available() or not distributed.is_initialized():
        raise InvalidArgumentError(
            "torch.distributed is not initialised; call init_process_group first"
        )
    rank = distributed.get_rank(process_group)
    if rank < 0:
        raise InvalidArgumentError(
            f"rank {distributed.get_rank()} of {distributed.get_world_size()} is not in the "
            f"process group that it was given"
        )
    size = distributed.get_world_size(process_group)

    def all_gather(own: bytes) -> list[bytes]:
        parts: list[Any] = [None] * size
        distributed.all_gather_object(parts, own, group=process_group)
        return parts

    return Host("torch.distributed", rank, size, all_gather)


def _mpi_host() -> Host | None:
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.COMM_WORLD.Get_size() == 1:
        return None
    world = mpi.COMM_WORLD
    return Host("mpi4py", world.Get_rank(), world.Get_size(), world.allgather)
