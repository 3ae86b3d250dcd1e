# SPDX-License-Identifier: Apache-2.0
"""Translation of a `bitopk.Compression` into the settings of the engine."""

from __future__ import annotations

from typing import Any

from bitopk import _core
from bitopk.compression import Compression
from bitopk.errors import InvalidArgumentError

__all__ = ["as_spec", "make_config"]

_SCOPES = {"tensor": _core.Scope.tensor, "global": _core.Scope.global_}
_NONFINITE = {
    "propagate": _core.NonFinite.propagate,
    "skip": _core.NonFinite.skip,
    "raise": _core.NonFinite.raise_,
}


def as_spec(spec: Any, where: str) -> Compression:
    """Return `spec` if it is a Compression, else raise an error that says what to pass."""
    if isinstance(spec, Compression):
        return spec
    raise InvalidArgumentError(
        f"{where}: spec must be a bitopk.Compression, such as bitopk.Compression.topk(0.01); "
        f"got {spec!r}"
    )


def make_config(spec: Compression, bucket_bytes: int) -> _core.Config:
    """Return the engine's settings for `spec`, with the environment's overrides."""
    if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int) or bucket_bytes < 1:
        raise InvalidArgumentError(
            f"bucket_bytes: must be a positive number of bytes; got {bucket_bytes!r}"
        )
    config = _core.Config()
    config.spec = _core_spec(spec)
    config.nonfinite = _NONFINITE[spec.nonfinite]
    config.seed = spec.seed
    config.bucket_bytes = bucket_bytes
    for pattern, rule in spec.rules:
        config.add_rule(pattern, _core_spec(Compression.none if rule == "dense" else rule))
    return config


def _core_spec(spec: Compression) -> _core.CompressionSpec:
    out = _core.CompressionSpec()
    out.scope = _SCOPES[spec.scope]
    out.exchange = getattr(_core.Exchange, spec.exchange)
    out.value_format = getattr(_core.ValueFormat, spec.value_format)
    out.dense_fallback = spec.dense_fallback
    out.worker_memory = spec.worker_memory
    out.server_memory = spec.server_memory
    out.memory_decay = spec.memory_decay
    out.start_step = spec.start_step
    out.dense_below = spec.dense_below
    if spec.method != "topk":
        out.method = _core.Method.dense
        if spec.method == "fp16":
            out.value_format = _core.ValueFormat.float16
        return out
    out.density = spec.density or 0.0
    out.density_down = spec.density_down or 0.0
    out.k = spec.k or 0
    out.k_down = spec.k_down or 0
    return out
