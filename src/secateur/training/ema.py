"""A moving average of a network's weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Ema:
    """average = decay * average + (1 - decay) * weights, after every step; buffers are averaged too."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.weights = _tensors(model)
        self.average = [tensor.detach().clone() for tensor in self.weights]

    @torch.no_grad()
    def update(self) -> None:
        torch._foreach_lerp_(  # pyright: ignore[reportPrivateImportUsage]
            self.average, [w.detach() for w in self.weights], 1 - self.decay
        )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the model the average while the context lasts."""
        self.swap_()
        try:
            yield
        finally:
            self.swap_()

    @torch.no_grad()
    def swap_(self) -> None:
        """Exchange the weights and their average."""
        for weight, average in zip(self.weights, self.average, strict=True):
            kept = weight.detach().clone()
            weight.copy_(average)
            average.copy_(kept)


def _tensors(model: nn.Module) -> list[Tensor]:
    return [t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]
