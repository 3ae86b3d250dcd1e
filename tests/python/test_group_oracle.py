# SPDX-License-Identifier: Apache-2.0
"""`bitopk.LocalGroup` against the oracle, bit for bit: outputs and all memories at every step."""

import bitopk
import numpy as np
import pytest
from bitopk import Compression
from support import KINDS, assert_dicts, make_grads, make_pair, step_both

SIZES = (0, 1, 2, 3, 1000, 1023, 1024, 1025, 4097, 65_537)
WORLD_SIZES = range(1, 10)
EXCHANGES = ("allgather", "sharded")


def run_steps(world_size, spec, shapes, kinds, seed=0, num_steps=None, what="", **options):
    """Run steps of the given kinds in the engine and the oracle; return the engine's group."""
    group, oracle = make_pair(world_size, spec, **options)
    for step in range(len(kinds) if num_steps is None else num_steps):
        grads = make_grads(shapes, world_size, kinds[step % len(kinds)], seed + step)
        op = "average" if seed % 2 == 0 else "sum"
        step_both(group, oracle, grads, f"{what} step {step}", op=op)
    return group


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_size_and_density(world_size, exchange):
    for d in SIZES:
        num_steps = 2 if d > 60_000 else 4
        specs = [
            Compression.topk(k=1, exchange=exchange, dense_below=0),
            Compression.topk(k=max(1, d), exchange=exchange, dense_below=0),
            Compression.topk(0.01, exchange=exchange, dense_below=0),
            Compression.topk(0.3, 0.07, exchange=exchange, dense_below=0),
        ]
        for spec in specs:
            kinds = ("normal", "few", "layered", "normal")
            what = f"N={world_size} d={d} {spec}"
            run_steps(world_size, spec, {"x": (d,)}, kinds, d, num_steps, what)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_gradient(kind, exchange):
    for world_size in (1, 2, 3, 8):
        for spec in (
            Compression.topk(0.05, exchange=exchange, dense_below=0),
            Compression.topk(k=400, k_down=90, exchange=exchange, dense_below=0),
            Compression.topk(0.9, 0.6, exchange=exchange, dense_below=0),
        ):
            what = f"N={world_size} {spec}"
            run_steps(world_size, spec, {"x": (2500,), "y": (33,)}, (kind,), 5, 6, what)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("value_format", ["float32", "float16", "bfloat16"])
def test_every_value_format(value_format, exchange):
    for world_size in (1, 2, 5):
        for kind in ("normal", "wide", "denormal", "few"):
            spec = Compression.topk(
                0.1, value_format=value_format, exchange=exchange, dense_below=0
            )
            what = f"N={world_size} {kind}"
            run_steps(world_size, spec, {"x": (3001,), "y": (5,)}, (kind,), 4, 6, what)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize(("world_size", "kind"), [(1, "normal"), (2, "few"), (9, "normal")])
def test_a_million_entries(world_size, kind, exchange):
    spec = Compression.topk(0.01, exchange=exchange)
    run_steps(world_size, spec, {"x": (1_000_000,)}, (kind,), 1, 2)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize(
    "memories",
    [
        {"worker_memory": False},
        {"server_memory": False},
        {"worker_memory": False, "server_memory": False},
        {"memory_decay": 0.75},
        {"memory_decay": 0.0},
    ],
    ids=str,
)
def test_every_memory_kind(memories, exchange):
    for density_down in (0.05, 1.0):
        spec = Compression.topk(0.05, density_down, exchange=exchange, dense_below=0, **memories)
        run_steps(3, spec, {"x": (2000,), "y": (50,)}, ("normal", "few"), 2, 8, str(spec))


SHAPES = {
    "fc1.weight": (60, 50),
    "fc1.bias": (60,),
    "empty": (0,),
    "hollow": (3, 0, 2),
    "scalar": (),
    "Zed": (1500,),
    "\u00e9t\u00e9": (700,),
}


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("scope", ["tensor", "global"])
@pytest.mark.parametrize("dense_below", [0, 1, 1024, 10**9])
def test_several_tensors_in_either_scope(scope, dense_below, exchange):
    spec = Compression.topk(0.02, scope=scope, dense_below=dense_below, exchange=exchange)
    for world_size in (1, 2, 4):
        run_steps(world_size, spec, SHAPES, ("normal", "few", "equal"), 6, 9, str(spec))


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("scope", ["tensor", "global"])
def test_rules_form_units_of_their_own(scope, exchange):
    spec = Compression.topk(
        0.02,
        scope=scope,
        exchange=exchange,
        dense_below=10,
        rules=[
            ("fc1.b*", "dense"),
            ("fc1.*", Compression.topk(k=17, scope="global", dense_below=0, exchange=exchange)),
            ("Zed", Compression.topk(0.5, 1.0, value_format="float16", exchange=exchange)),
        ],
    )
    run_steps(3, spec, SHAPES, ("normal", "few"), 8, 10)


@pytest.mark.parametrize("exchange", [*EXCHANGES, "dense", "auto"])
def test_forty_steps(exchange):
    spec = Compression.topk(0.03, scope="global", exchange=exchange, dense_below=0)
    shapes = {"a": (900,), "b": (40, 30), "c": (7,)}
    run_steps(4, spec, shapes, ("normal", "normal", "few", "layered", "sparse"), 0, 40)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_density_one_equals_the_dense_sum_in_rank_order(exchange):
    for world_size in (1, 2, 7):
        spec = Compression.topk(1.0, exchange=exchange, dense_below=0)
        grads = make_grads({"x": (4097,)}, world_size, "normal", 3)
        outs = bitopk.LocalGroup(world_size, spec).allreduce(grads, op="sum")
        total = np.zeros(4097, np.float32)
        for grad in grads:
            total = total + grad["x"]
        for out in outs:
            assert_dicts(out, {"x": total}, f"N={world_size}")


def test_compression_none_equals_the_dense_sum_in_rank_order():
    grads = make_grads({"x": (4097,), "y": (3,)}, 3, "normal", 4)
    outs = bitopk.LocalGroup(3, Compression.none).allreduce(grads, op="average")
    for name in ("x", "y"):
        zero = np.zeros_like(grads[0][name])
        total = (zero + grads[0][name] + grads[1][name] + grads[2][name]) / np.float32(3)
        for out in outs:
            assert_dicts({name: out[name]}, {name: total}, name)


def test_compression_fp16_is_near_the_average_and_the_same_on_all_ranks():
    grads = make_grads({"x": (4097,)}, 3, "normal", 4)
    outs = bitopk.LocalGroup(3, Compression.fp16).allreduce(grads, op="average")
    average = np.mean([grad["x"] for grad in grads], axis=0)
    np.testing.assert_allclose(outs[0]["x"], average, atol=5e-3)
    for out in outs[1:]:
        assert_dicts(out, outs[0], "rank")


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_start_step_is_dense_until_then(exchange):
    spec = Compression.topk(0.01, exchange=exchange, start_step=3, dense_below=0)
    run_steps(3, spec, {"x": (2000,), "y": (9,)}, ("normal",), 2, 7)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_integer_tensors_travel_dense_and_exact(exchange):
    spec = Compression.topk(0.01, exchange=exchange, dense_below=0)
    group, oracle = make_pair(3, spec)
    rng = np.random.default_rng(0)
    for step in range(3):
        grads = make_grads({"x": (2000,)}, 3, "normal", step)
        for grad in grads:
            grad["i32"] = rng.integers(-(2**28), 2**28, 3000).astype(np.int32)
            grad["i64"] = rng.integers(-(2**60), 2**60, 5)
        step_both(group, oracle, grads, f"step {step}", op="sum")


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("scope", ["tensor", "global"])
def test_results_do_not_depend_on_the_bucket_size(scope, exchange):
    shapes = {f"layer{i}": (500 + 700 * i,) for i in range(8)} | {"small": (10,)}
    spec = Compression.topk(0.02, scope=scope, exchange=exchange)
    for bucket_bytes in (1, 4096, 10_000, 1 << 20):
        kinds = ("normal", "few", "layered")
        run_steps(3, spec, shapes, kinds, 2, 5, f"{bucket_bytes}", bucket_bytes=bucket_bytes)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_results_do_not_depend_on_the_order_of_names(exchange):
    shapes = {"c": (1500,), "a": (2000,), "b": (9,), "B": (1200,)}
    spec = Compression.topk(0.01, scope="global", exchange=exchange, dense_below=0)
    group, oracle = make_pair(3, spec)
    rng = np.random.default_rng(0)
    for step in range(5):
        grads = make_grads(shapes, 3, "normal", step)
        shuffled = [{str(n): grad[str(n)] for n in rng.permutation(list(grad))} for grad in grads]
        step_both(group, oracle, shuffled, f"step {step}")


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_name_that_a_rank_leaves_out_counts_as_zero(exchange):
    shapes = {"a": (2000,), "b": (1500,), "c": (5,)}
    spec = Compression.topk(0.05, exchange=exchange)
    group, oracle = make_pair(3, spec)
    for step in range(6):
        grads = make_grads(shapes, 3, "normal", step)
        if step == 2:
            del grads[1]["a"], grads[1]["c"]
        if step in (3, 4):
            for grad in grads:
                del grad["b"]
        outs = group.allreduce(grads)
        expected = oracle.allreduce(grads)
        for rank, grad in enumerate(grads):
            submitted = {name: expected[rank][name] for name in grad}
            got = {name: outs[rank][name] for name in grad}
            assert_dicts(got, submitted, f"step {step} rank {rank}")
            assert_dicts(group.worker_memory(rank), oracle.worker_memory(rank), "m", rest_zero=True)
        assert_dicts(group.server_memory(), oracle.server_memory(), "delta", rest_zero=True)


def test_stats_count_steps_entries_and_dense_bytes():
    world_size, d, k = 4, 20_000, 200
    spec = Compression.topk(k=k, exchange="allgather")
    group = bitopk.LocalGroup(world_size, spec)
    for step in range(5):
        group.allreduce(make_grads({"x": (d,)}, world_size, "normal", step))
    for rank in range(world_size):
        stats = group.stats(rank)
        assert stats.steps == 5
        assert stats.entries_up == 5 * k
        ring = 5 * 2 * (world_size - 1) / world_size * d * 4
        assert stats.dense_bytes == pytest.approx(ring, rel=0.01)
        assert stats.compression_ratio == pytest.approx(
            stats.dense_bytes / stats.bytes_sent, rel=0.01
        )
        assert 0.0 < stats.contraction_up < 1.0
        assert 0.0 < stats.contraction_down < 1.0
        memory = np.asarray(group.worker_memory(rank)["x"], np.float64)
        assert stats.residual_norm == pytest.approx(np.linalg.norm(memory), rel=1e-3)
        assert all(seconds >= 0 for seconds in stats.seconds.values())
        assert stats.seconds
