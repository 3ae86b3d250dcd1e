# SPDX-License-Identifier: Apache-2.0
"""Engines over lent collectives: those of torch.distributed in real processes, and broken ones."""

from __future__ import annotations

import re
import struct
import threading
import time
from pathlib import Path

import bitopk
import numpy as np
import pytest
from bitopk import _core
from bitopk._rank import RankEngine
from bitopk._settings import make_config
from bitopk.group import Group
from ddp_ranks import Job

pytest.importorskip("torch.distributed")


def lent_job(folder: Path, num_ranks: int, *arguments: object) -> Job:
    """Start the ranks of a case of jobs/lent.py."""
    return Job(folder, num_ranks, "lent.py", *arguments)


def run(folder: Path, num_ranks: int, *arguments: object) -> list[str]:
    with lent_job(folder, num_ranks, *arguments) as job:
        return [job.output(rank) for rank in range(num_ranks)]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("exchange", ["allgather", "sharded", "dense"])
def test_steps_equal_those_of_a_local_group(tmp_path, exchange, num_ranks):
    for output in run(tmp_path, num_ranks, "steps", exchange):
        assert "all equal" in output


def test_headers_and_payloads_are_counted(tmp_path):
    for output in run(tmp_path, 3, "same_traffic"):
        assert "same traffic" in output


def test_a_subgroup_has_an_engine_of_its_own(tmp_path):
    for output in run(tmp_path, 3, "subgroup"):
        assert "all equal" in output


def test_collectives_of_the_program_are_not_mixed_up_with_the_engines(tmp_path):
    for output in run(tmp_path, 2, "busy_program"):
        assert "all equal" in output


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_what_is_lent_does_what_it_says(tmp_path, num_ranks):
    for output in run(tmp_path, num_ranks, "collectives"):
        assert "all equal" in output


def test_ranks_that_disagree_on_settings_are_told_both_sides(tmp_path):
    for output in run(tmp_path, 3, "mismatch"):
        assert re.search(r"InvalidArgumentError: .*rank 0 has .*0\.01.*rank 1 has .*0\.02", output)


def test_ranks_in_different_calls_are_told_both_sides(tmp_path):
    for output in run(tmp_path, 2, "different_calls"):
        first, again = output.splitlines()
        assert re.search(r"rank 0\b.*rank 1\b|rank 1\b.*rank 0\b", first), output
        assert "the ranks make different calls" in first
        assert again == first  # the first cause


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("exchange", ["allgather", "sharded", "dense"])
def test_a_killed_rank_ends_the_others_with_an_error(tmp_path, exchange, num_ranks):
    with lent_job(tmp_path, num_ranks, "victim", "SIGKILL", 10, exchange) as job:
        for rank in range(num_ranks - 1):
            output = job.output(rank, status=7, timeout=60)
            assert re.search(rf"CommunicationError: .*\brank.*\b{num_ranks - 1}\b", output), output
            assert float(re.search(r"waited ([\d.]+) s", output)[1]) <= 15.0


@pytest.mark.parametrize("exchange", ["allgather", "sharded"])
def test_a_stopped_rank_ends_the_others_within_the_timeout(tmp_path, exchange):
    with lent_job(tmp_path, 3, "victim", "SIGSTOP", 3, exchange) as job:
        for rank in (0, 1):
            output = job.output(rank, status=7, timeout=60)
            assert re.search(r"CommunicationError: .*no answer within 3 s from .*\b2\b", output), (
                output
            )
            assert 2.9 <= float(re.search(r"waited ([\d.]+) s", output)[1]) <= 8.0


def test_closing_does_not_wait_for_a_peer_and_tells_it(tmp_path):
    with lent_job(tmp_path, 2, "close_while_waiting") as job:
        output = job.output(0, timeout=30)
        assert float(re.search(r"closed within ([\d.]+) s", output)[1]) < 2.0
        begin = time.monotonic()
        assert "CommunicationError" in job.output(1, timeout=60)
        assert time.monotonic() - begin < 10.0  # and not its time-out


def test_a_program_that_ends_while_it_waits_ends(tmp_path):
    with lent_job(tmp_path, 2, "exit_while_waiting") as job:
        assert "Traceback" not in job.output(0, timeout=100)
        assert job.ranks[1].poll() is None  # it goes on for some seconds


def test_a_program_may_destroy_all_groups_first(tmp_path):
    for output in run(tmp_path, 2, "destroy_first"):
        assert output.endswith("done\n")  # torch decides whether its group still works


def test_a_program_that_does_not_close_ends(tmp_path):
    for output in run(tmp_path, 2, "exit_without_closing"):
        assert output == "done\n"


class Mirror:
    """Lends rank 0 of 2 collectives whose other rank sends what rank 0 sends to it."""

    RANK_AT, PAYLOAD_BYTES_AT, LARGEST_AT = 8, 32, 56

    def __init__(self) -> None:
        self.num_calls = 0
        self.num_closes = 0

    def all_to_all(self, parts, sizes, what, timeout, aborted):
        self.num_calls += 1
        reply = bytearray(parts[1])
        if reply.startswith(b"BOTK"):
            struct.pack_into("<I", reply, self.RANK_AT, 1)
            self.change(reply)
        return [parts[0], reply]

    def all_gather(self, part, sizes, what, timeout, aborted):
        self.num_calls += 1
        return [part, part]

    def all_reduce(self, values, what, timeout, aborted):
        self.num_calls += 1
        np.asarray(values)[...] *= 2

    def close(self):
        self.num_closes += 1

    def change(self, record):
        """Break what the other rank sends first."""


def group_over(host, *, exchange="allgather", timeout=20.0):
    config = make_config(bitopk.Compression.topk(0.05, exchange=exchange), 32 << 20)
    return Group(RankEngine(_core.lent_engine(0, 2, timeout, host, config)))


GRADIENT = {"x": np.random.default_rng(0).standard_normal(80_000).astype(np.float32)}


def error_of_steps(host) -> Exception:
    """Fail the first step; the second must say the same."""
    group = group_over(host)
    errors = []
    for _ in range(2):
        with pytest.raises(bitopk.errors.Error) as caught:
            group.allreduce(GRADIENT)
        errors.append(caught.value)
    assert str(errors[0]) == str(errors[1])
    assert host.num_closes == 1
    group.close()
    assert host.num_closes == 1
    return errors[0]


def test_any_object_can_lend():
    host = Mirror()
    local = bitopk.LocalGroup(2, bitopk.Compression.topk(0.05))
    with group_over(host) as group:
        for step in range(3):
            before = host.num_calls
            out = group.allreduce(GRADIENT)["x"]
            # A step has one large message; what the ranks agree on at the start is small.
            assert step == 0 or host.num_calls == before + 2
            assert out.tobytes() == local.allreduce([GRADIENT, GRADIENT])[0]["x"].tobytes()
        assert host.num_closes == 0
    assert host.num_closes == 1


def test_an_exception_of_the_host_is_a_communication_error():
    class Unplugged(Mirror):
        def all_to_all(self, *_):
            raise ValueError("the cable is unplugged")

    error = error_of_steps(Unplugged())
    assert isinstance(error, bitopk.errors.CommunicationError)
    assert "agreement of message 0, step 0: ValueError: the cable is unplugged" in str(error)


@pytest.mark.parametrize(
    "reply", [None, [b""], [b"", b""], [b"", b"x" * 5000], [b"", "text"]], ids=repr
)
def test_a_host_that_returns_nonsense_is_refused(reply):
    class Broken(Mirror):
        def all_to_all(self, *_):
            return reply

    error = error_of_steps(Broken())
    assert isinstance(error, bitopk.errors.CommunicationError)
    assert "agreement of message 0" in str(error)


@pytest.mark.parametrize("num_bytes", [9, 2**20, 2**60])
def test_a_part_beyond_the_limit_is_refused_before_it_is_received(num_bytes):
    class Absurd(Mirror):
        def change(self, record):
            struct.pack_into("<Q", record, self.PAYLOAD_BYTES_AT, num_bytes)
            struct.pack_into("<Q", record, self.LARGEST_AT, num_bytes)

    host = Absurd()
    error = error_of_steps(host)
    assert isinstance(error, bitopk.errors.WireFormatError)
    assert f"rank 1 announces {num_bytes} bytes to rank 0, expected at most 8" in str(error)
    assert host.num_calls == 1


@pytest.mark.parametrize(
    ("offset", "words"),
    [
        (0, "magic number"),
        (4, "version"),
        (8, "says it is from rank"),
        (12, "rank 1 is in agreement of message"),
        (16, "rank 1 is in agreement of message 0, step"),
        (48, "different collective calls"),
        (Mirror.LARGEST_AT, "its largest part has"),
    ],
)
def test_a_damaged_record_is_refused(offset, words):
    class Damaged(Mirror):
        def change(self, record):
            record[offset] ^= 0x0F if offset == self.LARGEST_AT else 1

    assert words in str(error_of_steps(Damaged()))


def test_abort_gives_up_the_call_under_way():
    class Silent(Mirror):
        def all_to_all(self, parts, sizes, what, timeout, aborted):
            while not aborted():
                time.sleep(0.001)
            raise RuntimeError("given up")

    host = Silent()
    group = group_over(host, timeout=1000.0)
    engine = group._rank_engine.engine
    threading.Timer(0.3, engine.abort, ["enough"]).start()
    with pytest.raises(bitopk.errors.CommunicationError, match="rank 0 aborted: enough"):
        group.allreduce(GRADIENT)
    assert host.num_closes == 1
    group.close()


def test_a_wait_names_the_ranks_that_may_be_late():
    class Slow(Mirror):
        def all_to_all(self, *arguments):
            waiting.append(engine.waiting())
            return super().all_to_all(*arguments)

    waiting = []
    group = group_over(Slow())
    engine = group._rank_engine.engine
    group.allreduce(GRADIENT)
    ranks, what, _ = waiting[0]
    assert ranks == [1]
    assert what == "agreement of message 0, step 0"
    assert engine.waiting()[0] == []
    group.close()


@pytest.mark.parametrize(
    ("rank", "size", "timeout"), [(2, 2, 1.0), (-1, 2, 1.0), (0, 0, 1.0), (0, 2, 0.0), (0, 2, -1.0)]
)
def test_bad_arguments_are_refused(rank, size, timeout):
    config = make_config(bitopk.Compression.topk(0.1), 32 << 20)
    with pytest.raises(bitopk.errors.InvalidArgumentError):
        _core.lent_engine(rank, size, timeout, Mirror(), config)
