# SPDX-License-Identifier: Apache-2.0
"""The environment of ./run test torch2 is what its pins say, and bitopk works in it."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import bitopk
import numpy as np
import pytest

torch = pytest.importorskip("torch", minversion="2")

ROOT = Path(__file__).resolve().parents[2]
PINS = dict(
    line.split("==")
    for line in (ROOT / "packaging/requirements-torch2.txt").read_text(encoding="utf-8").split("\n")
    if "==" in line
)


@pytest.mark.parametrize("package", PINS)
def test_has_the_pinned_version(package):
    assert importlib.metadata.version(package) == PINS[package]


@pytest.mark.parametrize("module", [torch, np])
def test_takes_nothing_from_the_distribution(module):
    assert Path(module.__file__).is_relative_to(sys.prefix)


def test_runs_the_package_of_the_source_tree():
    assert Path(bitopk.__file__).is_relative_to(ROOT / "integration")


def test_a_gradient_of_this_pytorch_goes_through_the_engine():
    group = bitopk.LocalGroup(2, bitopk.Compression.topk(k=1, dense_below=0))
    parameter = torch.nn.Parameter(torch.tensor([1.0, -3.0, 2.0]))
    (parameter * parameter).sum().backward()
    for out in group.allreduce([{"p": parameter.grad}] * 2):
        assert torch.equal(out["p"], torch.tensor([0.0, -6.0, 0.0]))


def test_arrays_of_the_extension_have_the_entries_of_numpy_2_in_place():
    # pybind11 before 2.12 reads an element size of 0, and with it strides of 0, from NumPy 2.
    indices, values = bitopk.topk(np.arange(100, dtype=np.float32), 4)
    assert indices.tolist() == [96, 97, 98, 99]
    assert values.tolist() == [96.0, 97.0, 98.0, 99.0]
