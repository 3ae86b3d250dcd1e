# SPDX-License-Identifier: Apache-2.0
"""Elastic Horovod: a worker dies in the middle of a step, another joins, the memories survive."""

from __future__ import annotations

import json
import socket

import pytest
from jobs_support import elastic_job


@pytest.mark.parametrize(
    ("way", "exchange"), [("optimizer", "sharded"), ("compression", "allgather")]
)
def test_training_goes_on_when_a_worker_dies_and_when_one_joins(tmp_path, way, exchange):
    # Horovod gives up a host on which a worker failed, so each worker has a host of its own: three
    # names of this machine.
    hosts = tmp_path / "hosts.sh"
    hosts.write_text(
        "#!/bin/sh\necho localhost:2\necho 127.0.0.1:1\n"
        f"if [ -e {tmp_path}/join ]; then echo {socket.gethostname()}:1; fi\n"
    )
    hosts.chmod(0o755)
    done = elastic_job(hosts, "elastic.py", tmp_path, way, exchange, min_ranks=2, max_ranks=4)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    events = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    text = "\n".join(map(str, events))
    sizes = [event["size"] for event in events if event["event"] == "start"]
    assert sorted(set(sizes)) == [2, 3], text
    assert [event["host"] for event in events if event["event"] == "dies"] == ["127.0.0.1"], text

    memories = [event for event in events if event["event"] == "memories"]
    after_death = [event for event in memories if event["size"] == 2]
    assert len(after_death) == 2, text
    for event in after_death:
        assert event["step"] == 7, text
        assert event["server_equal"], text
        assert event["worker_equal"], text
    after_join = [event for event in memories if event["size"] == 3 and event["step"] > 7]
    assert len(after_join) == 3, text
    for event in after_join:
        assert event["server_nonzero"], text
        if event["has_commit"]:
            assert event["server_equal"], text
            assert event["worker_equal"], text
        else:
            assert event["worker_zero"], text
    assert sum(not event["has_commit"] for event in after_join) == 1, text

    ends = [event for event in events if event["event"] == "end"]
    assert len(ends) == 3, text
    assert all(event["equal"] and event["step"] == 24 and event["size"] == 3 for event in ends), (
        text
    )


def test_an_elastic_job_without_the_state_is_told_what_to_use(monkeypatch):
    import bitopk.horovod.elastic
    import horovod.torch as hvd
    import torch
    from bitopk.errors import InvalidArgumentError

    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    hvd.init()
    model = torch.nn.Linear(3, 2)
    compression = bitopk.horovod.compression(0.5, model.named_parameters())
    with pytest.raises(InvalidArgumentError, match=r"bitopk\.horovod\.elastic\.TorchState"):
        compression.bitopk.connect()
    with pytest.raises(ValueError, match=r"use hvd\.elastic\.TorchState"):
        bitopk.horovod.elastic.TorchState(model=model, optimizer=None)
