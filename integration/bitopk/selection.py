# SPDX-License-Identifier: Apache-2.0
"""`topk`: the selection alone."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from bitopk import _core
from bitopk._tensors import host_view
from bitopk.errors import InvalidArgumentError

__all__ = ["topk"]


def topk(x: Any, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the k entries of `x` with the largest magnitude.

    NaNs rank above Inf and are equal among themselves; at the k-th magnitude the lower index wins.

    Parameters
    ----------
    x : numpy.ndarray or CPU torch.Tensor, shape (d,), float32, contiguous
        Not modified, not copied.
    k : int
        Entries to keep; more than d is d.

    Returns
    -------
    indices : numpy.ndarray, shape (min(k, d),), uint32
        Ascending.
    values : numpy.ndarray, shape (min(k, d),), float32
        ``x[indices]``, bit for bit.

    Raises
    ------
    InvalidArgumentError
        If `x` is not as described or k is not an int of at least 0.
    """
    try:
        count = operator.index(k)
    except TypeError:
        count = -1
    if count < 0 or isinstance(k, bool):
        raise InvalidArgumentError(f"topk: k must be an int of at least 0; got {k!r}")
    return _core.topk(host_view(x, "topk: x"), count)
