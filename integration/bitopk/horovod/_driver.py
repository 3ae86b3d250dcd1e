# SPDX-License-Identifier: Apache-2.0
"""`Driver`: the engine in place of allreduce, on one optimizer that Horovod has wrapped.

Horovod's optimizer stays in charge of hooks, backward passes, gradient clipping and `step`; on the
instance, the one method that starts the reduction of a gradient is replaced. It returns a callable,
which Horovod takes for a handle. Every rank hands over all its gradients before it waits for any of
them, so the engine, which launches in one order on all ranks, cannot be blocked.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.torch.mpi_ops import allreduce_async_, poll, synchronize

from bitopk.errors import Error, InvalidArgumentError
from bitopk.horovod._attachment import Attachment
from bitopk.horovod._host import JOIN_REASON, participation

__all__ = ["Driver"]

_SHORTEST_PAUSE_SECONDS = 50e-6
_LONGEST_PAUSE_SECONDS = 1e-3


class Driver:
    """Carries the gradients of one optimizer through its engine, in Horovod's own sequence."""

    def __init__(
        self, optimizer: Any, attachment: Attachment, names: dict[torch.Tensor, str]
    ) -> None:
        self._optimizer = optimizer
        self._attachment = attachment
        self._names = names
        self._sparse_dims: dict[torch.Tensor, int] = {}  # of parameters that had sparse gradients
        self._token: int | None = None  # Horovod's handle, while it is under way
        self._lock = threading.RLock()  # hooks of several devices run in several threads

    def take_over(self) -> None:
        """Replace on the instance what Horovod looks up there."""
        optimizer = self._optimizer
        optimizer.bitopk = self._attachment
        optimizer._allreduce_grad_async = self.submit
        optimizer.zero_grad = self.zero_grad
        optimizer.load_state_dict = self.load_state_dict
        # Groups only say what Horovod fuses; without them its hooks hand over each gradient alone.
        optimizer._groups = None

    # --- called by Horovod ---------------------------------------------------------------------

    def submit(self, p: torch.Tensor) -> tuple[Any, None]:
        """Hand over the gradient of `p`; returns a handle and no context."""
        if p.grad is None:
            # Another rank may have a gradient for it.
            p.grad = self._zeros(p)
        if p.grad.is_sparse:
            self._sparse_dims[p] = p.grad.sparse_dim()
            return type(self._optimizer)._allreduce_grad_async(self._optimizer, p)
        with self._lock:
            try:
                if not self._attachment.session.is_open:
                    self._begin_step()
                self._attachment.submit(self._names[p], p.grad)
            except Exception:
                self._forget_step()
                raise
        return functools.partial(self._result, p), None

    def _zeros(self, p: torch.Tensor) -> torch.Tensor:
        dims = self._sparse_dims.get(p)
        if dims is None:
            return torch.zeros_like(p, requires_grad=False)
        # The other ranks gather rows, so this one must too, though it has none.
        indices = torch.empty((dims, 0), dtype=torch.int64, device=p.device)
        values = torch.empty((0, *p.shape[dims:]), dtype=p.dtype, device=p.device)
        return torch.sparse_coo_tensor(indices, values, p.shape)

    def _result(self, p: torch.Tensor) -> torch.Tensor:
        with self._lock:
            try:
                self._check_token()
                self._attachment.finish()
            except Exception:
                self._forget_step()
                raise
        return p.grad

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Set gradients to zero or None, with the arguments of the optimizer inside."""
        if self._optimizer._handles:
            type(self._optimizer).zero_grad(self._optimizer)  # raises Horovod's AssertionError
        super(type(self._optimizer), self._optimizer).zero_grad(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load the optimizer's state; a step under way is waited for and its results are lost."""
        # The next step meets an error again if it is lasting.
        with self._lock, contextlib.suppress(Error):
            self._attachment.session.finish()
        type(self._optimizer).load_state_dict(self._optimizer, *args, **kwargs)

    # --- the token -----------------------------------------------------------------------------
    # One small allreduce per step. It tells who takes part before anybody waits for the engine, and
    # shows the step to Horovod's stall inspector and failure detection.

    def _begin_step(self) -> None:
        if self._token is not None:
            # Of a step that was given up, and under way until all ranks have begun that step.
            with contextlib.suppress(HorovodInternalError):
                self._wait_for(self._token)
        process_set = self._attachment.process_set
        token = participation(process_set, torch.device("cpu"))
        name = f"bitopk.step.{self._attachment.label}"
        self._token = allreduce_async_(token, op=hvd.Sum, name=name, process_set=process_set)
        if not self._attachment.session.connected:
            self._check_token()  # connecting would wait for a rank that has joined

    def _check_token(self) -> None:
        if self._token is None:
            return
        token, self._token = self._token, None
        session = self._attachment.session
        try:
            value = self._wait_for(token).tolist()
        except Exception as error:
            session.abandon(f"Horovod reported: {error}")
            raise
        size = self._attachment.process_set.size()
        if value != [size, 1.0]:
            text = (
                f"bitopk.horovod: {JOIN_REASON} ({value[0]:.0f} of {size} ranks are left; this is "
                f"rank {self._attachment.process_set.rank()})"
            )
            session.abandon(text)
            raise InvalidArgumentError(text)

    def _wait_for(self, token: int) -> torch.Tensor:
        """Return the reduced token.

        Horovod's own wait spins, and takes the processor from the engine's thread.
        """
        pause = _SHORTEST_PAUSE_SECONDS
        engine = self._attachment.session.engine if self._attachment.session.connected else None
        report_after = 0.0 if engine is None else engine.report_wait_after
        while not poll(token):
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            if engine is not None:
                # The engine is ahead and knows whose gradients are missing; Horovod seldom says.
                report_after = engine.report_wait(report_after)
        return synchronize(token)

    def _forget_step(self) -> None:
        """Leave the optimizer as between two steps, for whoever catches the error and goes on."""
        if self._attachment.session.is_open:  # an error of this rank alone; the others wait for it
            self._attachment.session.abandon("a rank gave up the step after an error of its own")
        self._optimizer._handles.clear()
        for p in self._optimizer._allreduce_delay:
            self._optimizer._allreduce_delay[p] = self._optimizer.backward_passes_per_step
