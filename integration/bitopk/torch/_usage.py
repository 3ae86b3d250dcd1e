# SPDX-License-Identifier: Apache-2.0
"""`Usage`: which parameters backward passes used; for DDP, which leaves out what no rank used.

With ``find_unused_parameters=True`` or ``static_graph=True`` DDP does not touch the gradient of a
parameter that no rank used, whatever a hook returns for it. What the server sent down for it would
be lost; so the ranks tell each other what they used, and what was not is given back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

__all__ = ["USED", "Usage"]

# Names of parameters have no empty parts. Registered as float64, which travels dense under any
# rule.
USED = "bitopk..used"


class Usage:
    """Notes, by name, the parameters that got a gradient since the last `clear`.

    DDP's own rule: backward passes under ``no_sync()`` count too, for the step that carries them.

    Parameters
    ----------
    parameters : dict of str to Tensor
        Watched until `close`. One that needs no gradient is taken to be used.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._used: set[str] = set()
        self._always = {name for name, p in parameters.items() if not p.requires_grad}
        self._hooks = [
            p.register_hook(self._noting(name)) for name, p in parameters.items() if p.requires_grad
        ]

    def _noting(self, name: str) -> Callable[[torch.Tensor], None]:
        def note(gradient: torch.Tensor) -> None:
            self._used.add(name)

        return note

    def __contains__(self, name: object) -> bool:
        """Tell whether this rank used a parameter."""
        return name in self._used or name in self._always

    def vector(self, names: Sequence[str]) -> torch.Tensor:
        """Return 1 for each name that this rank used, else 0; shape (len(names),), float64."""
        return torch.tensor([float(name in self) for name in names], dtype=torch.float64)

    @staticmethod
    def unused(names: Iterable[str], mean: torch.Tensor) -> list[str]:
        """Return the names that no rank used, from the mean of all ranks' vectors."""
        if bool(mean.all()):
            return []
        return [name for name, value in zip(names, mean.tolist()) if value == 0.0]

    def clear(self) -> None:
        """Start a new step."""
        self._used.clear()

    def close(self) -> None:
        """Watch no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
