# SPDX-License-Identifier: Apache-2.0
"""One rank of a job over the collectives of torch.distributed. Usage: lent.py MODE [ARGUMENT...].

The environment has RANK, WORLD_SIZE and TORCH_STORE, the file in which the ranks meet.
"""

import os
import signal
import sys
import threading
import time

import bitopk
import numpy as np
import torch.distributed as dist
from bitopk._rank import RankEngine
from bitopk._settings import make_config
from bitopk.group import Group
from bitopk.torch import lent
from support import assert_bits, assert_dicts, make_grads

RANK = int(os.environ["RANK"])
WORLD_SIZE = int(os.environ["WORLD_SIZE"])
# Three units whose histograms do not fit into the first collective, small ones, and nothing.
SHAPES = {
    "a": (60_007,),
    "b": (300, 200),
    "c": (50_000,),
    "fc.bias": (50,),
    "scalar": (),
    "empty": (0,),
    "ints": (2000,),
}


def join(spec, timeout=30.0, process_group=None):
    """Return a group whose bytes travel through torch.distributed."""
    config = make_config(spec, 32 << 20)
    engine, description = lent.connect(config, process_group, timeout)
    assert "torch.distributed" in description
    return Group(RankEngine(engine))


def grads_of(world_size, kind, seed):
    """Gradients of all ranks, some of them integers."""
    grads = make_grads(SHAPES, world_size, kind, seed)
    for grad in grads:
        grad["ints"] = (1000 * grad["ints"]).astype(np.int64)
    return grads


def check_steps(group, local, num_steps):
    """Compare a job with a LocalGroup that gets the same gradients."""
    for step in range(num_steps):
        kind = ("normal", "few", "layered")[step % 3]
        grads = grads_of(group.size, kind, step)
        expected = local.allreduce(grads)
        out = group.allreduce_async(grads[group.rank]).wait()
        what = f"rank {group.rank} step {step}"
        assert_dicts(out, expected[group.rank], what)
        assert_dicts(group.worker_memory(), local.worker_memory(group.rank), f"{what}: worker")
        if step % 4 == 3:  # a collective call
            assert_dicts(group.server_memory(), local.server_memory(), f"{what}: server")


def steps(exchange):
    """Compare ten steps; then an independent group, made while the first is there."""
    spec = bitopk.Compression.topk(0.05, exchange=exchange)
    with join(spec) as group:
        assert (group.rank, group.size) == (RANK, WORLD_SIZE)
        check_steps(group, bitopk.LocalGroup(group.size, spec), 10)
        with join(spec) as second:
            check_steps(second, bitopk.LocalGroup(group.size, spec), 2)
        parts = [bytes([RANK, r]) * (500 * r) for r in range(WORLD_SIZE)]  # small, empty and large
        received = group.all_to_all(parts)
        assert received == [bytes([r, RANK]) * (500 * RANK) for r in range(WORLD_SIZE)]
        stats = group.stats()
        assert stats.steps == 10
        assert (stats.bytes_sent > 0) == (group.size > 1)
        print("sent", stats.bytes_sent, "received", stats.bytes_received)
    print("all equal")


def same_traffic():
    """Count the same bytes as the in-process communicator, which counts headers and payloads."""
    for exchange in ("allgather", "dense"):
        spec = bitopk.Compression.topk(0.05, exchange=exchange)
        local = bitopk.LocalGroup(WORLD_SIZE, spec)
        with join(spec) as group:
            check_steps(group, local, 3)
            mine, theirs = group.stats(), local.stats(RANK)
            # The reads of the server memory are not in LocalGroup's traffic; there was none.
            assert mine.bytes_sent == theirs.bytes_sent, (mine, theirs)
            assert mine.bytes_received == theirs.bytes_received, (mine, theirs)
    print("same traffic")


def subgroup():
    """Ranks 0 and 2 of three make an engine of their own, one after the other twice."""
    spec = bitopk.Compression.topk(0.05, exchange="sharded")
    pair = dist.new_group([0, 2])
    for _ in range(2):
        if RANK == 1:
            if not hasattr(dist, "get_backend_config"):  # torch 1 wants all ranks to call
                dist.new_group([0, 2])
            continue
        with join(spec, process_group=pair) as group:
            assert (group.rank, group.size) == (RANK // 2, 2)
            check_steps(group, bitopk.LocalGroup(2, spec), 3)
        time.sleep(0.5)  # until the group of the first is destroyed
    print("all equal")


def mismatch():
    """Rank 1 has another density, which all ranks are told."""
    spec = bitopk.Compression.topk(0.02 if RANK == 1 else 0.01)
    try:
        with join(spec) as group:
            group.allreduce({"x": np.ones(2000, np.float32)})
    except bitopk.errors.Error as error:
        report(error)
        return
    sys.exit("nobody noticed")


def different_calls():
    """Rank 1 gathers while the others make a step."""
    with join(bitopk.Compression.topk(0.1)) as group:
        grad = {"x": np.ones(2000, np.float32)}
        group.allreduce(grad)
        try:
            if RANK == 1:
                group.all_to_all([b"?"] * WORLD_SIZE)
            else:
                group.allreduce(grad)
        except bitopk.errors.Error as error:
            report(error)
            report(error_of(lambda: group.allreduce(grad)))
            return
    sys.exit("nobody noticed")


def error_of(call):
    """Return what a call raises."""
    try:
        call()
    except bitopk.errors.CommunicationError as error:
        return error
    sys.exit("no error")


def report(error):
    """Print one line."""
    print(f"{type(error).__name__}: {error}".replace("\n", " "), flush=True)


def victim(number, timeout, exchange):
    """Send the last rank a signal while it communicates; the others say how long they waited."""
    grad = {f"t{i}": np.random.default_rng(i).standard_normal(200_000).astype("f4") for i in (0, 1)}
    spec = bitopk.Compression.topk(0.1, exchange=exchange)
    with join(spec, timeout=float(timeout)) as group:
        group.allreduce(grad)
        if RANK == WORLD_SIZE - 1:
            arguments = (os.getpid(), getattr(signal, number))
            threading.Timer(0.3, os.kill, arguments).start()
        last = time.monotonic()
        try:
            while True:
                group.allreduce(grad)
                last = time.monotonic()
        except bitopk.errors.CommunicationError as error:
            print(f"waited {time.monotonic() - last:.1f} s", end=" ")
            report(error)
            sys.exit(7)


def close_while_waiting():
    """Rank 0 closes while it waits for rank 1, and ends at once; rank 1 comes late, in vain."""
    group = join(bitopk.Compression.topk(0.1))
    grad = {"x": np.ones(2000, np.float32)}
    group.allreduce(grad)
    if RANK == 0:
        group.allreduce_async(grad)
        time.sleep(0.5)
        begin = time.monotonic()
        group.close()
        print(f"closed within {time.monotonic() - begin:.1f} s")
        return
    time.sleep(1.5)
    try:
        for _ in range(3):  # the call that rank 0 was in may succeed
            group.allreduce(grad)
    except bitopk.errors.CommunicationError as error:
        report(error)
        return
    sys.exit("nobody noticed")


def exit_while_waiting():
    """Rank 0 ends without closing while its engine waits for rank 1, as a script that raised."""
    group = join(bitopk.Compression.topk(0.1))
    grad = {"x": np.ones(2000, np.float32)}
    group.allreduce(grad)
    if RANK == 0:
        globals()["kept"] = (group, group.allreduce_async(grad))
        time.sleep(0.3)
        return
    time.sleep(12)
    os._exit(0)


def exit_without_closing():
    """End with a group that lives on in a module, and that is idle."""
    group = join(bitopk.Compression.topk(0.1))
    group.allreduce({"x": np.ones(2000, np.float32)})
    globals()["kept"] = group
    print("done")


def destroy_first():
    """Destroy all process groups before the engine is closed, and make another step."""
    grad = {"x": np.ones(2000, np.float32)}
    with join(bitopk.Compression.topk(0.1)) as group:
        group.allreduce(grad)
        dist.destroy_process_group()
        try:
            group.allreduce(grad)
        except bitopk.errors.CommunicationError as error:
            report(error)
    print("done")


def busy_program():
    """Use the default group from two threads while the engine works: nothing is mixed up."""
    import torch

    spec = bitopk.Compression.topk(0.05, exchange="sharded")
    other = dist.new_group()
    stop = torch.zeros(1)

    def reduce_all_the_time():
        while not stop.item():
            value = torch.full((1000,), float(RANK))
            stop_now = torch.tensor(float(done.is_set()))
            dist.all_reduce(value, group=other)
            dist.all_reduce(stop_now, group=other)
            assert value[0].item() == WORLD_SIZE * (WORLD_SIZE - 1) / 2
            stop.fill_(float(stop_now.item() == WORLD_SIZE))

    done = threading.Event()
    thread = threading.Thread(target=reduce_all_the_time)
    with join(spec) as group:
        thread.start()
        check_steps(group, bitopk.LocalGroup(group.size, spec), 6)
        done.set()
        thread.join(60)
        assert not thread.is_alive()
    print("all equal")


def collectives():
    """Call what is lent as the engine does, in both ways that all_to_all has."""
    for backend in ("gloo", "another"):
        lender = lent.TorchCollectives(lent.own_process_group(timeout=20.0))
        lender.backend = backend
        check_collectives(lender)
        lender.close()
        lender.close()
    error = error_of(lambda: lender.all_reduce(np.zeros(3, np.float32), "late", 1.0, bool))
    assert "late: the lent collectives are closed" in str(error)
    print("all equal")


def check_collectives(lender):
    """Check results with parts that are empty, uneven and large."""
    rest = ("test", 20.0, bool)
    for unit in (0, 1, 1000, 100_000):

        def part(source, target, unit=unit):
            count = unit * ((source + 2 * target) % 3)
            return (np.arange(count) * (source + 1) + target).astype(np.uint8).tobytes()

        parts = [memoryview(part(RANK, r)) for r in range(WORLD_SIZE)]
        expected = [part(r, RANK) for r in range(WORLD_SIZE)]
        out = lender.all_to_all(parts, [len(x) for x in expected], *rest)
        assert [bytes(x) for x in out] == expected

        expected = [part(r, 1) for r in range(WORLD_SIZE)]
        if max(map(len, expected)) > 0:  # the engine never gathers nothing
            sizes = [len(x) for x in expected]
            out = lender.all_gather(expected[RANK], sizes, *rest)
            assert [bytes(x) for x in out] == expected

    counts = np.array([RANK + 1, -1, 2**62], np.int64)
    lender.all_reduce(counts, *rest)
    total = WORLD_SIZE * (WORLD_SIZE + 1) // 2
    wrapped = np.array([2**62 * WORLD_SIZE % 2**64], np.uint64).view(np.int64)[0]
    assert counts.tolist() == [total, -WORLD_SIZE, wrapped]
    values = np.full(70_000, RANK + 0.5, np.float32)
    lender.all_reduce(values, *rest)
    assert_bits(values, np.full(70_000, total - WORLD_SIZE / 2, np.float32), "all_reduce")


def main():
    """Run one mode."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['TORCH_STORE']}",
        rank=RANK,
        world_size=WORLD_SIZE,
    )
    globals()[sys.argv[1]](*sys.argv[2:])


if __name__ == "__main__":
    main()
