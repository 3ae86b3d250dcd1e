# SPDX-License-Identifier: Apache-2.0
"""First program of every rank: ties its life to the launcher's, then becomes the training script.

Run by `bitopk.launch` as a file in an isolated interpreter, so that nothing is imported twice:
``python -I -S _launch_child.py LAUNCHER_PID COMMAND...``. The request to be killed when the
launcher dies survives exec, so the training script is an ordinary Python process.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ask the kernel for SIGKILL at the launcher's death, then replace this program."""
    launcher_pid = int(sys.argv[1])
    command = sys.argv[2:]
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != launcher_pid:  # it died before the request was made
            os.kill(os.getpid(), signal.SIGKILL)
    os.execv(command[0], command)


main()
