# SPDX-License-Identifier: Apache-2.0
"""bitopk for PyTorch programs; imports torch."""
