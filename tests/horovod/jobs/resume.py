# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: training that goes on from one, and one that moves to another number of ranks.

usage: resume.py save|load FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import bitopk
import horovod.torch as hvd
import numpy as np
import torch
from bitopk import checkpoint
from common import WAYS, Cases, batch, digest, make_model, owner_of, same_on_all_ranks, wrap

SPEC = bitopk.Compression.topk(0.05, dense_below=0, exchange="sharded")
HALF, WHOLE = 10, 20


def make(way: str, seed: int = 1) -> tuple[torch.nn.Module, Any, Any]:
    model = make_model(seed)
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = wrap(way, base, SPEC, model.named_parameters())
    return model, optimizer, torch.optim.lr_scheduler.StepLR(base, 5)


def train(model: torch.nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()


def a_resumed_training_is_the_uninterrupted_one(way: str, folder: Path) -> None:
    path = folder / f"{way}-{hvd.rank()}.pt"
    model, optimizer, _ = make(way)
    train(model, optimizer, range(HALF))
    torch.save({"model": model.state_dict(), "bitopk": owner_of(optimizer).state_dict()}, path)
    # torch 1.13 cannot read the floats of an optimizer's options with weights_only.
    torch.save(optimizer.state_dict(), path.with_suffix(".optimizer"))
    train(model, optimizer, range(HALF, WHOLE))

    resumed, optimizer, _ = make(way, seed=2)
    saved = torch.load(path, weights_only=True)
    resumed.load_state_dict(saved["model"])
    optimizer.load_state_dict(torch.load(path.with_suffix(".optimizer")))
    owner_of(optimizer).load_state_dict(saved["bitopk"])
    train(resumed, optimizer, range(HALF, WHOLE))
    assert digest(resumed) == digest(model)
    same_on_all_ranks(digest(model), "parameters")


def mean_of_memories(owner: Any) -> dict[str, np.ndarray]:
    """Return sum of p_i * m_i over the ranks, in float64."""
    out = {}
    for name, array in owner.worker_memory().items():
        everyone = hvd.allgather(torch.from_numpy(array.reshape(1, -1)).double(), name="test.mean")
        out[name] = everyone.sum(0).numpy() / hvd.size()
    return out


def gathered_on_rank_0(way: str, folder: Path) -> None:
    """Save all parts in one file, and what another number of ranks must find in them."""
    model, optimizer, _ = make(way)
    train(model, optimizer, range(HALF))
    owner = owner_of(optimizer)
    # By the optimizer where it has the memories, by the compressor otherwise.
    whole = checkpoint.gather(optimizer if way != "compression" else optimizer._compression)
    means, server = mean_of_memories(owner), owner.server_memory()
    assert (whole is None) == (hvd.rank() != 0)
    if whole is None:
        return
    assert any(np.any(m) for m in means.values())
    assert any(np.any(m) for m in server.values())
    torch.save(whole, folder / f"whole-{way}.pt")
    np.savez(folder / f"means-{way}.npz", **means)
    np.savez(folder / f"server-{way}.npz", **server)


def loaded_by_other_ranks(way: str, folder: Path) -> None:
    """The mean of the worker memories and the server memory are what they were."""
    model, optimizer, _ = make(way)
    owner = owner_of(optimizer)
    owner.load_state_dict(torch.load(folder / f"whole-{way}.pt", weights_only=True))
    owner.connect()
    means, server = mean_of_memories(owner), owner.server_memory()
    with np.load(folder / f"means-{way}.npz") as expected:
        assert set(expected) == set(means)
        for name in expected:
            np.testing.assert_allclose(means[name], expected[name], rtol=1e-6, atol=1e-9)
    with np.load(folder / f"server-{way}.npz") as expected:
        for name in expected:
            assert server[name].tobytes() == expected[name].tobytes(), name
    train(model, optimizer, range(HALF, WHOLE))
    same_on_all_ranks(digest(model), "parameters")


def main() -> None:
    """Run the cases of one job."""
    hvd.init()
    torch.set_num_threads(1)
    what, folder = sys.argv[1], Path(sys.argv[2])
    cases = Cases()
    for way in WAYS:
        if what == "save":
            cases.run(f"resumed-{way}", a_resumed_training_is_the_uninterrupted_one, way, folder)
            cases.run(f"gathered-{way}", gathered_on_rank_0, way, folder)
        else:
            cases.run(f"loaded-{way}", loaded_by_other_ranks, way, folder)
    cases.close()
    hvd.shutdown()


if __name__ == "__main__":
    main()
