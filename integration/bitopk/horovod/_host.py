# SPDX-License-Identifier: Apache-2.0
"""Horovod as the host of an engine: ranks, an allgather of bytes, its settings."""

from __future__ import annotations

import contextlib
import math
import os
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.torch.mpi_ops import allgather_async, synchronize

from bitopk.errors import InvalidArgumentError
from bitopk.hosts import Host

__all__ = [
    "JOIN_REASON",
    "default_timeout",
    "describe",
    "initialised_host",
    "make_host",
    "participation",
    "report_wait_after",
]

JOIN_REASON = (
    "a rank has called hvd.join(), which bitopk cannot serve: the compressed exchange needs every "
    "rank in every step. Give all ranks the same number of batches, or use hvd.Compression.none"
)

# Dead peers are noticed at once; this bounds the wait for one that lives but does not come.
_DEFAULT_TIMEOUT_SECONDS = 1800.0
_STALL_CHECK_SECONDS = 60.0  # Horovod's own default


def initialised_host() -> Host | None:
    """Return the whole job if Horovod is initialised, for `bitopk.init`."""
    return make_host(hvd.global_process_set, "bitopk.init") if hvd.is_initialized() else None


def make_host(process_set: Any, operation: str) -> Host:
    """Return the ranks of a process set; every use of its allgather is collective among them.

    Parameters
    ----------
    process_set : horovod.torch.ProcessSet
        Of which this rank must be a member.
    operation : str
        Names the allgather to Horovod; equal on all ranks, whatever they did before.
    """

    def all_gather(own: bytes) -> list[bytes]:
        size = torch.tensor([len(own)], dtype=torch.int64, device="cpu")
        sizes = _gather(size, f"{operation}.sizes").tolist()
        everything = _gather(_as_tensor(own), f"{operation}.bytes").numpy().tobytes()
        parts, at = [], 0
        for size in sizes:
            parts.append(everything[at : at + size])
            at += size
        return parts

    def _gather(tensor: torch.Tensor, name: str) -> torch.Tensor:
        try:
            return synchronize(allgather_async(tensor, name=name, process_set=process_set))
        except HorovodInternalError as error:
            # "Allgather is not supported with Join at this time"
            if "Join" in str(error):
                raise InvalidArgumentError(f"bitopk.horovod: {JOIN_REASON}") from error
            raise

    return Host(
        f"Horovod, {describe(process_set)}",
        process_set.rank(),
        process_set.size(),
        all_gather,
        os.environ.get("HOROVOD_GLOO_IFACE", ""),
    )


def describe(process_set: Any) -> str:
    """Return a text on a process set for logs and errors."""
    if process_set.process_set_id == 0:
        return f"all {hvd.size()} ranks"
    return f"process set {process_set.ranks}"


def participation(process_set: Any, device: torch.device) -> torch.Tensor:
    """Return what tells, once it is reduced, by which operation and whether all ranks took part.

    Shape (2,), float32: 1, and 1 on rank 0 of the set, else 0. A rank that has joined counts as
    zeros; one number alone would not tell a sum over one rank from a mean.
    """
    values = [1.0, 1.0 if process_set.rank() == 0 else 0.0]
    return torch.tensor(values, dtype=torch.float32, device=device)


def _as_tensor(data: bytes) -> torch.Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def default_timeout() -> float:
    """Return how long to wait for a rank, in seconds: as long as Horovod would."""
    seconds = _seconds("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS")
    return seconds if seconds > 0.0 else _DEFAULT_TIMEOUT_SECONDS


def report_wait_after() -> float:
    """Return after how many seconds to name the ranks that are waited for."""
    if os.environ.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0"):
        return math.inf
    seconds = _seconds("HOROVOD_STALL_CHECK_TIME_SECONDS")
    return seconds if seconds > 0.0 else _STALL_CHECK_SECONDS


def _seconds(variable: str) -> float:
    """Read a number as Horovod does: what cannot be read counts as not given."""
    with contextlib.suppress(ValueError):
        return float(os.environ.get(variable, ""))
    return 0.0
