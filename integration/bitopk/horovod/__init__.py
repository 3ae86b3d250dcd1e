# SPDX-License-Identifier: Apache-2.0
"""bitopk under Horovod with PyTorch: one engine, three ways to use it.

- `compression`: an object for ``compression=`` of the unmodified ``hvd.DistributedOptimizer``.
- `DistributedOptimizer`: Horovod's signature, with a density in place of the compressor.
- `attach`: for an optimizer that somebody else wrapped with ``hvd.DistributedOptimizer``.

Connections are made in the first step, through Horovod's own collectives, however it was launched.
"""

from bitopk._frameworks import require

require("horovod.torch", "Horovod with PyTorch", "bitopk.horovod")

from bitopk.horovod._optimizer import DistributedOptimizer, attach  # noqa: E402
from bitopk.horovod._placeholder import compression  # noqa: E402

__all__ = ["DistributedOptimizer", "attach", "compression"]
