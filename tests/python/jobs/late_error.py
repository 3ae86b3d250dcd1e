# SPDX-License-Identifier: Apache-2.0
"""One rank whose step fails while its memory is gathered. Usage: late_error.py SPEC."""

import sys

import bitopk
import numpy as np
from bitopk import Compression  # noqa: F401 (what SPEC is made of)
from bitopk.errors import NonFiniteGradientError

with bitopk.init(eval(sys.argv[1])) as group:
    group.allreduce({"x": np.ones(4, np.float32)})
    work = group.allreduce_async({"x": np.float32([np.nan, 1, 1, 1])})
    group.server_memory()
    for _ in range(2):
        try:
            work.wait()
            raise AssertionError("no error")
        except NonFiniteGradientError:
            pass
