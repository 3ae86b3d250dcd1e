# SPDX-License-Identifier: Apache-2.0
"""Saved states: what they hold, how they are checked, gathered on one rank, and resharded.

A *part* is what one rank saves: its worker memory, its share of the server memory, the scale and
the number of steps; numbers, strings, lists, dicts and tensors only, so that
``torch.load(..., weights_only=True)`` reads it (NumPy arrays where torch is not imported). A
*whole* state is the list of the parts of all ranks: ``{"format": 2, "parts": [...]}``. Every
``load_state_dict`` of this package takes either: a part where rank and number of ranks are the
same, a whole state anywhere.

Resharding from N to N' ranks preserves ``sum_i p_i m_i`` (p_i = 1/N for averages, 1 for sums) and
the server memory: rank r of N' gets the sum of the worker memories of the old ranks i with
``i mod N' == r``, times N'/N for averages. The scale and the number of steps carry over.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bitopk._packing import pack, unpack
from bitopk._tensors import is_torch_tensor, torch_if_imported
from bitopk.errors import InvalidArgumentError

__all__ = ["FORMAT", "check", "gather", "join", "num_bytes", "part_for"]

logger = logging.getLogger("bitopk")

FORMAT = 2

_TYPES = {
    "rank": int,
    "world_size": int,
    "op": str,
    "tensors": str,
    "settings": str,
    "density": float,
    "density_down": float,
    "scale": float,
    "tensor_scales": list,
    "schedule_step": int,
    "worker_memory": dict,
    "server_memory": dict,
    "server_layout": dict,
    "whole_server_memory": bool,
}
_COMMON = (
    "world_size",
    "tensors",
    "op",
    "schedule_step",
    "scale",
    "tensor_scales",
    "density",
    "density_down",
    "server_layout",
)
_FLOATS = ("density", "density_down", "scale", "tensor_scales")
_MEMORIES = ("worker_memory", "server_memory")
TIMES_N = "average times n"  # the engine averages and its user multiplies by N
_OPS = ("", "average", "sum", TIMES_N)


def gather(owner: Any, destination: int = 0) -> dict[str, Any] | None:
    """Collect the parts of all ranks on one, for a checkpoint that one rank writes.

    A collective call: every rank must make it. Its size, which is logged, is about
    ``4 * d * (N + 1)`` bytes for d compressed parameters (N worker memories and the server memory),
    all of it received by one rank.

    Parameters
    ----------
    owner : Group, Reducer, TopKState or optimizer of bitopk.horovod
        Whose state.
    destination : int
        Rank that gets the state.

    Returns
    -------
    dict or None
        A whole state on `destination`, None elsewhere.
    """
    owner = getattr(owner, "bitopk", owner)
    state = owner.state_dict()
    if "sets" not in state:
        return _gather_part(owner, state, destination)
    wholes = [_gather_part(owner, part, destination) for part in state["sets"]]
    return None if None in wholes else {"format": FORMAT, "sets": wholes}


def _gather_part(owner: Any, part: dict[str, Any], destination: int) -> dict[str, Any] | None:
    parts = [b""] * part["world_size"]
    parts[destination] = _pack(_check_part(part))
    received = owner.all_to_all(parts)
    if part["rank"] != destination:
        return None
    whole = join([_unpack(bytes_) for bytes_ in received])
    logger.info("checkpoint: parts of %d ranks, %.1f MB", len(received), num_bytes(whole) / 1e6)
    return whole


def join(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Make a whole state of the parts that all ranks saved, in any order.

    Those of a `Reducer`, which hold a part for each set of keys, become a state with a whole state
    for each.

    Raises
    ------
    InvalidArgumentError
        If a part is damaged, missing or of another job.
    """
    if parts and all(isinstance(part, Mapping) and "sets" in part for part in parts):
        if len({len(part["sets"]) for part in parts}) != 1:
            raise InvalidArgumentError("checkpoint: the parts hold different numbers of sets")
        sets = zip(*(part["sets"] for part in parts))
        return {"format": FORMAT, "sets": [join(each) for each in sets]}
    checked = sorted((_check_part(part) for part in parts), key=lambda part: part["rank"])
    if not checked:
        raise InvalidArgumentError("checkpoint: got no parts")
    size = checked[0]["world_size"]
    ranks = [part["rank"] for part in checked]
    if ranks != list(range(size)):
        raise InvalidArgumentError(
            f"checkpoint: the parts of ranks 0 to {size - 1} are needed; got those of {ranks}"
        )
    for part in checked:
        for key in _COMMON:
            if part[key] != checked[0][key]:
                raise InvalidArgumentError(
                    f"checkpoint: {key} differs between the parts of rank 0 "
                    f"({_short(checked[0][key])}) and rank {part['rank']} ({_short(part[key])})"
                )
    return {"format": FORMAT, "parts": [portable(part) for part in checked]}


def num_bytes(state: Mapping[str, Any]) -> int:
    """Return the size of the memories in a part or a whole state."""
    if "sets" in state:
        return sum(num_bytes(each) for each in state["sets"])
    parts = state["parts"] if "parts" in state else [state]
    return sum(
        4 * int(np.prod(tuple(memory.shape), dtype=np.int64))
        for part in parts
        for key in _MEMORIES
        for memory in part[key].values()
    )


def part_for(state: Any, rank: int, world_size: int) -> dict[str, Any]:
    """Return what `rank` of `world_size` ranks loads from a part or a whole state, as NumPy arrays.

    Raises
    ------
    InvalidArgumentError
        Naming what is damaged, or what is needed instead.
    """
    if not isinstance(state, Mapping):
        raise InvalidArgumentError(
            f"load_state_dict: state must be a dict; got {type(state).__name__}"
        )
    if "parts" not in state:
        part = _check_part(state)
        if (part["rank"], part["world_size"]) == (rank, world_size):
            return _as_arrays(part)
        raise InvalidArgumentError(
            f"load_state_dict: the state is of rank {part['rank']} of {part['world_size']}; this "
            f"is rank {rank} of {world_size}. For another number of ranks pass the parts of all "
            f"ranks: bitopk.checkpoint.join([...])"
        )
    _check_format(state)
    parts = [_check_part(part) for part in join(state["parts"])["parts"]]
    return _reshard([_as_arrays(part) for part in parts], rank, world_size)


def check(state: Any) -> None:
    """Raise InvalidArgumentError if `state` is neither a sound part nor a sound whole state."""
    if isinstance(state, Mapping) and "parts" in state:
        _check_format(state)
        join(state["parts"])
    else:
        _check_part(state)


def normalised(state: Any) -> dict[str, Any]:
    """Return a part with NumPy arrays and floats, checked."""
    return _as_arrays(_check_part(state))


def owned_entries(layout: Sequence[int], num_entries: int, owner: int) -> np.ndarray:
    """Return, as a mask of shape (num_entries,), which entries of a tensor one rank serves.

    Parameters
    ----------
    layout : sequence of int
        Block, owners, first owner, offset of the tensor in its unit; see ``ServerLayout`` of
        engine.h.
    num_entries : int
        Of the tensor.
    owner : int
        Rank; with one owner every rank serves all entries.
    """
    block, owners, first_owner, offset = layout
    if owners == 1:
        return np.ones(num_entries, bool)
    blocks = (np.arange(offset, offset + num_entries) // block + first_owner) % owners
    return np.asarray(blocks == owner)


def whole_server_memory(
    shares: Mapping[int, Mapping[str, np.ndarray]],
    layouts: Mapping[str, Sequence[int]],
    sizes: Mapping[str, int],
) -> dict[str, np.ndarray]:
    """Put the shares of the server memory together.

    Parameters
    ----------
    shares : dict of int to dict of str to numpy.ndarray
        By rank, what it serves of each tensor; what is missing counts as zeros.
    layouts, sizes : dict
        Layout and number of entries of each tensor.
    """
    names = {name for share in shares.values() for name in share}
    out = {}
    for name in sorted(names):
        whole = np.zeros(sizes[name], np.float32)
        for owner, share in shares.items():
            if name not in share:
                continue
            mask = owned_entries(layouts[name], sizes[name], owner)
            if share[name].size != np.count_nonzero(mask):
                raise InvalidArgumentError(
                    f"load_state_dict: the share of rank {owner} of the server memory of {name!r} "
                    f"has {share[name].size} entries, expected {np.count_nonzero(mask)}"
                )
            whole[mask] = share[name]
        out[name] = whole
    return out


def portable(part: dict[str, Any]) -> dict[str, Any]:
    """Return a part as users get it: with torch tensors for arrays, if torch is imported.

    Floats become tensors too: torch 1.13 writes floats that its ``weights_only`` cannot read.
    """
    torch = torch_if_imported()
    if torch is None:
        return part
    out = dict(part)
    for key in _MEMORIES:
        out[key] = {
            name: memory if is_torch_tensor(memory) else torch.from_numpy(memory)
            for name, memory in part[key].items()
        }
    for key in _FLOATS:
        out[key] = torch.tensor(part[key], dtype=torch.float64)
    return out


def tensor_sizes(description: str) -> dict[str, int]:
    """Read the number of entries of each tensor from the engine's description of them."""
    sizes = {}
    for line in description.splitlines():
        _, _, rest = line.partition(': "')
        name, _, tail = rest.rpartition('" ')
        sizes[name] = int(tail[tail.index("[") + 1 : tail.index("]")])
    return sizes


def resharding_factors(op: str, old_size: int, new_size: int) -> tuple[np.float32, np.float32]:
    """Return what worker and server memories are multiplied by from `old_size` ranks to others.

    So that what is outstanding, as it will reach the model, stays what it was.
    """
    ratio = np.float32(new_size / old_size)
    if op == "sum":
        return np.float32(1.0), np.float32(1.0)
    if op == TIMES_N:
        return np.float32(1.0), np.float32(old_size / new_size)
    return ratio, np.float32(1.0)


def _reshard(parts: list[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
    old_size = len(parts)
    factor, server_factor = resharding_factors(parts[0]["op"], old_size, world_size)
    worker: dict[str, np.ndarray] = {}
    for part in parts[rank::world_size]:
        for name, memory in part["worker_memory"].items():
            worker[name] = worker[name] + memory if name in worker else memory
    first = parts[0]
    return {
        **first,
        "rank": rank,
        "world_size": world_size,
        "worker_memory": {name: memory * factor for name, memory in worker.items()},
        "server_memory": {
            name: memory * server_factor
            for name, memory in whole_server_memory(
                {part["rank"]: part["server_memory"] for part in parts},
                first["server_layout"],
                tensor_sizes(first["tensors"]),
            ).items()
        },
        "whole_server_memory": True,
    }


# --- checks --------------------------------------------------------------------------------------


def _check_format(state: Mapping[str, Any]) -> None:
    if state.get("format") != FORMAT:
        raise InvalidArgumentError(
            f"load_state_dict: format must be {FORMAT}; got {state.get('format')!r}"
        )


def _check_part(state: Any) -> dict[str, Any]:
    if not isinstance(state, Mapping):
        raise InvalidArgumentError(
            f"load_state_dict: a part must be a dict; got {type(state).__name__}"
        )
    _check_format(state)
    state = dict(state)
    for key in _FLOATS:
        if is_torch_tensor(state.get(key)):
            state[key] = state[key].tolist()
    for key, kind in _TYPES.items():
        value = state.get(key)
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            raise InvalidArgumentError(
                f"load_state_dict: {key} must be {kind.__name__}; got {type(value).__name__}"
            )
        if kind is int and not 0 <= value < 2**63:
            raise InvalidArgumentError(f"load_state_dict: {key} is {value}")
    if state["op"] not in _OPS:
        raise InvalidArgumentError(f"load_state_dict: op is {state['op']!r}")
    for key in _MEMORIES:
        for name, memory in state[key].items():
            _check_memory(f"{key}[{name!r}]", memory)
    for name, layout in state["server_layout"].items():
        valid = isinstance(layout, (list, tuple)) and len(layout) == 4
        if (
            not valid
            or not all(isinstance(x, int) and x >= 0 for x in layout)
            or not all(layout[:2])
        ):
            raise InvalidArgumentError(f"load_state_dict: server_layout[{name!r}] is {layout!r}")
    if not all(isinstance(scale, float) for scale in state["tensor_scales"]):
        raise InvalidArgumentError("load_state_dict: tensor_scales must be floats")
    _check_names(state)
    return state


def _check_names(state: Mapping[str, Any]) -> None:
    try:
        sizes = tensor_sizes(state["tensors"])
    except ValueError:
        raise InvalidArgumentError(
            f"load_state_dict: tensors is no list of tensors: {_short(state['tensors'])}"
        ) from None
    for key in _MEMORIES:
        for name in state[key]:
            if name not in sizes or (key == "server_memory" and name not in state["server_layout"]):
                raise InvalidArgumentError(
                    f"load_state_dict: {key} has {name!r}, of which tensors or server_layout "
                    f"say nothing"
                )
    if len(state["tensor_scales"]) not in (0, len(sizes)):
        raise InvalidArgumentError(
            f"load_state_dict: {len(state['tensor_scales'])} tensor_scales for {len(sizes)} tensors"
        )


def _check_memory(what: str, memory: Any) -> None:
    array = _as_array(memory)
    if array is None or array.dtype != np.float32 or array.ndim != 1:
        raise InvalidArgumentError(
            f"load_state_dict: {what} must be a 1-D float32 array or tensor; got "
            f"{type(memory).__name__}"
        )
    if not np.isfinite(array).all():
        raise InvalidArgumentError(f"load_state_dict: {what} holds NaN or Inf")


def _as_array(memory: Any) -> np.ndarray | None:
    if is_torch_tensor(memory):
        return np.asarray(memory.detach().cpu().contiguous().numpy())
    return memory if isinstance(memory, np.ndarray) else None


def _as_arrays(part: dict[str, Any]) -> dict[str, Any]:
    out = dict(part)
    for key in _MEMORIES:
        out[key] = {name: _as_array(memory) for name, memory in part[key].items()}
    return out


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:197] + "..."


# --- bytes ---------------------------------------------------------------------------------------


def _pack(part: dict[str, Any]) -> bytes:
    arrays = {
        f"{key}/{name}": memory
        for key in _MEMORIES
        for name, memory in _as_arrays(part)[key].items()
    }
    return pack({key: part[key] for key in part if key not in _MEMORIES}, arrays)


def _unpack(data: bytes) -> dict[str, Any]:
    part, arrays = unpack(data)
    for key in _MEMORIES:
        part[key] = {}
    for path, array in arrays.items():
        key, _, name = path.partition("/")
        part[key][name] = array
    return part
