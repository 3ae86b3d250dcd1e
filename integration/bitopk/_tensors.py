# SPDX-License-Identifier: Apache-2.0
"""NumPy views of what users pass: NumPy arrays and CPU torch tensors, never copied."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from bitopk.errors import InvalidArgumentError

__all__ = ["empty_like", "host_view", "is_torch_tensor", "torch_if_imported"]


def torch_if_imported() -> Any:
    """Return the module torch if something imported it, else None."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "Tensor") else None  # it may be half imported


def is_torch_tensor(x: Any) -> bool:
    """Tell whether `x` is a torch tensor, without importing torch."""
    torch = torch_if_imported()
    return torch is not None and isinstance(x, torch.Tensor)


def host_view(x: Any, what: str) -> np.ndarray:
    """Return the memory of `x` as a NumPy array.

    Parameters
    ----------
    x : numpy.ndarray or torch.Tensor
        Any shape, C-contiguous; a tensor must be dense and on the CPU.
    what : str
        Name for error messages.

    Raises
    ------
    InvalidArgumentError
        If the memory cannot be used in place; the message says how to get one that can.
    """
    if is_torch_tensor(x):
        return _torch_view(x, what)
    if not isinstance(x, np.ndarray):
        raise InvalidArgumentError(
            f"{what}: must be a NumPy array or a CPU torch tensor; got {type(x).__name__}"
        )
    if not x.flags.c_contiguous:
        raise InvalidArgumentError(
            f"{what}: must be C-contiguous; got strides {x.strides} for shape {x.shape}. "
            "Pass numpy.ascontiguousarray(...)"
        )
    return x


def _torch_view(x: Any, what: str) -> np.ndarray:
    if x.device.type != "cpu":
        raise InvalidArgumentError(f"{what}: must be on the CPU; got {x.device}")
    if x.is_sparse:
        raise InvalidArgumentError(f"{what}: must be dense; got layout {x.layout}")
    if not x.is_contiguous():
        raise InvalidArgumentError(
            f"{what}: must be contiguous; got strides {tuple(x.stride())} for shape "
            f"{tuple(x.shape)}. Pass tensor.contiguous()"
        )
    try:
        return x.detach().numpy()
    except (TypeError, RuntimeError) as error:
        raise InvalidArgumentError(f"{what}: {x.dtype} has no NumPy view ({error})") from None


def empty_like(x: Any) -> Any:
    """Return a new array or tensor of the shape, type and kind of `x`."""
    if is_torch_tensor(x):
        return sys.modules["torch"].empty_like(x.detach())
    return np.empty_like(x)
