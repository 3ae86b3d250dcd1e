# SPDX-License-Identifier: Apache-2.0
"""Cleans up after a launcher that was killed: stops process groups, removes the file store.

Run by `bitopk.launch` as ``python -I -S _launch_guard.py DIRECTORY`` with a pipe on standard input.
The launcher writes ``+PGID`` when it starts a rank and ``-PGID`` when it has stopped it. The pipe
closes when the launcher ends, however it ends; whatever group is still listed then is killed. The
ranks themselves die by PR_SET_PDEATHSIG already; this reaches the processes they started.
"""

import os
import shutil
import signal
import sys


def main() -> None:
    """Follow the launcher's list of groups until it ends, then clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the launcher's end is the only signal that counts
    groups = set()
    for line in sys.stdin:
        sign, group = line[0], int(line[1:])
        (groups.add if sign == "+" else groups.discard)(group)
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except OSError:
            pass  # gone already
    shutil.rmtree(sys.argv[1], ignore_errors=True)


main()
