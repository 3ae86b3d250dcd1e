# SPDX-License-Identifier: Apache-2.0
"""Errors of the engine as Horovod knows them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from horovod.common.exceptions import HorovodInternalError

from bitopk.errors import CommunicationError, WireFormatError

__all__ = ["as_horovod_errors"]


@contextlib.contextmanager
def as_horovod_errors() -> Iterator[None]:
    """Raise what ends the engine as the error from which Horovod's elastic training recovers."""
    try:
        yield
    except (CommunicationError, WireFormatError) as error:
        raise HorovodInternalError(str(error)) from error
