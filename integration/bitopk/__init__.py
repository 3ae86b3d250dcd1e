# SPDX-License-Identifier: Apache-2.0
"""bitopk: gradients exchanged as topK in both directions, with an error memory on either side."""

from bitopk._core import __version__
from bitopk.compression import Compression
from bitopk.errors import (
    CommunicationError,
    Error,
    InvalidArgumentError,
    NonFiniteGradientError,
    ReplicaDivergence,
    WireFormatError,
)
from bitopk.group import Group, Work, init
from bitopk.local_group import LocalGroup
from bitopk.selection import topk
from bitopk.stats import Stats

__all__ = [
    "CommunicationError",
    "Compression",
    "Error",
    "Group",
    "InvalidArgumentError",
    "LocalGroup",
    "NonFiniteGradientError",
    "ReplicaDivergence",
    "Stats",
    "WireFormatError",
    "Work",
    "__version__",
    "init",
    "topk",
]
