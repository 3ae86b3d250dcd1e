# SPDX-License-Identifier: Apache-2.0
"""Communication hook for ``torch.nn.parallel.DistributedDataParallel``.

Used as the hooks of torch.distributed.algorithms.ddp_comm_hooks are::

    model = DistributedDataParallel(model)
    state = bitopk.ddp.TopKState(0.01, model.named_parameters())
    model.register_comm_hook(state, bitopk.ddp.topk_hook)
"""

# ruff: noqa: E402 (a sentence about PyTorch must come before its import fails)
#
# No `from __future__ import annotations` here: torch compares the annotations of a hook, not their
# text.

import itertools
import logging
import threading
from collections.abc import Iterable, Iterator
from typing import Any, Callable, Optional, Union

import numpy as np

from bitopk._frameworks import require

require("torch", "PyTorch", "bitopk.ddp")

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from bitopk import _core, checkpoint
from bitopk.errors import Error, InvalidArgumentError, NonFiniteGradientError
from bitopk.schedules import Schedule
from bitopk.stats import Stats
from bitopk.torch._connect import check_transport, connect_ranks
from bitopk.torch._session import Session, as_compression
from bitopk.torch._usage import USED, Usage

__all__ = ["TopKState", "topk_hook"]

logger = logging.getLogger("bitopk")

Scale = Optional[Union[float, Callable[[], float]]]
NamedParameters = Iterable[tuple[str, torch.Tensor]]

# How long to wait for the next bucket where torch does not say which is the last and all of them
# come at once; see `TopKState._is_last`.
_NEXT_BUCKET_SECONDS = 10.0


class TopKState:
    """What `topk_hook` keeps between steps: the engine and its memories, by parameter.

    How DDP puts parameters into buckets, anew after the first iteration, has no influence on any
    result. Parameters with sparse gradients are left to torch's own allreduce. A step takes all
    that DDP would have reduced: after backward passes under ``no_sync()`` their sum; of a model
    with ``find_unused_parameters`` or ``static_graph`` nothing of what no rank used, which stays in
    the memories.

    Connections are made at the end of the first backward pass that is synchronised, which is also
    when the set of tensors is fixed. Not thread-safe, apart from the hook.

    Parameters
    ----------
    spec_or_density : bitopk.Compression or float
        What to compress, and how. Equal on all ranks.
    named_parameters : iterable of (str, Parameter)
        Those of the model, inside or outside of DDP (a "module." before all names is left out);
        their order is the order of registration. Names are those of `rules` and checkpoints.
    process_group : ProcessGroup, optional
        That of the model. The default group by default.
    scale : None, float or callable
        Factor by which gradients are multiplied relative to the memories' own unit, asked in every
        step, e.g. ``scaler.get_scale`` of a GradScaler or ``lambda: 1 / group["lr"]``.
    schedule : callable, optional
        Density as a function of the step; see `bitopk.schedules`.
    timeout : float, optional
        Seconds that a wait for a rank may last; half an hour, as torch.distributed has it, by
        default. A rank that dies is noticed at once.
    interface : str, optional
        Network interface; see `bitopk.hosts.connect_through`.
    transport : {"gloo", "torch"}
        Connections of our own, for which `process_group` only carries the addresses, or the
        collectives of torch.distributed; see `bitopk.torch.lent`.

    Raises
    ------
    InvalidArgumentError
        If an argument is not as described.

    Notes
    -----
    Checkpoints: `state_dict` holds this rank's part of both memories, in tensors and primitives
    only; every rank saves its own, or `bitopk.checkpoint.gather` collects them.

    Pickling works as with torch's PowerSGDState: the process group is left out, with a warning, and
    the default group takes its place. The memories of this rank are kept; the parameters are not,
    nor is a `scale` or `schedule` that is a callable: call `bind` before the state is used again.
    """

    def __init__(
        self,
        spec_or_density: Any,
        named_parameters: NamedParameters,
        *,
        process_group: Any = None,
        scale: Scale = None,
        schedule: Optional[Schedule] = None,
        timeout: Optional[float] = None,
        interface: Optional[str] = None,
        transport: str = "gloo",
    ) -> None:
        check_transport(transport, "TopKState")
        self.spec = as_compression(spec_or_density, "TopKState")
        self.process_group = process_group
        self._options = {"transport": transport, "timeout": timeout, "interface": interface}
        self._scale = scale
        self._schedule = schedule
        self._state_to_load: Any = None
        self._start()
        self._take_parameters(named_parameters)

    def _start(self) -> None:
        self._session: Optional[Session] = None
        self._parameters: dict[str, torch.Tensor] = {}
        self._names: dict[int, str] = {}  # by id of the parameter
        self._sparse: set[str] = set()  # names of those that are not ours
        self._usage = Usage({})
        self._error: Optional[Exception] = None  # after which there are no more steps
        self._lock = threading.RLock()
        self._timer: Optional[threading.Timer] = None
        self._forget_step()

    def _forget_step(self) -> None:
        self._num_buckets = 0
        self._all_at_once = False
        self._seen: set[str] = set()
        self._views: dict[str, torch.Tensor] = {}
        self._left_alone: dict[str, torch.Tensor] = {}
        self._pending: list[tuple[torch.futures.Future, torch.Tensor]] = []

    def _take_parameters(self, named_parameters: NamedParameters) -> None:
        named = list(named_parameters)
        prefix = "module." if all(name.startswith("module.") for name, _ in named) else ""
        for name, p in named:
            name = name[len(prefix) :]
            if name in self._parameters:
                raise InvalidArgumentError(f"TopKState: two parameters are called {name!r}")
            self._parameters[name] = p
            self._names.setdefault(id(p), name)
        self._usage = Usage(self._parameters)

    def bind(
        self,
        named_parameters: NamedParameters,
        *,
        scale: Scale = None,
        schedule: Optional[Schedule] = None,
    ) -> None:
        """Give a state that was unpickled the parameters of this process's model.

        Parameters
        ----------
        named_parameters
            As of the constructor; the names must be those of the state that was pickled.
        scale, schedule
            As of the constructor, if they were callables. Numbers were pickled.
        """
        if self._parameters:
            raise InvalidArgumentError("TopKState.bind: the state has its parameters already")
        self._scale = self._scale if scale is None else scale
        self._schedule = self._schedule if schedule is None else schedule
        self._take_parameters(named_parameters)

    # --- steps ---------------------------------------------------------------------------------

    def _reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Take one bucket; with the last one, end the step."""
        with self._lock:
            self._stop_timer()
            try:
                if self._error is not None:
                    raise self._error
                if bucket.buffer().is_sparse:
                    future = self._reduce_sparse(bucket)
                else:
                    future = self._submit(bucket)
                if self._is_last(bucket):
                    self._end_step()
            except Exception as error:
                future = _completed(bucket.buffer())
                self._fail(error)
            return future

    def _reduce_sparse(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        self._sparse.update(self._names.get(id(p), "") for p in bucket.parameters())
        self._seen.update(self._name_of(p) for p in bucket.parameters())
        return default_hooks.allreduce_hook(self.process_group, bucket)

    def _submit(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        for p, view in _gradients(bucket):
            name = self._name_of(p)
            # A gradient that is older than this step, which DDP leaves alone if no rank has a newer
            # one.
            if name not in self._usage and bool(view.any()):
                self._left_alone[name] = view.clone()
            # The first step is submitted at its end, when it is known what DDP reduces.
            if self._session is not None:
                self._session.submit(name, view)
            self._views[name] = view
        self._seen.update(self._views)
        future = _new_future(buffer)
        self._pending.append((future, buffer))
        return future

    def _name_of(self, p: torch.Tensor) -> str:
        name = self._names.get(id(p))
        if name is not None and self._parameters[name] is p:
            if self._session is None or name in self._session or name in self._sparse:
                return name
            raise InvalidArgumentError(f"bitopk.ddp: {name!r} was in no bucket of the first step")
        if not self._parameters:
            raise InvalidArgumentError(
                "bitopk.ddp: the state has no parameters, since it was unpickled (or closed); call "
                "state.bind(model.named_parameters()) before the first step"
            )
        raise InvalidArgumentError(
            f"bitopk.ddp: a bucket has a parameter of shape {list(p.shape)} that is not among the "
            f"{len(self._parameters)} of named_parameters; give TopKState those of the model that "
            f"it is registered with"
        )

    def _is_last(self, bucket: dist.GradBucket) -> bool:
        self._num_buckets += 1
        if bucket.is_last():
            return True
        # In the first iteration of a static graph DDP hands over all buckets at the end, calls
        # each of them number 0 and none of them the last.
        if self._num_buckets > 1 and bucket.index() == 0:
            self._all_at_once = True
        if not self._all_at_once:
            return False
        missing = self._missing()
        if missing:
            self._start_timer(missing)
        return not missing

    def _missing(self) -> list[str]:
        return [
            name
            for name, p in self._parameters.items()
            if name not in self._seen and p.requires_grad
        ]

    def _end_step(self) -> None:
        if self._views:
            names = self._connected_names()
            session = self._session
            mean_used = self._usage.vector(names)
            session.submit(USED, mean_used)
            session.finish()
            self._keep_unused(session, self._usage.unused(names, mean_used))
        self._usage.clear()
        self._complete()

    def _connected_names(self) -> list[str]:
        """Return the names in registration order; in the first step, connect and submit."""
        if self._session is None:
            names = [name for name in self._parameters if name in self._views]
            self._session = self._make_session(names)
            for name in names:
                self._session.submit(name, self._views[name])
        return [name for name in self._session.names if name != USED]

    def _make_session(self, names: list[str]) -> Session:
        # The engine sends what was registered first last, as backward passes have it.
        tensors = [(USED, (len(names),), torch.float64)]
        tensors += [(n, tuple(self._views[n].shape), self._views[n].dtype) for n in names]
        session = Session(
            self.spec, tensors, self._connect, scale=self._scale, schedule=self._schedule
        )
        if self._state_to_load is not None:
            _check_names(self._state_to_load, names)
            session.load_state_dict(self._state_to_load)
        session.connect()
        self._state_to_load = None
        return session

    def _connect(self, config: _core.Config) -> tuple[_core.Engine, str]:
        return connect_ranks(config, self.process_group, **self._options)

    def _keep_unused(self, session: Session, unused: list[str]) -> None:
        """Take back what DDP will not use: no rank has a gradient of these parameters."""
        for name in unused:
            view = self._views[name]
            before = self._left_alone.get(name)
            if not session.was_dropped:
                session.give_back(name, view if before is None else view.float() - before.float())
            view.zero_() if before is None else view.copy_(before)

    def _complete(self) -> None:
        pending = self._pending
        self._forget_step()
        for future, buffer in pending:
            future.set_result(buffer)

    # --- errors --------------------------------------------------------------------------------

    def _fail(self, error: Exception) -> None:
        """Drop the step and raise `error` from the backward pass.

        Raised from here, torch 1 would make a RuntimeError of it, and DDP would refuse the next
        iteration. So DDP gets its buckets back, zeroed, and autograd raises the error at the end of
        the pass: before DDP waits for peers that may be gone, or behind that if training can go on.
        """
        goes_on = isinstance(error, NonFiniteGradientError)
        all_at_once = self._all_at_once
        if not goes_on:
            self._error = error
            if self._session is not None:
                self._session.abandon(f"{type(error).__name__}: {error}")
        for _, buffer in self._pending:
            buffer.zero_()
        self._usage.clear()
        self._complete()

        def raise_error() -> None:
            raise error

        if all_at_once and not goes_on:
            raise error  # DDP is in such a callback itself, and goes on as soon as this returns
        if not _at_end_of_backward(
            (lambda: _at_end_of_backward(raise_error)) if goes_on else raise_error
        ):
            raise error  # the shadow of a backward pass on a rank that has joined

    def _start_timer(self, missing: list[str]) -> None:
        def give_up() -> None:
            with self._lock:
                if not self._pending or self._timer is not timer:
                    return
                self._error = InvalidArgumentError(
                    f"bitopk.ddp: DDP with static_graph=True has no gradient for "
                    f"{', '.join(map(repr, missing[:8]))}{', ...' if len(missing) > 8 else ''} "
                    f"({len(missing)} of {len(self._parameters)} parameters); give TopKState only "
                    f"parameters that DDP reduces"
                )
                for _, buffer in self._pending:
                    buffer.zero_()
                self._complete()

        def raise_error() -> None:
            if self._error is not None:
                raise self._error

        if self._num_buckets == 2:
            _at_end_of_backward(raise_error)
        # Not a daemon: the exit of the interpreter must not find it inside of a future.
        timer = self._timer = threading.Timer(_NEXT_BUCKET_SECONDS, give_up)
        timer.start()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # --- memories ------------------------------------------------------------------------------

    @property
    def _connected(self) -> Session:
        if self._session is None:
            raise Error("bitopk.ddp: there was no step yet, so there are no memories")
        return self._session

    @property
    def scale(self) -> Scale:
        """Factor of the gradients; may be set between steps."""
        return self._scale

    @scale.setter
    def scale(self, scale: Scale) -> None:
        self._scale = scale
        if self._session is not None:
            self._session.scale = scale

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the state; see `bitopk.checkpoint`.

        Raises
        ------
        Error
            Before the first step.
        """
        return self._connected.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Go on from a saved part or whole state; all ranks must do so.

        Before the first step it is kept and loaded then.

        Raises
        ------
        InvalidArgumentError
            If the state is of another model or damaged.
        """
        if self._session is None:
            checkpoint.check(state)
            self._state_to_load = state
        else:
            self._session.load_state_dict(state)

    def all_to_all(self, parts: list[bytes]) -> list[bytes]:
        """Send ``parts[r]`` to rank r and return what each rank sent here. A collective call."""
        return self._connected.all_to_all(parts)

    def commit(self) -> None:
        """Make the last step final. The next step does so too."""
        self._connected.commit()

    def rollback(self) -> None:
        """Drop the last step from the memories, unless it is final. All ranks must do the same."""
        self._connected.rollback()

    def set_density(self, density: float, density_down: Optional[float] = None) -> None:
        """Use other densities from the next step on, on all ranks; ends a schedule."""
        if self._session is not None:
            self._session.set_density(density, density_down)
            self._schedule = self._session.schedule
        else:
            self._schedule = lambda step: (
                density,
                density if density_down is None else density_down,
            )

    def worker_memory(self) -> dict[str, np.ndarray]:
        """Return a copy of this rank's worker memory by name."""
        return self._connected.worker_memory()

    def server_memory(self) -> dict[str, np.ndarray]:
        """Return a copy of the whole server memory by name. A collective call."""
        return self._connected.server_memory()

    def stats(self) -> Stats:
        """Return what this rank did since the first step."""
        return self._connected.stats()

    def compression_stats(self) -> tuple[float, int, int]:
        """Return the rate of compression and what it is the quotient of, as PowerSGDState does.

        Returns
        -------
        rate : float
            ``before / after``; 0 if nothing was sent.
        before : int
            Bytes that a ring allreduce would have sent from this rank. (PowerSGDState counts
            elements; entries of topK have indices too, so bytes say more.)
        after : int
            Bytes that this rank sent.
        """
        if self._session is None:
            return 0.0, 0, 0
        stats = self._session.stats()
        rate = stats.dense_bytes / stats.bytes_sent if stats.bytes_sent else 0.0
        return rate, stats.dense_bytes, stats.bytes_sent

    def close(self) -> None:
        """Disconnect and let the parameters go."""
        self._usage.close()
        if self._session is not None:
            self._session.disconnect()
        self._start()

    # --- pickling ------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process: see the notes of the class."""
        logger.warning(
            "bitopk.ddp: a process group is not serializable and left out of a saved state; so are "
            "a scale and a schedule that are callables"
        )
        state = self._state_to_load if self._session is None else self._session.state_dict()
        return {
            "spec": self.spec,
            "options": self._options,
            "scale": None if callable(self._scale) else self._scale,
            "state": state,
        }

    def __setstate__(self, saved: dict[str, Any]) -> None:
        """Restore all but the parameters; see `bind`."""
        logger.warning(
            "bitopk.ddp: the process group of a loaded state is the default group; set "
            "state.process_group for another one, and call state.bind(model.named_parameters())"
        )
        self.spec = saved["spec"]
        self.process_group = None
        self._options = saved["options"]
        self._scale = saved["scale"]
        self._schedule = None
        self._state_to_load = saved["state"]
        self._start()


def topk_hook(state: TopKState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Reduce a bucket of gradients to their mean over ranks, compressed both ways.

    Parameters
    ----------
    state : TopKState
        Of this model; equally made on all ranks.
    bucket : GradBucket
        From DDP's reducer.

    Returns
    -------
    Future of Tensor
        The bucket's own buffer with the results. It completes with the last bucket of the pass.

    Raises
    ------
    InvalidArgumentError, CommunicationError, NonFiniteGradientError, ...
        From the backward pass, once it has called all hooks. Training can go on after a
        NonFiniteGradientError (``nonfinite="raise"``), with gradients of zero in that step.
    """
    if not isinstance(bucket, dist.GradBucket):
        raise InvalidArgumentError(
            f"bitopk.ddp.topk_hook: got a {type(bucket).__name__}, not a GradBucket of DDP's C++ "
            f"reducer; with torch.compile leave torch._dynamo.config.optimize_ddp at its default "
            f"instead of 'python_reducer', and with FSDP use bitopk.torch.Reducer"
        )
    return state._reduce(bucket)


def _gradients(bucket: dist.GradBucket) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Give each parameter of a bucket with the part of the buffer that holds its gradient."""
    for p, view in zip(bucket.parameters(), bucket.gradients()):
        # The buffer has a gradient in the memory format of the parameter, which gradients() does
        # not know of. The strides of an empty copy are those that DDP uses.
        strides = p.stride() if p.is_contiguous() else torch.empty_like(p, device="meta").stride()
        yield p, view if view.stride() == strides else view.as_strided(p.shape, strides)


def _check_names(state: dict[str, Any], names: list[str]) -> None:
    """Refuse a state of other parameters by name."""
    part = state["parts"][0] if "parts" in state else state
    saved = [name for name in checkpoint.tensor_sizes(part["tensors"]) if name != USED]
    if saved == names:
        return
    here, there = next(pair for pair in itertools.zip_longest(names, saved) if pair[0] != pair[1])
    raise InvalidArgumentError(
        f"bitopk.ddp: the state that was loaded is of {len(saved)} parameters, DDP reduces "
        f"{len(names)}; the first that differ are {there!r} in the state and {here!r} here"
    )


def _new_future(buffer: torch.Tensor) -> torch.futures.Future:
    return torch.futures.Future(devices=[] if buffer.device.type == "cpu" else [buffer.device])


def _completed(buffer: torch.Tensor) -> torch.futures.Future:
    future = _new_future(buffer)
    future.set_result(buffer)
    return future


def _at_end_of_backward(callback: Callable[[], Any]) -> bool:
    """Have autograd call something when the pass under way is done; False if there is none."""
    try:
        torch.autograd.Variable._execution_engine.queue_callback(callback)
    except RuntimeError:
        return False
    return True
