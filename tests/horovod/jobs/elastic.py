# SPDX-License-Identifier: Apache-2.0
"""One worker of an elastic job. Usage: elastic.py FOLDER WAY EXCHANGE.

Worker "127.0.0.1" kills itself in the middle of step 7. At step 14 the job asks for the host that
joins, and at step 24 all are done. Every worker writes what it saw to FOLDER/events.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import bitopk
import bitopk.horovod
import bitopk.horovod.elastic
import horovod.torch as hvd
import numpy as np
import torch

LAST_STEP = 24
DEATH_STEP = 7
JOIN_STEP = 14


def main():
    """Train until LAST_STEP."""
    folder, way, exchange = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    hvd.init()
    host = os.environ["HOROVOD_HOSTNAME"]

    def note(event, **fields):
        line = json.dumps({"event": event, "host": host, "rank": hvd.rank(), **fields})
        with open(folder / "events", "a", encoding="utf-8") as file:
            file.write(line + "\n")

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 300), torch.nn.ReLU(), torch.nn.Linear(300, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    spec = bitopk.Compression.topk(0.05, exchange=exchange, dense_below=0)
    if way == "compression":
        compression = bitopk.horovod.compression(spec, model.named_parameters())
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), compression=compression
        )
        memories = compression.bitopk
    else:
        optimizer = bitopk.horovod.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), compression=spec
        )
        memories = optimizer.bitopk
    state = bitopk.horovod.elastic.TorchState(model=model, optimizer=optimizer, step=0)
    committed = {}

    @hvd.elastic.run
    def train(state):
        note("start", size=hvd.size(), step=state.step)
        fresh = True
        while state.step < LAST_STEP:
            generator = torch.Generator().manual_seed(1000 * state.step + hvd.rank())
            x = torch.randn(16, 20, generator=generator)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long()).backward()
            if state.step == DEATH_STEP and host == "127.0.0.1":
                note("dies", step=state.step)
                os.kill(os.getpid(), signal.SIGKILL)  # the others wait for it in step()
            if fresh:
                note_memories(state, memories, committed, note, optimizer)
                fresh = False
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
            state.step += 1
            if state.step == JOIN_STEP and hvd.rank() == 0:
                (folder / "join").touch()
            if state.step == JOIN_STEP:
                time.sleep(3)  # the driver looks once a second
            committed["server"] = {n: a.copy() for n, a in memories.server_memory().items()}
            committed["worker"] = memories.worker_memory()
            committed["size"] = hvd.size()
            state.commit()

    train(state)
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    everyone = hvd.allgather(flat[None], name="result")
    note("end", size=hvd.size(), step=state.step, equal=bool((everyone == flat).all()))


def note_memories(state, memories, committed, note, optimizer):
    """Compare what the new world started from with the last commit of the old one."""
    # The step that is under way has connected and loaded; it must not count.
    optimizer.synchronize()
    memories.rollback()
    server, worker = memories.server_memory(), memories.worker_memory()
    fields = {"has_commit": bool(committed)}
    if committed:
        factor = np.float32(hvd.size() / committed["size"])
        fields["server_equal"] = all(
            np.array_equal(server[name], array) for name, array in committed["server"].items()
        )
        fields["worker_equal"] = all(
            np.array_equal(worker[name], array * factor)
            for name, array in committed["worker"].items()
        )
    else:
        fields["worker_zero"] = not any(array.any() for array in worker.values())
    fields["server_nonzero"] = any(bool(array.any()) for array in server.values())
    note("memories", size=hvd.size(), step=state.step, **fields)


if __name__ == "__main__":
    main()
