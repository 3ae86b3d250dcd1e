# SPDX-License-Identifier: Apache-2.0
"""One rank of a job whose last rank dies within a backward pass. Usage: ddp_victim.py OPTION..."""

import os
import signal
import sys
import time

import bitopk
from ddp_models import RANK, WORLD_SIZE, Branching, hooked, make, start, train


def main():
    """Train until somebody dies; say what the others are told, and how soon."""
    transport, *options = sys.argv[1:]
    start()
    model, state = hooked(
        make(Branching), options=dict.fromkeys(options, True), transport=transport, timeout=60.0
    )
    train(model, range(3))
    if RANK == WORLD_SIZE - 1:
        model.module.branch.weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    begin = time.monotonic()
    try:
        train(model, range(3, 1000))
    except bitopk.CommunicationError as error:
        print(f"after {time.monotonic() - begin:.1f} s CommunicationError: {error}", flush=True)
        memories = state.worker_memory()  # can still be saved
        assert memories["first.weight"].any()
        sys.exit(7)


if __name__ == "__main__":
    main()
