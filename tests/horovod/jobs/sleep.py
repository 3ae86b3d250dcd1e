# SPDX-License-Identifier: Apache-2.0
"""One rank that says its process number and never ends."""

import os
import time

print(f"process {os.getpid()}", flush=True)
while True:
    time.sleep(1)
