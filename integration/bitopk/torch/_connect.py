# SPDX-License-Identifier: Apache-2.0
"""How the engines of `bitopk.ddp` and `Reducer` reach the other ranks."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from bitopk import _core, hosts
from bitopk.errors import InvalidArgumentError

__all__ = ["DEFAULT_TIMEOUT_SECONDS", "TRANSPORTS", "check_transport", "connect_ranks"]

# That of torch.distributed. A peer that dies is noticed at once; this bounds the wait for one that
# lives but does not come.
DEFAULT_TIMEOUT_SECONDS = 1800.0

TRANSPORTS = ("gloo", "torch")


def check_transport(transport: Any, where: str) -> None:
    """Raise InvalidArgumentError unless `transport` is one of `TRANSPORTS`."""
    if transport not in TRANSPORTS:
        raise InvalidArgumentError(
            f"{where}: transport must be 'gloo' (connections of our own) or 'torch' (the "
            f"collectives of torch.distributed); got {transport!r}"
        )


def connect_ranks(
    config: _core.Config,
    process_group: Any,
    *,
    transport: str,
    timeout: float | None,
    interface: str | None,
) -> tuple[_core.Engine, str]:
    """Make an engine; a collective call.

    Parameters
    ----------
    config : _core.Config
        Settings of the engine.
    process_group : torch.distributed.ProcessGroup or None
        Whose ranks take part. None: the default group, or, where torch.distributed is not
        initialised, whatever `bitopk.hosts.connect` finds.
    transport : {"gloo", "torch"}
        Connections of our own, or the collectives of torch.distributed.
    timeout : float or None
        Seconds that any wait for a peer may last.
    interface : str or None
        Network interface of our own connections.

    Returns
    -------
    engine : _core.Engine
    description : str
        Through what, for a log.
    """
    seconds = DEFAULT_TIMEOUT_SECONDS if timeout is None else timeout
    if transport == "torch":
        from bitopk.torch import lent

        return lent.connect(config, process_group, seconds)
    if process_group is None and not (dist.is_available() and dist.is_initialized()):
        return hosts.connect(config, seconds, interface)
    return hosts.connect_through(hosts.torch_host(process_group), config, seconds, interface)
