# SPDX-License-Identifier: Apache-2.0
"""The sharded exchange against the simulated server: same bytes, less traffic."""

import bitopk
import numpy as np
import pytest
from bitopk import Compression
from support import assert_dicts, assert_state, make_grads

WORLD_SIZES = range(1, 10)
VALUE_FORMATS = ("float32", "float16", "bfloat16")

# One unit in histogram rounds (k > 2048 both ways), some that go whole to one owner, one with fewer
# entries than ranks, one empty, and sizes that no world size from 2 to 9 divides.
SHAPES = {"large": (60_007,), "medium": (4099,), "block": (1025,), "tiny": (3,), "none": (0,)}


class Twins:
    """One engine group per exchange, driven with the same gradients."""

    def __init__(self, world_size, **options):
        self.world_size = world_size
        self.allgather, self.sharded = (
            bitopk.LocalGroup(world_size, Compression.topk(exchange=exchange, **options))
            for exchange in ("allgather", "sharded")
        )

    def step(self, grads, what, **options):
        """Step both and compare everything."""
        expected = self.allgather.allreduce(grads, **options)
        actual = self.sharded.allreduce(grads, **options)
        for rank in range(self.world_size):
            assert_dicts(actual[rank], expected[rank], f"{what}: output of rank {rank}")
            assert_dicts(actual[rank], actual[0], f"{what}: rank {rank} against rank 0")
        assert_state(self.sharded, _View(self.allgather, self.world_size), what)


class _View:
    """Gives an engine's group the attribute that `assert_state` needs."""

    def __init__(self, group, world_size):
        self.world_size = world_size
        self.worker_memory, self.server_memory = group.worker_memory, group.server_memory


@pytest.mark.parametrize("value_format", VALUE_FORMATS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_sharded_equals_allgather_over_fifty_steps(world_size, value_format):
    twins = Twins(world_size, density=0.05, value_format=value_format, dense_below=0)
    pool = [
        make_grads(SHAPES, world_size, kind, seed)
        for seed, kind in enumerate(["normal", "layered", "few", "normal", "sparse"])
    ]
    for step in range(50):
        twins.step(pool[step % len(pool)], f"step {step}", op=("average", "sum")[world_size % 2])


@pytest.mark.parametrize("value_format", VALUE_FORMATS)
@pytest.mark.parametrize("kind", ["equal", "zeros", "denormal", "wide"])
def test_sharded_equals_allgather_on_hard_values(kind, value_format):
    for world_size in (2, 5, 8):
        twins = Twins(world_size, density=0.06, value_format=value_format, dense_below=0)
        for step in range(4):
            grads = make_grads(SHAPES, world_size, kind, step)
            twins.step(grads, f"N={world_size} step {step}")


@pytest.mark.parametrize(
    "options",
    [
        {"density": 0.06, "density_down": 0.001},
        {"density": 0.001, "density_down": 0.06},
        {"density": 0.05, "density_down": 1.0},
        {"k": 2047, "k_down": 2049},
        {"k": 60_007, "k_down": 2500},
        {"density": 0.05, "scope": "global"},
        {"density": 0.05, "worker_memory": False},
        {"density": 0.05, "server_memory": False},
        {"density": 0.05, "memory_decay": 0.9, "scope": "global"},
    ],
    ids=str,
)
def test_sharded_equals_allgather_for_every_setting(options):
    for world_size in (3, 8):
        twins = Twins(world_size, dense_below=0, **options)
        for step in range(6):
            kind = ("normal", "few", "layered")[step % 3]
            scale = (1.0, 2.0, 0.3)[step % 3]
            grads = make_grads(SHAPES, world_size, kind, step)
            twins.step(grads, f"N={world_size} step {step}", scale=scale)


def test_sharded_equals_allgather_when_shares_get_no_entry():
    twins = Twins(8, k=3000, k_down=3000)
    for step in range(4):
        grads = make_grads({"x": (60_000,)}, 8, "normal", step)
        for rank, grad in enumerate(grads):
            grad["x"][2048:] = 0  # blocks 2, 3, ... get nothing
            if rank % 2:
                grad["x"][:] = 0
        twins.step(grads, f"step {step}")


@pytest.mark.parametrize("value_format", VALUE_FORMATS)
def test_sharded_equals_allgather_at_a_million(value_format):
    twins = Twins(8, density=0.01, value_format=value_format)
    for step in range(2):
        grads = make_grads({"x": (1_000_000,)}, 8, ("normal", "layered")[step % 2], step)
        twins.step(grads, f"step {step}")


def measure_traffic(exchange, kind, world_size=8, d=1_000_000, density=0.01, num_steps=3):
    """Bytes sent and received per rank in each step after the first."""
    spec = Compression.topk(density, exchange=exchange)
    group = bitopk.LocalGroup(world_size, spec)
    pool = [make_grads({"x": (d,)}, world_size, kind, seed) for seed in range(2)]
    counts = []
    for step in range(num_steps + 1):
        group.allreduce(pool[step % 2])
        stats = [group.stats(rank) for rank in range(world_size)]
        counts.append([(s.bytes_sent, s.bytes_received) for s in stats])
    steps = np.diff(np.array(counts, np.int64), axis=0)
    return steps[..., 0], steps[..., 1]


@pytest.mark.parametrize(("kind", "limit"), [("normal", 1.25), ("layered", 1.5)])
def test_sharded_traffic_stays_near_the_entropy_of_what_is_kept(kind, limit):
    sent, received = measure_traffic("sharded", kind)
    k_up = k_down = 10_000
    ideal = (k_up + k_down) * 7 / 8 * (4 + 8.6 / 8)
    print(f"{kind}: sent / ideal, per step and rank:\n{np.round(sent / ideal, 3)}")
    assert sent.max() <= limit * ideal
    assert (sent.sum(axis=1) == received.sum(axis=1)).all()
    assert sent.min() > 0.5 * ideal  # a counter that misses something would be cheaper


def test_allgather_traffic_grows_with_the_number_of_ranks():
    sent, received = measure_traffic("allgather", "normal", num_steps=1)
    per_packet = 10_000 * (4 + 8.6 / 8)
    assert received.max() <= 1.1 * 7 * per_packet
    assert received.min() >= 0.95 * 7 * per_packet
    assert sent.sum() == received.sum()


def test_one_rank_sends_nothing():
    for exchange in ("allgather", "sharded", "dense"):
        spec = Compression.topk(0.1, exchange=exchange)
        group = bitopk.LocalGroup(1, spec)
        group.allreduce(make_grads({"x": (5000,)}, 1, "normal", 0))
        assert group.stats(0).bytes_sent == 0
