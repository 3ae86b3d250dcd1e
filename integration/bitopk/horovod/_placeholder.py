# SPDX-License-Identifier: Apache-2.0
"""`compression`: an object for ``compression=`` of the unmodified ``hvd.DistributedOptimizer``.

Horovod calls ``compress(gradient)`` when a gradient is ready and reduces what it returns: here a
placeholder of two numbers, while the gradient itself goes through the engine. After the reduction
Horovod calls ``decompress``, which waits for the engine and returns the gradient. What became of
the placeholder tells the operation, which Horovod says nowhere else, and whether all ranks took
part.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch.optimizer import _DistributedOptimizer

from bitopk.compression import Compression
from bitopk.errors import InvalidArgumentError
from bitopk.horovod._attachment import Attachment, check_scale
from bitopk.horovod._host import JOIN_REASON, participation
from bitopk.schedules import Schedule
from bitopk.torch._session import Session, as_compression

__all__ = ["GradientCompressor", "compression"]

_WHERE = "bitopk.horovod.compression"
_OPTIMIZER_FILE = _DistributedOptimizer._allreduce_grad_async.__code__.co_filename
_TOLERANCE = 1e-5  # N * (1/N) is not 1 in float32 for some N, nor is f * (1/f)


def compression(
    spec_or_density: Any,
    named_parameters: Iterable[tuple[str, torch.Tensor]],
    *,
    process_set: Any = None,
    scale: float | Callable[[], float] | None = None,
    schedule: Schedule | None = None,
    timeout: float | None = None,
    interface: str | None = None,
) -> GradientCompressor:
    """Return a compressor for ``hvd.DistributedOptimizer(..., compression=...)``.

    Parameters
    ----------
    spec_or_density : bitopk.Compression or float
        What to compress, and how.
    named_parameters : iterable of (str, Tensor)
        Those of the optimizer, usually ``model.named_parameters()``; the same on all ranks. Their
        order is the order of registration.
    process_set : horovod.torch.ProcessSet, optional
        That of the optimizer.
    scale : None, float or callable
        Factor by which gradients are multiplied relative to the memories' own unit, e.g.
        ``scaler.get_scale`` or ``lambda: 1 / optimizer.param_groups[0]["lr"]``.
    schedule, timeout, interface
        See `bitopk.horovod.DistributedOptimizer`.

    Returns
    -------
    GradientCompressor
        For one optimizer. ``op`` may be Average or Sum; the others, ``hvd.join()`` and
        ``sparse_as_dense`` are refused when they are used. With one rank Horovod does not call it.
        An error that is caught (``nonfinite="raise"``) leaves Horovod's optimizer within its step;
        `bitopk.horovod.DistributedOptimizer` recovers from that.

    Raises
    ------
    InvalidArgumentError
        If an argument is not as described.
    """
    check_scale(scale, _WHERE)
    return GradientCompressor(
        as_compression(spec_or_density, _WHERE),
        list(named_parameters),
        {
            "process_set": process_set,
            "scale": scale,
            "schedule": schedule,
            "timeout": timeout,
            "interface": interface,
        },
    )


class GradientCompressor:
    """See `compression`. A copy, pickled or not, starts with an engine of its own.

    Attributes
    ----------
    bitopk : Attachment
        The memories: `state_dict`, `load_state_dict`, `set_density`, `stats`, ...
    """

    def __init__(
        self,
        spec: Compression,
        named_parameters: list[tuple[str, torch.Tensor]],
        options: dict[str, Any],
    ) -> None:
        self._spec = spec
        self._options = options
        self._parameters: dict[str, torch.Tensor] = {}
        for name, p in named_parameters:
            if name in self._parameters:
                raise InvalidArgumentError(f"{_WHERE}: two parameters are called {name!r}")
            self._parameters[name] = p
        self._make_engine()

    def _make_engine(self) -> None:
        process_set = self._options["process_set"]
        self._names: dict[int, str] = {}  # id of a gradient -> name; to be verified
        self._usual: set[str] | None = None  # what the first step held
        self._step: set[str] = set()
        self.bitopk = Attachment(
            self._spec,
            self._parameters.items(),
            op="average",
            **{**self._options, "process_set": process_set or hvd.global_process_set},
        )

    @property
    def session(self) -> Session:
        """The engine, tensor by tensor."""
        return self.bitopk.session

    def __getstate__(self) -> dict[str, Any]:
        """Leave the engine out: it belongs to this process."""
        return {
            "spec": self._spec,
            "parameters": self._parameters,
            "options": self._options,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make an engine that is not connected."""
        self._spec = state["spec"]
        self._parameters = state["parameters"]
        self._options = state["options"]
        self._make_engine()

    # --- called by Horovod ---------------------------------------------------------------------

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Hand a gradient to the engine; return a placeholder for Horovod to reduce.

        Parameters
        ----------
        tensor : Tensor
            The gradient of one of the parameters; anything else passes through unchanged.

        Returns
        -------
        tensor : Tensor, shape (2,), float32
            On the device of the gradient, as groups demand of Horovod's operands.
        context
            For `decompress`; None if the tensor passed through.

        Raises
        ------
        InvalidArgumentError
            For what Horovod's optimizer should not hand over: see `compression`.
        """
        if isinstance(tensor, torch.nn.Parameter):
            raise InvalidArgumentError(
                f"{_WHERE}: got a parameter, not a gradient, as from op=Adasum, which cannot be "
                f"served: it combines changes of the parameters"
            )
        name = self._name_of(tensor)
        if name is None:
            if sys._getframe(1).f_code.co_filename == _OPTIMIZER_FILE:
                self._refuse_gradient(tensor)
            return tensor, None
        self.bitopk.submit(name, tensor)
        self._step.add(name)
        return participation(self.bitopk.process_set, tensor.device), tensor

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Wait for the engine and return the gradient, which then holds the result.

        Parameters
        ----------
        tensor : Tensor
            The reduced placeholder.
        ctx
            What `compress` returned with it.

        Raises
        ------
        InvalidArgumentError
            If the placeholder shows an operation that cannot be served, or that a rank has joined.
        HorovodInternalError
            If a rank died, or sent what cannot be read.
        """
        if ctx is None:
            return tensor
        # Before waiting for the engine: a rank that has joined will never come.
        factor = self._factor(tensor.tolist())
        if self.session.is_open:
            self._finish(times_n=factor != 1)
        return ctx.mul_(factor) if factor != 1 else ctx

    # --- steps ---------------------------------------------------------------------------------

    def _factor(self, value: list[float]) -> int:
        """Return what to multiply the mean with, for the operation that made `value` of (1, r)."""
        size = self.bitopk.process_set.size()

        def is_reduced_to(*expected: float) -> bool:
            return all(math.isclose(v, e, rel_tol=_TOLERANCE) for v, e in zip(value, expected))

        if is_reduced_to(1.0, 1.0 / size):
            return 1
        if is_reduced_to(size, 1.0):
            return size
        text = (
            f"{_WHERE}: the placeholders [1, 1 on rank 0, else 0] of {size} ranks were reduced to "
            f"{value}. {self._explain(value)} (rank {self.bitopk.process_set.rank()} of {size})"
        )
        self._step.clear()
        self.session.abandon(text)
        raise InvalidArgumentError(text)

    def _explain(self, value: list[float]) -> str:
        reasons = []
        if value == [1.0, 0.0]:
            reasons.append("op=Min or op=Product was used; only Average and Sum can be served")
        if value == [1.0, 1.0]:
            reasons.append("op=Max was used; only Average and Sum can be served")
        reasons.append(JOIN_REASON)
        return "Either " + ", or ".join(reasons) if len(reasons) > 1 else f"So {reasons[0]}"

    def _finish(self, times_n: bool) -> None:
        step, self._step = self._step, set()
        self.bitopk.finish()
        self.session.engine.times_n = times_n
        if self._usual is None:
            self._usual = step
        elif self._usual.isdisjoint(step):
            raise InvalidArgumentError(
                f"{_WHERE}: a step held {min(step)!r} and none of the gradients of the first step "
                f"({min(self._usual)!r}, ...). The object serves one optimizer, which hands over "
                f"all gradients before it waits for one; another optimizer needs an object of its "
                f"own, and other uses bitopk.init"
            )

    def _name_of(self, tensor: torch.Tensor) -> str | None:
        name = self._names.get(id(tensor))
        if name is not None and self._parameters[name].grad is tensor:
            return name
        self._names = {
            id(p.grad): name for name, p in self._parameters.items() if p.grad is not None
        }
        return self._names.get(id(tensor))

    def _refuse_gradient(self, tensor: torch.Tensor) -> None:
        """Raise the reason why Horovod's optimizer has a gradient that is none of ours."""
        for name, p in self._parameters.items():
            if p.grad is not None and p.grad.is_sparse and p.grad.shape == tensor.shape:
                raise InvalidArgumentError(
                    f"{_WHERE}: got a dense copy of the sparse gradient of {name!r}: "
                    f"sparse_as_dense=True cannot be served. Leave it False (Horovod then gathers "
                    f"the rows that changed), or make the embedding with sparse=False"
                )
        raise InvalidArgumentError(
            f"{_WHERE}: got a gradient of shape {list(tensor.shape)} of a parameter that is not in "
            f"named_parameters; give it those of this optimizer, in this process"
        )
