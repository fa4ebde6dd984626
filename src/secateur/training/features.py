"""Learn from the features of another network too: from what enters the layer that gives the scores."""

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
"""Features that vary by less are constant, and do not count."""


@dataclass(frozen=True)
class Features:
    """A tensor in the forward pass of a network, compared with the same one of its teacher.

    module: its name in both.
    entering: whether the tensor is what the module is given, instead of what it gives.
    axis: of the channels.
    own, target: the channels that are left, as places in the network's tensor and in the teacher's.
    weight: of the distance, beside that of the scores.
    """

    module: str
    entering: bool
    axis: int
    own: Tensor
    target: Tensor
    weight: float

    @contextmanager
    def watched(self, model: nn.Module) -> Iterator[list[Any]]:
        """A list of the tensors of each call of the module."""
        found: list[Any] = []
        module = model.get_submodule(self.module)

        def enters(module: nn.Module, args: Any) -> None:
            found.append(args[0] if args else None)

        def leaves(module: nn.Module, args: Any, given: Any) -> None:
            found.append(given)

        hook = module.register_forward_pre_hook(enters) if self.entering else module.register_forward_hook(leaves)
        try:
            yield found
        finally:
            hook.remove()

    def last(self, found: list[Any]) -> Tensor:
        """Of one forward pass of the network."""
        if not found or not isinstance(found[-1], Tensor):
            got = type(found[-1]).__name__ if found else "no call"
            raise InvalidData(
                f"features of {self.module} cannot be compared", got=got, wanted="a tensor", remedy=WITHOUT
            )
        return found[-1]

    def distance(self, own: Tensor, target: Tensor) -> Tensor:
        """The mean square of the difference, relative to the variance of the target, times the weight."""
        if own.dim() != target.dim() or self._others(own) != self._others(target):
            got, wanted = tuple(own.shape), f"{tuple(target.shape)}, as the teacher's"
            raise InvalidData(f"features of {self.module} cannot be compared", got=got, wanted=wanted, remedy=WITHOUT)
        own = own.index_select(self.axis, self.own).float()
        target = target.index_select(self.axis, self.target).float()
        varies = target.var(correction=0)
        far = (own - target).square().mean() / varies.clamp_min(TINY)
        return self.weight * torch.where(varies > TINY, far, torch.zeros_like(far))

    def _others(self, tensor: Tensor) -> list[int]:
        """The sizes of the other axes."""
        sizes = list(tensor.shape)
        del sizes[self.axis]
        return sizes
