# SPDX-License-Identifier: Apache-2.0
"""`Compression`: what a training job compresses, and how, as one immutable value.

Every entry point of the package takes such a value. All its fields are checked when it is made, so
the engine, the plugins and the command line never see a spec that makes no sense.
"""

from __future__ import annotations

import difflib
import math
import numbers
import operator
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NoReturn, Union

from bitopk import _core
from bitopk.errors import InvalidArgumentError

__all__ = ["Compression"]

METHODS = ("topk", "none", "fp16")
SCOPES = ("tensor", "global")
VALUE_FORMATS = ("float32", "float16", "bfloat16")
EXCHANGES = ("auto", "allgather", "sharded", "dense")
NONFINITE_POLICIES = ("propagate", "skip", "raise")
MAX_SEED = 2**64 - 1

Rule = tuple[str, Union["Compression", str]]


@dataclass(frozen=True, repr=False)
class Compression:
    """A compression method with its settings; make one with `Compression.topk`.

    Instances are frozen, hashable, comparable and picklable. ``Compression.none`` (dense, exact)
    and ``Compression.fp16`` (dense, values rounded to float16 on the wire, no memories) are
    ready-made instances, used like ``horovod.torch.Compression.none``: not called.

    Attributes
    ----------
    density, density_down : float or None
        Fraction of a unit's entries that travel up and down, in (0, 1]. ``density_down`` is already
        resolved: it equals ``density`` unless it was given. None when ``k`` is used.
    k, k_down : int or None
        Entries per unit instead of a fraction; ``k_down`` is resolved likewise.
    scope : {"tensor", "global"}
        Unit of selection: each tensor, or all compressed tensors of one rule together.
    value_format : {"float32", "float16", "bfloat16"}
        How the kept values travel. The rounding error goes into the memories.
    exchange : {"auto", "allgather", "sharded", "dense"}
        How packets reach the other ranks. Apart from "dense" this never changes a result.
    dense_fallback : bool
        Whether "auto" may choose "dense" for a unit that would be slower compressed.
    worker_memory, server_memory : bool
        Whether what a worker, or the server, left out is kept for the next step.
    memory_decay : float
        Factor on the old memories at each step, in [0, 1].
    nonfinite : {"propagate", "skip", "raise"}
        What a step does when any gradient holds NaN or Inf.
    start_step : int
        Steps before this one are dense.
    dense_below : int
        Tensors with fewer entries travel dense, outside the units.
    seed : int
        Key of the counter-based generator of stochastic codecs, 0 to 2**64 - 1.
    rules : tuple of (str, Compression or "dense")
        Settings for the tensors whose name matches a pattern of `fnmatch`; the first match wins.
    method : {"topk", "none", "fp16"}
        Which method this is.
    """

    density: float | None = None
    density_down: float | None = None
    k: int | None = None
    k_down: int | None = None
    scope: str = "tensor"
    value_format: str = "float32"
    exchange: str = "auto"
    dense_fallback: bool = False
    worker_memory: bool = True
    server_memory: bool = True
    memory_decay: float = 1.0
    nonfinite: str = "propagate"
    start_step: int = 0
    dense_below: int = 1024
    seed: int = 0
    rules: tuple[Rule, ...] = ()
    method: str = "topk"

    none: ClassVar[Compression]
    fp16: ClassVar[Compression]

    @classmethod
    def topk(
        cls,
        density: float | None = None,
        density_down: float | None = None,
        *,
        k: int | None = None,
        k_down: int | None = None,
        scope: str = "tensor",
        value_format: str = "float32",
        exchange: str = "auto",
        dense_fallback: bool = False,
        worker_memory: bool = True,
        server_memory: bool = True,
        memory_decay: float = 1.0,
        nonfinite: str = "propagate",
        start_step: int = 0,
        dense_below: int = 1024,
        seed: int = 0,
        rules: Iterable[Rule] = (),
        **unknown: Any,
    ) -> Compression:
        """Bidirectional topK with a memory on either side.

        Parameters
        ----------
        density : float, optional
            Fraction of a unit's entries that a worker sends, in (0, 1]. Exactly one of `density`
            and `k` must be given.
        density_down : float, optional
            Fraction that the server sends back; the same as `density` by default. 1.0 makes the
            method unidirectional.
        k, k_down : int, optional
            Entries per unit instead of a fraction.
        scope, value_format, exchange, dense_fallback, worker_memory, server_memory, memory_decay, \
nonfinite, start_step, dense_below, seed, rules
            See the attributes of the class.
        **unknown
            Refused; catches misspelt options.

        Returns
        -------
        Compression
            The checked, immutable spec.

        Raises
        ------
        InvalidArgumentError
            If an option has a value that makes no sense. It is also a ValueError.
        TypeError
            If an option does not exist; the message suggests the nearest name.

        References
        ----------
        .. [1] W. Zou, H. De Sterck, J. Liu, arXiv 2209.15203.

        Examples
        --------
        >>> Compression.topk(0.01)
        Compression.topk(0.01)
        >>> Compression.topk(0.01, rules=[("*.bias", "dense")]).rule_for("fc1.bias")
        'dense'
        """
        if unknown:
            _refuse_unknown(unknown)
        return cls(
            density=density,
            density_down=density_down,
            k=k,
            k_down=k_down,
            scope=scope,
            value_format=value_format,
            exchange=exchange,
            dense_fallback=dense_fallback,
            worker_memory=worker_memory,
            server_memory=server_memory,
            memory_decay=memory_decay,
            nonfinite=nonfinite,
            start_step=start_step,
            dense_below=dense_below,
            seed=seed,
            rules=rules,  # type: ignore[arg-type]
        )

    def __post_init__(self) -> None:
        """Check every field and bring it to its canonical type."""
        _check_choice("method", self.method, METHODS)
        self._check_amount()
        _check_choice("scope", self.scope, SCOPES)
        _check_choice("value_format", self.value_format, VALUE_FORMATS)
        _check_choice("exchange", self.exchange, EXCHANGES)
        _check_choice("nonfinite", self.nonfinite, NONFINITE_POLICIES)
        for name in ("dense_fallback", "worker_memory", "server_memory"):
            self._set(name, _checked_bool(name, getattr(self, name)))
        self._set("memory_decay", _checked_decay(self.memory_decay))
        for name in ("start_step", "dense_below"):
            self._set(name, _checked_int(name, getattr(self, name), 0, 2**63 - 1))
        self._set("seed", _checked_int("seed", self.seed, 0, MAX_SEED))
        self._set("rules", _checked_rules(self.rules, self.nonfinite))

    def rule_index(self, name: str) -> int:
        """Say which rule governs a tensor.

        Parameters
        ----------
        name : str
            Registered name of the tensor.

        Returns
        -------
        int
            Index into `rules` of the first pattern that matches, or -1 if none does and the spec
            itself applies.
        """
        for index, (pattern, _) in enumerate(self.rules):
            if _core.matches_pattern(pattern, name):
                return index
        return -1

    def rule_for(self, name: str) -> Compression | str:
        """Give the settings that govern a tensor.

        Parameters
        ----------
        name : str
            Registered name of the tensor.

        Returns
        -------
        Compression or str
            The spec of the first matching rule or "dense"; this spec itself if none matches.
        """
        index = self.rule_index(name)
        return self if index < 0 else self.rules[index][1]

    def with_density(self, density: float, density_down: float | None = None) -> Compression:
        """Return a copy with other densities; `rules` keep theirs.

        Parameters
        ----------
        density : float
            New uplink density, in (0, 1].
        density_down : float, optional
            New downlink density; the same as `density` by default.

        Returns
        -------
        Compression
            The new spec. It counts by density even if this one counts by `k`.

        Raises
        ------
        InvalidArgumentError
            If a density is not a float in (0, 1], or the method is not topk.
        """
        if self.method != "topk":
            _fail("density", f"must not be set for Compression.{self.method}", density)
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values.update(density=density, density_down=density_down, k=None, k_down=None)
        return Compression(**values)

    def __repr__(self) -> str:
        """Return the shortest expression that makes an equal value."""
        if self == _DENSE_METHODS.get(self.method):
            return f"Compression.{self.method}"
        parts = []
        for field in fields(self):
            value = getattr(self, field.name)
            derived = {"density_down": self.density, "k_down": self.k}
            if value == derived.get(field.name, field.default):
                continue
            by_position = self.method == "topk" and field.name in ("density", "density_down")
            parts.append(repr(value) if by_position else f"{field.name}={value!r}")
        maker = "Compression.topk" if self.method == "topk" else "Compression"
        return f"{maker}({', '.join(parts)})"

    def _check_amount(self) -> None:
        """Check density, density_down, k and k_down together and resolve the downlink ones."""
        if (self.density is None) == (self.k is None):
            got = "neither" if self.k is None else f"density={self.density!r} and k={self.k!r}"
            raise InvalidArgumentError(
                f"Compression: exactly one of density and k must be given; got {got}"
            )
        if self.density is not None:
            if self.k_down is not None:
                _fail("k_down", "must not be given with density; use density_down", self.k_down)
            self._set("density", _checked_density("density", self.density))
            down = self.density if self.density_down is None else self.density_down
            self._set("density_down", _checked_density("density_down", down))
        else:
            if self.density_down is not None:
                _fail("density_down", "must not be given with k; use k_down", self.density_down)
            self._set("k", _checked_int("k", self.k, 1, 2**63 - 1))
            down_k = self.k if self.k_down is None else self.k_down
            self._set("k_down", _checked_int("k_down", down_k, 1, 2**63 - 1))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the dataclass is frozen for everybody else


def _describe(value: Any) -> str:
    return f"{value!r} ({type(value).__name__})"


def _fail(option: str, expected: str, got: Any) -> NoReturn:
    raise InvalidArgumentError(f"Compression: {option} {expected}; got {_describe(got)}")


def _refuse_unknown(unknown: dict[str, Any]) -> NoReturn:
    known = [field.name for field in fields(Compression) if field.name != "method"]
    parts = []
    for name in sorted(unknown):
        nearest = difflib.get_close_matches(name, known, n=1)
        parts.append(f"{name!r}" + (f" (did you mean {nearest[0]!r}?)" if nearest else ""))
    raise TypeError(
        f"Compression.topk: unknown option {', '.join(parts)}; known options: {', '.join(known)}"
    )


def _check_choice(option: str, value: Any, choices: tuple[str, ...]) -> None:
    if isinstance(value, str) and value in choices:
        return
    nearest = difflib.get_close_matches(value, choices, n=1) if isinstance(value, str) else []
    hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
    known = ", ".join(map(repr, choices))
    raise InvalidArgumentError(
        f"Compression: {option} must be one of {known}; got {_describe(value)}{hint}"
    )


def _checked_density(option: str, value: Any) -> float:
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        counterpart = "k_down" if option == "density_down" else "k"
        raise InvalidArgumentError(
            f"Compression: {option} must be a float in (0, 1], got {_describe(value)}; "
            f"did you mean {counterpart}={value}?"
        )
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        _fail(option, "must be a float in (0, 1]", value)
    density = float(value)
    if not 0.0 < density <= 1.0:  # also refuses NaN
        _fail(option, "must be a float in (0, 1]", value)
    return density


def _checked_int(option: str, value: Any, lowest: int, highest: int) -> int:
    limits = {2**63 - 1: f">= {lowest}", MAX_SEED: f"in [{lowest}, 2**64 - 1]"}[highest]
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        _fail(option, f"must be an int {limits}", value)
    number = operator.index(value)
    if not lowest <= number <= highest:
        _fail(option, f"must be an int {limits}", value)
    return number


def _checked_bool(option: str, value: Any) -> bool:
    # numpy.bool_ is not registered as anything in `numbers`, so it is recognised by its name.
    if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
        return bool(value)
    _fail(option, "must be True or False", value)


def _checked_decay(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        _fail("memory_decay", "must be a finite number in [0, 1]", value)
    decay = float(value)
    if not math.isfinite(decay) or not 0.0 <= decay <= 1.0:
        _fail("memory_decay", "must be a finite number in [0, 1]", value)
    return decay


def _checked_rules(rules: Any, nonfinite: str) -> tuple[Rule, ...]:
    if isinstance(rules, (str, bytes, dict)) or not isinstance(rules, Iterable):
        _fail("rules", "must be a sequence of (name pattern, Compression or 'dense') pairs", rules)
    return tuple(_checked_rule(index, rule, nonfinite) for index, rule in enumerate(rules))


def _checked_rule(index: int, rule: Any, nonfinite: str) -> Rule:
    where = f"rules[{index}]"
    if not isinstance(rule, (tuple, list)) or len(rule) != 2:
        _fail(where, "must be a pair (name pattern, Compression or 'dense')", rule)
    pattern, spec = rule
    if not isinstance(pattern, str) or not pattern:
        _fail(f"{where} pattern", "must be a non-empty str", pattern)
    if not isinstance(spec, Compression):
        if not isinstance(spec, str) or spec != "dense":
            _fail(f"{where} ({pattern!r})", "must name a Compression or 'dense'", spec)
        return pattern, spec
    if spec.rules:
        _fail(f"{where} ({pattern!r})", "must not hold rules of its own", spec)
    if spec.nonfinite not in ("propagate", nonfinite):
        raise InvalidArgumentError(
            f"Compression: {where} ({pattern!r}) must not set its own nonfinite, which is a policy "
            f"of the whole step; got {spec.nonfinite!r} in the rule, {nonfinite!r} outside of it"
        )
    return pattern, spec


def _make_dense_method(method: str, value_format: str) -> Compression:
    return Compression(
        density=1.0,
        value_format=value_format,
        exchange="dense",
        worker_memory=False,
        server_memory=False,
        method=method,
    )


_DENSE_METHODS: dict[str, Compression] = {}  # filled once, below; __repr__ asks it
_DENSE_METHODS["none"] = Compression.none = _make_dense_method("none", "float32")
_DENSE_METHODS["fp16"] = Compression.fp16 = _make_dense_method("fp16", "float16")
