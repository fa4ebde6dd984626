"""Learn from the features of another network too: from what its last layer before the scores gives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from secateur.errors import InvalidData

WITHOUT = "Leave out distill_features"
TINY = 1e-12
"""Variance of features that are constant."""


@dataclass(frozen=True)
class Features:
    """What one layer gives, compared between a network and its teacher.

    layer: its name in both.
    own, target: the channels that are left, as places in the network's layer and in the teacher's.
    weight: of the distance in the loss.
    """

    layer: str
    own: Tensor
    target: Tensor
    weight: float

    @contextmanager
    def watched(self, model: nn.Module) -> Iterator[list[Tensor]]:
        """A list of what the layer gives in each call."""
        found: list[Tensor] = []

        def see(module: nn.Module, args: Any, given: Tensor) -> None:
            found.append(given)

        handle = model.get_submodule(self.layer).register_forward_hook(see)
        try:
            yield found
        finally:
            handle.remove()

    def distance(self, own: list[Tensor], target: list[Tensor]) -> Tensor:
        """The mean square of the difference, relative to the variance of the target, times the weight."""
        if not own or len(own) != len(target):
            got = f"{len(own)} calls in the network, {len(target)} in its teacher"
            raise InvalidData(f"features of {self.layer} cannot be compared", got=got, wanted="as many", remedy=WITHOUT)
        terms = [self._term(one.float(), other.float()) for one, other in zip(own, target, strict=True)]
        return self.weight * torch.stack(terms).mean()

    def _term(self, own: Tensor, target: Tensor) -> Tensor:
        own, target = own.index_select(1, self.own), target.index_select(1, self.target)
        if own.shape != target.shape:
            got, wanted = tuple(own.shape), f"{tuple(target.shape)}, as the teacher's"
            raise InvalidData(f"features of {self.layer} cannot be compared", got=got, wanted=wanted, remedy=WITHOUT)
        return (own - target).square().mean() / target.var(correction=0).clamp_min(TINY)
