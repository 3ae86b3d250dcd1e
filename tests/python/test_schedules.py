# SPDX-License-Identifier: Apache-2.0
"""Densities as functions of the step, alone and in a session."""

from __future__ import annotations

import time

import numpy as np
import pytest
from bitopk import Compression, _core, schedules
from bitopk.errors import InvalidArgumentError

torch = pytest.importorskip("torch")
session_module = pytest.importorskip("bitopk.torch._session")


def one_rank(config):
    """Connect a world of one."""
    return _core.in_process_engines(1, config, 30.0)[0], "one rank"


def make_session(**options):
    """Return a session with one tensor of 1000 entries."""
    spec = Compression.topk(0.5, dense_below=0)
    return session_module.Session(spec, [("x", (1000,), torch.float32)], one_rank, **options)


def entries(session, seed=0):
    """Make a step and return how many entries came back."""
    gradient = torch.from_numpy(np.random.default_rng(seed).standard_normal(1000, np.float32))
    session.submit("x", gradient)
    session.finish()
    return int(torch.count_nonzero(gradient))


def test_the_warmup_ends_at_the_density():
    schedule = schedules.exponential_warmup(0.001, 4)
    assert schedule(0) == 0.25
    assert schedule(2) == pytest.approx((0.25 * 0.001) ** 0.5)
    assert [schedule(step) for step in (4, 5, 1000)] == [0.001] * 3
    assert schedules.exponential_warmup(0.01, 0)(0) == 0.01
    assert schedules.constant(0.3)(17) == 0.3


@pytest.mark.parametrize(
    "make",
    [
        lambda: schedules.constant(1),
        lambda: schedules.constant(0.0),
        lambda: schedules.exponential_warmup(0.1, -1),
        lambda: schedules.exponential_warmup(0.1, 2.5),
        lambda: schedules.exponential_warmup(0.1, 2, initial=2.0),
    ],
)
def test_values_that_make_no_sense_are_refused(make):
    with pytest.raises(InvalidArgumentError, match=r"schedule|exponential_warmup"):
        make()


def test_a_session_follows_its_schedule_by_committed_steps():
    asked = []

    def schedule(step):
        asked.append(step)
        return (0.1, 0.05) if step < 2 else 0.01

    session = make_session(schedule=schedule)
    assert entries(session) == 50
    session.rollback()  # does not count
    assert [entries(session, seed) for seed in range(3)] == [50, 50, 10]
    assert asked == [0, 0, 1, 2]


def test_a_schedule_that_gives_no_density_is_an_error_and_the_next_step_works():
    session = make_session(schedule=lambda step: 3)
    with pytest.raises(InvalidArgumentError, match="schedule: density"):
        session.submit("x", torch.zeros(1000))
    session.set_density(0.2)  # ends the schedule
    assert entries(session) == 200


def test_a_scale_that_is_no_number_for_a_while_keeps_its_last_value():
    rates = iter([0.5, 0.0, 0.25])
    session = make_session(scale=lambda: 1.0 / next(rates))
    for _ in range(3):
        entries(session)
    assert session.engine.engine.save_state()["scale"] == 4.0


@pytest.mark.parametrize("way", ["scale", "tensor_scales"])
def test_a_learning_rate_that_starts_at_zero_leaves_nothing_that_weighs(way):
    rate = {"now": 0.0}
    ask = (lambda: 1.0 / rate["now"]) if way == "scale" else None
    by_tensor = (lambda: [1.0 / rate["now"] if rate["now"] else float("inf")]) if not ask else None
    session = make_session(scale=ask, tensor_scales=by_tensor)
    entries(session)  # at rate 0 the model does not move
    rate["now"] = 1e-3
    gradient = torch.zeros(1000)
    session.submit("x", gradient)
    session.finish()
    assert float(gradient.abs().max()) < 1e-12


def test_a_rate_of_zero_after_loading_keeps_the_scale_of_the_state():
    rate = {"now": 0.1}
    session = make_session(scale=lambda: 1.0 / rate["now"])
    entries(session)
    state, again = session.state_dict(), make_session(scale=lambda: 1.0 / rate["now"])
    again.load_state_dict(state)
    rate["now"] = 0.0
    for seed in range(3):
        assert entries(again, seed) == entries(session, seed)
        memory = session.worker_memory()["x"]
        assert again.worker_memory()["x"].tobytes() == memory.tobytes()
    assert again.state_dict()["scale"] == 10.0


def test_tensors_without_entries_do_not_hold_a_step_up():
    spec = Compression.topk(0.5, dense_below=0)
    tensors = [("x", (10,), torch.float32), ("none", (0, 3), torch.float32)]
    session = session_module.Session(spec, tensors, one_rank)
    session.submit("none", torch.zeros(0, 3))
    session.submit("x", torch.ones(10))
    end = time.monotonic() + 10.0
    while not session.is_completed():
        assert time.monotonic() < end
        time.sleep(0.01)
    session.finish()


@pytest.mark.parametrize(
    ("value_format", "dtype"), [("bfloat16", torch.float16), ("float16", torch.bfloat16)]
)
def test_two_different_narrow_formats_are_refused(value_format, dtype):
    spec = Compression.topk(0.5, dense_below=0, value_format=value_format)
    session = session_module.Session(spec, [("x", (10,), dtype)], one_rank)
    with pytest.raises(InvalidArgumentError, match=r'"x" is .*16: its value_format'):
        session.submit("x", torch.ones(10, dtype=dtype))
