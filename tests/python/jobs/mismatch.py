# SPDX-License-Identifier: Apache-2.0
"""One rank of a job whose ranks disagree. Usage: mismatch.py KIND; prints the error it got."""

import os
import sys

import bitopk
import numpy as np


def main():
    """Make rank 1 different and report what this rank is told."""
    kind, is_odd = sys.argv[1], os.environ["RANK"] == "1"
    density = 0.02 if kind == "density" and is_odd else 0.01
    value_format = "float16" if kind == "value_format" and is_odd else "float32"
    num_entries = 2001 if kind == "size" and is_odd else 2000
    name = "b" if kind == "name" and is_odd else "a"
    op = "sum" if kind == "op" and is_odd else "average"
    spec = bitopk.Compression.topk(density, value_format=value_format)
    try:
        with bitopk.init(spec, timeout=20.0) as group:
            group.allreduce({name: np.ones(num_entries, np.float32)}, op=op)
    except bitopk.errors.Error as error:
        print(f"{type(error).__name__}: {error}".replace("\n", " "))
        return
    sys.exit("nobody noticed")


if __name__ == "__main__":
    main()
