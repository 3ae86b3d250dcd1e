# SPDX-License-Identifier: Apache-2.0
"""What `bitopk.horovod.elastic` keeps over worlds that come and go, with ranks as threads."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from bitopk import Compression, _core
from bitopk.horovod import elastic
from bitopk.torch._session import Session

ENTRIES = 6000
SPEC = Compression.topk(0.5, exchange="sharded", dense_below=0)


class Worker:
    """One process of the job."""

    def __init__(self):
        self.engine = None
        tensors = [("w", (ENTRIES,), torch.float32)]
        self.session = Session(SPEC, tensors, lambda config: (self.engine, "a test"))
        self.memories = elastic._Memories(self.session)

    def save(self):
        """Commit, as TorchState does."""
        self.memories.save()
        self.memories.mark_finished()

    def server(self):
        """Return the whole server memory; collective."""
        return self.session.server_memory()["w"]


def together(calls):
    """Run one call per rank at the same time, and return the results."""
    results, errors = [None] * len(calls), []

    def run(number):
        try:
            results[number] = calls[number]()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a rank hangs"
    if errors:
        raise errors[0]
    return results


def connect(workers):
    """Make a new world of these workers."""
    config = workers[0].session._config
    for worker, engine in zip(workers, _core.in_process_engines(len(workers), config, 10.0)):
        worker.engine = engine
    together([worker.session.connect for worker in workers])


def step(workers, seed):
    """Make one step of all."""
    rng = np.random.default_rng(seed)

    def one(worker, gradient):
        worker.session.submit("w", gradient)
        worker.session.finish()

    gradients = [torch.from_numpy(rng.standard_normal(ENTRIES, np.float32)) for _ in workers]
    together([lambda w=w, g=g: one(w, g) for w, g in zip(workers, gradients)])


def die(survivors):
    """Somebody else died: go back to the last commit and let the engine go."""
    for worker in survivors:
        worker.memories.restore()
        worker.memories.reset()


def test_two_deaths_in_a_row_without_a_commit_between_lose_no_server_memory():
    a, b, c = Worker(), Worker(), Worker()
    connect([a, b, c])
    step([a, b, c], 1)
    together([w.save for w in (a, b, c)])
    (before, *_) = together([w.server for w in (a, b, c)])
    die([b, c])  # a is gone
    connect([b, c])
    die([c])  # b, which had the copy of a's share, is gone too
    connect([c])
    assert np.array_equal(c.server(), before)


@pytest.mark.parametrize("first_size", [3, 4])
def test_a_copy_of_an_old_world_is_never_taken_for_one_of_the_new(first_size):
    workers = [Worker() for _ in range(first_size)]
    connect(workers)
    step(workers, 1)
    together([w.save for w in workers])
    survivors = workers[:-1]
    die(survivors)
    new_world = [*survivors, Worker()] if first_size == 3 else survivors
    connect(new_world)
    (handed_out, *_) = together([w.server for w in new_world])
    step(new_world, 2)
    together([w.save for w in new_world])
    (before, *_) = together([w.server for w in new_world])
    assert not np.array_equal(before, handed_out)
    rest = [w for w in new_world if w is not new_world[1]]
    for worker in rest:
        worker.memories.reset()  # hosts were updated: one left after a commit
    connect(rest)
    for server in together([w.server for w in rest]):
        assert np.array_equal(server, before)


def test_a_commit_that_rank_0_could_not_finish_is_not_restored():
    a, b = Worker(), Worker()
    connect([a, b])
    step([a, b], 1)
    together([a.save, b.save])
    (before, _) = together([a.server, b.server])
    step([a, b], 2)
    together([a.memories.save, b.save])  # a dies between its memories and its model
    die([a, b])
    connect([a, b])
    for server in together([a.server, b.server]):
        assert np.array_equal(server, before)


def test_a_checkpoint_loads_into_a_new_elastic_job():
    a = Worker()
    connect([a])
    step([a], 1)
    state = a.session.state_dict()
    memory = a.session.worker_memory()["w"]
    b = Worker()
    b.session.load_state_dict(state)
    connect([b])
    assert memory.any()
    assert np.array_equal(b.session.worker_memory()["w"], memory)
