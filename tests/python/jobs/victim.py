# SPDX-License-Identifier: Apache-2.0
"""One rank of a job in which one rank dies or stops inside a step.

Usage: victim.py SIGNAL VICTIM TIMEOUT EXCHANGE. The victim gets the signal while it communicates;
every other rank prints the error and how long it waited, and ends with status 7.
"""

import os
import signal
import sys
import threading
import time

import bitopk
import numpy as np


def main():
    """Step until somebody is missing."""
    number, victim, timeout = getattr(signal, sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    spec = bitopk.Compression.topk(0.1, exchange=sys.argv[4])
    with bitopk.init(spec, timeout=timeout) as group:
        grad = {
            f"t{i}": np.random.default_rng(i).standard_normal(200_000).astype("f4")
            for i in range(4)
        }
        group.allreduce(grad)
        if group.rank == victim:
            threading.Timer(0.3, os.kill, (os.getpid(), number)).start()
        last = time.monotonic()
        try:
            while True:
                group.allreduce(grad)
                last = time.monotonic()
        except bitopk.errors.CommunicationError as error:
            waited = time.monotonic() - last
            print(f"waited {waited:.1f} s, CommunicationError: {error}".replace("\n", " "))
            sys.exit(7)


if __name__ == "__main__":
    main()
