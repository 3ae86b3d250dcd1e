# SPDX-License-Identifier: Apache-2.0
"""bitopk for PyTorch programs: `Reducer`, for training loops of any kind."""

from bitopk._frameworks import require

require("torch", "PyTorch", "bitopk.torch")

from bitopk.torch.reducer import Reducer, Work  # noqa: E402

__all__ = ["Reducer", "Work"]
