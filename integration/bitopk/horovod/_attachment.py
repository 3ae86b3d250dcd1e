# SPDX-License-Identifier: Apache-2.0
"""`Attachment`: the engine behind one Horovod optimizer, with its memories."""

from __future__ import annotations

import hashlib
import math
import numbers
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from bitopk import _core
from bitopk.compression import Compression
from bitopk.errors import Error, InvalidArgumentError
from bitopk.horovod._errors import as_horovod_errors
from bitopk.horovod._host import default_timeout, describe, make_host, report_wait_after
from bitopk.hosts import connect_through
from bitopk.schedules import Schedule
from bitopk.stats import Stats
from bitopk.torch._session import Scale, Session

__all__ = ["Attachment", "check_scale"]


def check_scale(scale: Any, where: str) -> None:
    """Raise InvalidArgumentError unless `scale` is None, a positive number or a callable."""
    if scale is None or callable(scale):
        return
    is_number = isinstance(scale, numbers.Real) and not isinstance(scale, bool)
    if not is_number or not math.isfinite(scale) or scale <= 0:
        raise InvalidArgumentError(
            f"{where}: scale must be None, a positive number or a callable; got {scale!r}"
        )


class Attachment:
    """The engine of one optimizer: its steps, its memories and what it did.

    Connections are made in the first step. Users reach it as ``optimizer.bitopk``, or
    ``compression.bitopk`` for `bitopk.horovod.compression`. Not thread-safe.

    Attributes
    ----------
    session : bitopk.torch._session.Session
        The engine, tensor by tensor.
    process_set : horovod.torch.ProcessSet
        The ranks that take part.
    label : str
        Hash of the names, to tell the operations of several optimizers apart.
    """

    def __init__(
        self,
        spec: Compression,
        named_parameters: Iterable[tuple[str, torch.Tensor]],
        *,
        op: str,
        process_set: Any,
        scale: Scale = None,
        tensor_scales: Callable[[], Sequence[float]] | None = None,
        schedule: Schedule | None = None,
        timeout: float | None = None,
        interface: str | None = None,
    ) -> None:
        # A type that the engine does not know is refused by the session, by name, where there can
        # be gradients; counters and the like have none.
        tensors = [
            (name, tuple(p.shape), p.dtype)
            for name, p in named_parameters
            if p.is_floating_point() or p.requires_grad
        ]
        names = "\n".join(name for name, _, _ in tensors)
        self.label = hashlib.sha256(names.encode()).hexdigest()[:12]
        self.process_set = process_set
        self._timeout = timeout
        self._interface = interface
        self.session = Session(
            spec,
            tensors,
            self._connect,
            op=op,
            scale=scale,
            tensor_scales=tensor_scales,
            schedule=schedule,
            report_wait_after=report_wait_after(),
        )

    def _connect(self, config: _core.Config) -> tuple[_core.Engine, str]:
        if os.environ.get("HOROVOD_ELASTIC") == "1" and self.session.on_connect is None:
            raise InvalidArgumentError(
                "bitopk.horovod: in an elastic job the memories must be told when the workers "
                "change: use bitopk.horovod.elastic.TorchState in place of hvd.elastic.TorchState"
            )
        host = make_host(self.process_set, f"bitopk.connect.{self.label}")
        timeout = default_timeout() if self._timeout is None else self._timeout
        return connect_through(host, config, timeout, self._interface)

    # --- steps ---------------------------------------------------------------------------------

    def submit(self, name: str, gradient: torch.Tensor) -> None:
        """Hand over a gradient; the first one begins the step, and connects at the first step."""
        with as_horovod_errors():
            self.session.submit(name, gradient)

    def finish(self) -> None:
        """End the step and wait for it; the results are then in the gradients."""
        with as_horovod_errors():
            self.session.finish()

    # --- memories ------------------------------------------------------------------------------

    def connect(self) -> None:
        """Connect now rather than in the first step. A collective call."""
        self._check_member("connect")
        with as_horovod_errors():
            self.session.connect()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the state; see `bitopk.checkpoint`.

        Raises
        ------
        Error
            Before the first step (or `connect`), when there is nothing to save.
        """
        self._check_member("state_dict")
        self._connect_if_alone()
        with as_horovod_errors():
            return self.session.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Go on from a saved part or whole state; all ranks must do so.

        Before the first step it is kept and loaded then.

        Raises
        ------
        InvalidArgumentError
            If the state is of another model or damaged.
        """
        with as_horovod_errors():
            self.session.load_state_dict(state)

    def all_to_all(self, parts: Sequence[bytes]) -> list[bytes]:
        """Send ``parts[r]`` to rank r and return what each rank sent here. A collective call."""
        self._connect_if_alone()
        with as_horovod_errors():
            return self.session.all_to_all(parts)

    def commit(self) -> None:
        """Make the last step final. The next step does so too."""
        with as_horovod_errors():
            self.session.commit()

    def rollback(self) -> None:
        """Drop the last step from the memories, unless it is final. All ranks must do the same."""
        with as_horovod_errors():
            self.session.rollback()

    def set_density(self, density: float, density_down: float | None = None) -> None:
        """Use other densities from the next step on, on all ranks; ends a schedule."""
        self.session.set_density(density, density_down)

    def worker_memory(self) -> dict[str, np.ndarray]:
        """Return a copy of this rank's worker memory by name."""
        self._connect_if_alone()
        return self.session.worker_memory()

    def server_memory(self) -> dict[str, np.ndarray]:
        """Return a copy of the whole server memory by name. A collective call."""
        self._connect_if_alone()
        with as_horovod_errors():
            return self.session.server_memory()

    def stats(self) -> Stats:
        """Return what this rank did since it connected."""
        self._connect_if_alone()
        return self.session.stats()

    def _connect_if_alone(self) -> None:
        """With one rank Horovod calls no compressor, but scripts save checkpoints all the same."""
        if not self.session.connected and self.process_set.size() == 1:
            self.connect()

    def _check_member(self, what: str) -> None:
        if not self.process_set.included():
            raise Error(
                f"{what}: rank {hvd.rank()} is not in the {describe(self.process_set)}, so it has "
                f"no part in the state"
            )
