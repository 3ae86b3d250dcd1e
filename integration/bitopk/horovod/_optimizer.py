# SPDX-License-Identifier: Apache-2.0
"""`DistributedOptimizer` and `attach`: the engine in the optimizer that Horovod wraps."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable
from typing import Any, Union

import horovod.torch as hvd
import torch

from bitopk.compression import Compression
from bitopk.errors import InvalidArgumentError
from bitopk.horovod._attachment import Attachment, check_scale
from bitopk.horovod._driver import Driver
from bitopk.schedules import Schedule
from bitopk.torch._session import as_compression

__all__ = ["DistributedOptimizer", "attach"]

Scale = Union[None, float, Callable[[], float], str]

_OPS = {hvd.Average: "average", hvd.Sum: "sum"}
_REFUSED_OPS = {
    hvd.Adasum: ("Adasum", "it combines changes of the parameters, not gradients"),
    hvd.Min: ("Min", "a topK of each rank says nothing of the others' entries"),
    hvd.Max: ("Max", "a topK of each rank says nothing of the others' entries"),
    hvd.Product: ("Product", "what a rank leaves out cannot be added later"),
}


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = hvd.Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: Any = hvd.global_process_set,
    *,
    scale: Scale = None,
    schedule: Schedule | None = None,
    timeout: float | None = None,
    interface: str | None = None,
) -> torch.optim.Optimizer:
    """Wrap an optimizer as ``horovod.torch.DistributedOptimizer`` does, with topK both ways.

    Parameters
    ----------
    optimizer, named_parameters, backward_passes_per_step, op, gradient_predivide_factor, \
num_groups, groups, process_set
        As Horovod's. `op` is Average or Sum. `groups` has no effect beyond Horovod's checks, since
        the engine forms its own messages.
    compression : float, bitopk.Compression or a compressor of Horovod
        A density, or what to compress and how. With a compressor of Horovod
        (``hvd.Compression.fp16``) the optimizer is Horovod's own, unchanged.
    sparse_as_dense : bool
        Must be False: sparse gradients are left to Horovod, which gathers them.
    scale : None, float, callable or "lr"
        Factor by which gradients are multiplied relative to the memories' own unit: a loss scale,
        or one over the learning rate. "lr" keeps the memories in units of learning rate times
        gradient, by the group of each parameter, so that schedules act on what is remembered as on
        what is sent.
    schedule : callable, optional
        Density as a function of the step; see `bitopk.schedules`.
    timeout : float, optional
        Seconds that a wait for a rank may last; HOROVOD_STALL_SHUTDOWN_TIME_SECONDS if that is set,
        else half an hour.
    interface : str, optional
        Network interface; see `bitopk.hosts.connect_through`.

    Returns
    -------
    torch.optim.Optimizer
        Horovod's optimizer. Its attribute ``bitopk`` holds the memories (`state_dict`,
        `load_state_dict`, `stats`, ...); ``state_dict()`` of the optimizer itself is what it was.
        ``zero_grad`` takes ``set_to_none``. With one rank Horovod reduces nothing, and nothing is
        compressed.

    Raises
    ------
    InvalidArgumentError
        For an operation or option that cannot be served.
    ValueError
        From Horovod's own checks.
    """
    where = "bitopk.horovod.DistributedOptimizer"
    extras = {"scale": scale, "schedule": schedule, "timeout": timeout, "interface": interface}
    options = {
        "backward_passes_per_step": backward_passes_per_step,
        "op": op,
        "gradient_predivide_factor": gradient_predivide_factor,
        "num_groups": num_groups,
        "groups": groups,
        "process_set": process_set,
    }
    if _is_horovods(compression):
        given = [name for name, value in extras.items() if value is not None]
        if given:
            raise InvalidArgumentError(
                f"{where}: {given[0]} means nothing to {compression!r}; it needs a density or a "
                f"bitopk.Compression"
            )
        return hvd.DistributedOptimizer(
            optimizer,
            named_parameters,
            compression,
            sparse_as_dense=sparse_as_dense,
            **options,
        )
    spec = as_compression(compression, where)
    _check_op(op, where)
    _check_sparse_as_dense(sparse_as_dense, where)
    if named_parameters is not None:
        named_parameters = list(named_parameters)
    wrapped = hvd.DistributedOptimizer(optimizer, named_parameters, **options)
    order = [name for name, _ in named_parameters or ()]
    return _attach(wrapped, spec, order, where, **extras)


def attach(
    optimizer: torch.optim.Optimizer,
    spec_or_density: Any,
    *,
    scale: Scale = None,
    schedule: Schedule | None = None,
    timeout: float | None = None,
    interface: str | None = None,
) -> torch.optim.Optimizer:
    """Compress the gradients of an optimizer that ``hvd.DistributedOptimizer`` has wrapped before.

    To be called on all ranks at the same place, between two steps. Names, operation, groups and
    process set are the optimizer's; registration order is that of the sorted names.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Made by ``hvd.DistributedOptimizer``, with ``hvd.Compression.none``.
    spec_or_density : bitopk.Compression or float
        What to compress, and how.
    scale, schedule, timeout, interface
        See `DistributedOptimizer`.

    Returns
    -------
    torch.optim.Optimizer
        The optimizer itself, now with the attribute ``bitopk``.

    Raises
    ------
    InvalidArgumentError
        If it is not such an optimizer, or uses what cannot be served; nothing is changed then.
    """
    where = "bitopk.horovod.attach"
    spec = as_compression(spec_or_density, where)
    _check_horovods_optimizer(optimizer, where)
    extras = {"scale": scale, "schedule": schedule, "timeout": timeout, "interface": interface}
    return _attach(optimizer, spec, [], where, **extras)


def _attach(
    optimizer: Any, spec: Compression, order: list[str], where: str, *, scale: Scale, **extras: Any
) -> Any:
    names = {p: str(name) for p, name in optimizer._parameter_names.items()}
    parameters = {name: p for p, name in names.items()}
    ordered = [name for name in map(str, order) if name in parameters]
    ordered = list(dict.fromkeys([*ordered, *sorted(parameters, key=str.encode)]))
    tensor_scales = None
    if isinstance(scale, str):
        if scale != "lr":
            raise InvalidArgumentError(f'{where}: scale must not be a str other than "lr"')
        tensor_scales, scale = _learning_rates(optimizer, names), None
    check_scale(scale, where)
    attachment = Attachment(
        spec,
        [(name, parameters[name]) for name in ordered],
        op=_OPS[optimizer.op],
        process_set=optimizer.process_set,
        scale=scale,
        **extras,
    )
    if tensor_scales is not None:
        registered = attachment.session.names
        attachment.session.tensor_scales = lambda: tensor_scales(registered)
    Driver(optimizer, attachment, names).take_over()
    return optimizer


def _learning_rates(
    optimizer: torch.optim.Optimizer, names: dict[torch.Tensor, str]
) -> Callable[[list[str]], list[float]]:
    """Return what gives, by tensor, the factor of a gradient where memories hold lr * gradient."""

    def scales(registered: list[str]) -> list[float]:
        rates = {}
        for group in optimizer.param_groups:
            rates.update((names[p], float(group["lr"])) for p in group["params"] if p in names)
        # With a rate of zero the session keeps the last factor.
        ordered = (rates.get(name, 1.0) for name in registered)
        return [1.0 / rate if rate != 0.0 else math.inf for rate in ordered]

    return scales


# --- checks --------------------------------------------------------------------------------------


def _is_horovods(compression: Any) -> bool:
    if isinstance(compression, (Compression, numbers.Number)):
        return False
    return callable(getattr(compression, "compress", None)) and callable(
        getattr(compression, "decompress", None)
    )


def _check_op(op: Any, where: str) -> None:
    if op in _OPS:
        return
    name, reason = _REFUSED_OPS.get(op, (repr(op), "it is not known"))
    raise InvalidArgumentError(
        f"{where}: op must be Average or Sum; {name} cannot be served, since {reason}. Use "
        f"hvd.DistributedOptimizer for it"
    )


def _check_sparse_as_dense(sparse_as_dense: Any, where: str) -> None:
    if sparse_as_dense:
        raise InvalidArgumentError(
            f"{where}: sparse_as_dense=True cannot be served: Horovod would hand over copies of "
            f"sparse gradients, which have no memory of their own. Leave it False (Horovod then "
            f"gathers the rows that changed), or make the embedding with sparse=False"
        )


def _check_horovods_optimizer(optimizer: Any, where: str) -> None:
    if hasattr(optimizer, "_starting_models"):
        _check_op(hvd.Adasum, where)
    kind = type(optimizer)
    if kind.__module__ != "horovod.torch.optimizer" or not hasattr(optimizer, "_handles"):
        raise InvalidArgumentError(
            f"{where}: optimizer must come from hvd.DistributedOptimizer; got {kind.__module__}."
            f"{kind.__qualname__}"
        )
    _check_op(optimizer.op, where)
    _check_sparse_as_dense(optimizer.sparse_as_dense, where)
    if hasattr(optimizer, "bitopk"):
        raise InvalidArgumentError(f"{where}: the optimizer has an engine already")
    if optimizer._compression is not hvd.Compression.none:
        raise InvalidArgumentError(
            f"{where}: the optimizer must have been made with hvd.Compression.none; it has "
            f"{optimizer._compression!r}"
        )
    if optimizer._handles:
        raise InvalidArgumentError(
            f"{where}: gradients are under way; call it between two steps, not after backward()"
        )
