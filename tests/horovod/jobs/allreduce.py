# SPDX-License-Identifier: Apache-2.0
"""One rank: a plain allreduce of Horovod, without anything of bitopk."""

import horovod.torch as hvd
import torch


def main() -> None:
    """Check the average over the ranks and tell how the ranks are connected."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    average = hvd.allreduce(torch.arange(5.0) + rank, name="x")
    assert torch.equal(average, torch.arange(5.0) + (size - 1) / 2), average
    controller = "MPI" if hvd.mpi_enabled() else "Gloo" if hvd.gloo_enabled() else "nothing"
    print(f"rank {rank} of {size} through {controller}: right", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
