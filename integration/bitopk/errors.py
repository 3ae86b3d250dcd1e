# SPDX-License-Identifier: Apache-2.0
"""The exceptions of bitopk, one to one with those of the C++ library.

Every exception derives from `Error`. `InvalidArgumentError` is also a `ValueError`, so that a
caller who knows nothing of bitopk still catches bad arguments in the usual way.
"""

from bitopk._core import (
    CommunicationError,
    Error,
    InvalidArgumentError,
    NonFiniteGradientError,
    ReplicaDivergence,
    WireFormatError,
)

__all__ = [
    "CommunicationError",
    "Error",
    "InvalidArgumentError",
    "NonFiniteGradientError",
    "ReplicaDivergence",
    "WireFormatError",
]
