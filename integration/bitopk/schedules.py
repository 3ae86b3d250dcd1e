# SPDX-License-Identifier: Apache-2.0
"""Densities as functions of the step.

A schedule is any callable that takes the number of committed steps and returns a density in
(0, 1], or a pair (up, down). It must give the same on all ranks. For dense steps at the start use
``start_step`` of `bitopk.Compression` instead: they need no memories and are faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Union

from bitopk.errors import InvalidArgumentError

__all__ = ["Schedule", "constant", "exponential_warmup"]

Schedule = Callable[[int], Union[float, tuple[float, float]]]


def constant(density: float) -> Schedule:
    """Return a schedule that always gives `density`."""
    _check("density", density)
    return lambda step: density


def exponential_warmup(density: float, warmup_steps: int, initial: float = 0.25) -> Schedule:
    """Return a schedule that goes down exponentially from `initial` to `density`.

    Parameters
    ----------
    density : float
        Density from step `warmup_steps` on, in (0, 1].
    warmup_steps : int
        Length of the warm-up in steps, at least 0. [LHMWD18] uses four epochs.
    initial : float
        Density of step 0, in (0, 1].

    Returns
    -------
    callable
        ``initial * (density / initial) ** (step / warmup_steps)`` during the warm-up. [LHMWD18]
        holds each value for an epoch (25 %, 6.25 %, 1.5625 %, 0.4 %, 0.1 %); this is the smooth
        curve through the same points.

    References
    ----------
    .. [LHMWD18] Y. Lin et al., Deep Gradient Compression, arXiv 1712.01887, section 3.3.
    """
    _check("density", density)
    _check("initial", initial)
    if isinstance(warmup_steps, bool) or not isinstance(warmup_steps, int) or warmup_steps < 0:
        raise InvalidArgumentError(
            f"exponential_warmup: warmup_steps must be an int >= 0; got {warmup_steps!r}"
        )

    def schedule(step: int) -> float:
        if step >= warmup_steps:
            return density
        return initial * math.pow(density / initial, step / warmup_steps)

    return schedule


def _check(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, float) or not 0.0 < value <= 1.0:
        raise InvalidArgumentError(
            f"schedule: {name} must be a float in (0, 1]; got {value!r} ({type(value).__name__})"
        )
