# SPDX-License-Identifier: Apache-2.0
"""`Stats`: what a rank has done and sent."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Stats"]


@dataclass(frozen=True)
class Stats:
    """What one rank did since its group was made.

    Attributes
    ----------
    steps : int
        Finished steps, those included that were dropped.
    bytes_sent, bytes_received : int
        Bytes that this rank put on and took from its links, headers, histograms and the agreement
        at start included.
    entries_up : int
        Entries of compressed tensors that this rank sent towards the servers.
    entries_down : int
        Entries of compressed tensors in the results.
    dense_bytes : int
        Bytes that a ring allreduce of the same tensors in their own type would have sent from this
        rank.
    compression_ratio : float
        ``dense_bytes / bytes_sent``; 1.0 if nothing had to be sent.
    contraction_up, contraction_down : float
        ``1 - |x - C(x)|^2 / |x|^2`` of the last step, over the compressed tensors of this rank and
        over the sums that this rank serves; NaN if there were none.
    residual_norm : float
        Euclidean norm of this rank's worker memory.
    seconds : dict of str to float
        Time by stage of the communication thread: compress, uplink, server, threshold, downlink,
        decode, dense, wait (for gradients).
    dropped_steps : int
        Steps whose memories were dropped because of NaN or Inf.
    """

    steps: int
    bytes_sent: int
    bytes_received: int
    entries_up: int
    entries_down: int
    dense_bytes: int
    compression_ratio: float
    contraction_up: float
    contraction_down: float
    residual_norm: float
    seconds: dict[str, float] = field(hash=False)
    dropped_steps: int = 0
