# SPDX-License-Identifier: Apache-2.0
"""Rank 1 is late, once before its step and once within it; the log of the others says so."""

from __future__ import annotations

import logging
import sys
import time

import bitopk
import horovod.torch as hvd
import torch
from common import ParameterBag, backward_exactly, wrap


def main() -> None:
    """Make three steps."""
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    logging.getLogger("bitopk").setLevel(logging.WARNING)
    hvd.init()
    torch.set_num_threads(1)
    bag = ParameterBag({"a": (30,), "b": (40,), "c": (50,)})
    base = torch.optim.SGD(bag.parameters(), lr=0.1)
    spec = bitopk.Compression.topk(0.1, dense_below=0)
    optimizer = wrap("wrapper", base, spec, bag.named_parameters())
    for step in range(3):
        optimizer.zero_grad()
        for number, p in enumerate(bag.parameters()):
            if hvd.rank() == 1 and (step, number) in ((1, 0), (2, 1)):
                time.sleep(2.5)
            backward_exactly(p, torch.ones_like(p))
        optimizer.step()
    hvd.shutdown()


if __name__ == "__main__":
    main()
