# SPDX-License-Identifier: Apache-2.0
"""Arrays with a header as bytes, for what ranks send each other beside gradients.

A length, a JSON text with the header and the sizes, and the arrays one after the other: nothing
that a peer sends is executed.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from bitopk.errors import WireFormatError

__all__ = ["pack", "unpack"]


def pack(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> bytes:
    """Return `header`, of what JSON knows, and 1-D float32 arrays by name as bytes."""
    sizes = {name: array.size for name, array in arrays.items()}
    text = json.dumps({"header": header, "sizes": sizes}).encode()
    data = [np.ascontiguousarray(array, "<f4").tobytes() for array in arrays.values()]
    return b"".join([struct.pack("<Q", len(text)), text, *data])


def unpack(data: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return what `pack` was given.

    Raises
    ------
    WireFormatError
        If the bytes are not of that form.
    """
    try:
        (length,) = struct.unpack_from("<Q", data)
        content = json.loads(data[8 : 8 + length])
        at = 8 + length
        arrays = {}
        for name, size in content["sizes"].items():
            arrays[name] = np.frombuffer(data, "<f4", size, at).copy()
            at += 4 * size
        return content["header"], arrays
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WireFormatError(
            f"a peer's memories are damaged ({type(error).__name__}: {error})"
        ) from None
