# SPDX-License-Identifier: Apache-2.0
"""Fashion-MNIST and the MLP of [ZDL22], for the demo and the examples.

References
----------
.. [ZDL22] W. Zou, H. De Sterck, J. Liu, arXiv 2209.15203.
"""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

FILES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)
DEBIAN_DATA = Path("/usr/share/datasets/fashion-mnist")


def load_data(folder: Path) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """Read images and labels of both sets.

    Parameters
    ----------
    folder : Path
        Where the four files are.

    Returns
    -------
    train_set, test_set : (Tensor, Tensor)
        Images, shape (n, 784), float32, standardised by the mean and spread of the training set;
        labels, shape (n,), int64.
    """
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        sys.exit(
            f"Fashion-MNIST: {', '.join(missing)} not found in {folder}. Install the Debian "
            f"package dataset-fashion-mnist, or give --data DIR with the four files "
            f"{', '.join(FILES)}."
        )
    train_images, train_labels, test_images, test_labels = (read_idx(folder / n) for n in FILES)
    mean, spread = train_images.mean(), train_images.std()

    def as_tensors(images: np.ndarray, labels: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        flat = images.reshape(len(images), -1).astype(np.float32)
        standardised = (flat - np.float32(mean)) / np.float32(spread)
        return torch.from_numpy(standardised), torch.from_numpy(labels.astype(np.int64))

    return as_tensors(train_images, train_labels), as_tensors(test_images, test_labels)


def read_idx(path: Path) -> np.ndarray:
    """Read one file of the idx format with unsigned bytes: magic, sizes (big-endian), data."""
    with gzip.open(path, "rb") as file:
        content = file.read()
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        sys.exit(f"{path}: not an idx file of unsigned bytes")
    num_dimensions = content[3]
    shape = np.frombuffer(content, ">u4", num_dimensions, offset=4)
    data = np.frombuffer(content, np.uint8, offset=4 + 4 * num_dimensions)
    if data.size != np.prod(shape, dtype=np.int64):
        sys.exit(f"{path}: {data.size} bytes of data, but its header says {shape.tolist()}")
    return data.reshape(shape)


def make_model(seed: int) -> nn.Module:
    """Build the MLP of the paper; the same weights on every rank."""
    torch.manual_seed(seed)
    sizes = (784, 256, 128, 64, 10)
    layers: list[nn.Module] = []
    for inputs, outputs in zip(sizes, sizes[1:]):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1], nn.LogSoftmax(dim=1))


@torch.no_grad()
def accuracy(model: nn.Module, test_set: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Return the per cent of test samples that the model classifies rightly."""
    images, labels = test_set
    return 100.0 * (model(images).argmax(dim=1) == labels).float().mean().item()
