# SPDX-License-Identifier: Apache-2.0
"""PyTorch: `Reducer`, for any training loop."""
