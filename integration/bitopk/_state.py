# SPDX-License-Identifier: Apache-2.0
"""Checks of a saved state before it touches an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from bitopk.errors import InvalidArgumentError

__all__ = ["check_state"]

_TYPES = {
    "rank": int,
    "world_size": int,
    "description": str,
    "density": float,
    "density_down": float,
    "scale": float,
    "schedule_step": int,
    "worker_memory": list,
    "server_memory": list,
}


def check_state(state: Any, expected_format: int) -> dict[str, Any]:
    """Return `state` as a dict whose entries have the right types and finite memories.

    Raises
    ------
    InvalidArgumentError
        Naming the entry that is missing or damaged.
    """
    if not isinstance(state, Mapping):
        raise InvalidArgumentError(
            f"load_state_dict: state must be a dict; got {type(state).__name__}"
        )
    if state.get("format") != expected_format:
        raise InvalidArgumentError(
            f"load_state_dict: format must be {expected_format}; got {state.get('format')!r}"
        )
    for key, kind in _TYPES.items():
        value = state.get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise InvalidArgumentError(
                f"load_state_dict: {key} must be {kind.__name__}; got {type(value).__name__}"
            )
        if kind is int and not 0 <= value < 2**63:
            raise InvalidArgumentError(f"load_state_dict: {key} is {value}")
    for key in ("worker_memory", "server_memory"):
        for number, memory in enumerate(state[key]):
            _check_memory(f"{key}[{number}]", memory)
    return dict(state)


def _check_memory(what: str, memory: Any) -> None:
    if memory is None:
        return
    if not isinstance(memory, np.ndarray) or memory.dtype != np.float32 or memory.ndim != 1:
        raise InvalidArgumentError(
            f"load_state_dict: {what} must be a 1-D float32 array or None; got {memory!r}"
        )
    if not np.isfinite(memory).all():
        raise InvalidArgumentError(f"load_state_dict: {what} holds NaN or Inf")
