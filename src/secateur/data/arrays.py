"""Datasets that fit in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Arrays:
    """Images and labels, handed out in batches; the last one may be smaller.

    shuffle: in an order drawn anew for each pass, from torch's random numbers.
    augment: what is done to a batch of images on the way.
    """

    images: Tensor
    labels: Tensor
    batch_size: int
    shuffle: bool = False
    augment: Callable[[Tensor], Tensor] | None = None

    def __len__(self) -> int:
        return -(-self.labels.shape[0] // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        size, device = self.labels.shape[0], self.labels.device
        order = torch.randperm(size, device=device) if self.shuffle else torch.arange(size, device=device)
        for indices in order.split(self.batch_size):
            images = self.images[indices]
            yield (self.augment(images) if self.augment else images), self.labels[indices]

    def subset(self, fraction: float, per_class: int | None, generator: torch.Generator) -> Arrays:
        """A random part: a fraction of all, or this many examples of every class."""
        size = self.labels.shape[0]
        order = torch.randperm(size, generator=generator, device="cpu").to(self.labels.device)
        if per_class is None:
            chosen = order[: max(1, round(fraction * size))]
        else:
            labels = self.labels[order]
            chosen = torch.cat([order[labels == label][:per_class] for label in labels.unique()])
        return replace(self, images=self.images[chosen], labels=self.labels[chosen])


def random_shift(images: Tensor, padding: int) -> Tensor:
    """Each image moved by up to `padding` pixels either way, with zeros moving in."""
    count, _, height, width = images.shape
    padded = torch.nn.functional.pad(images, [padding] * 4)
    rows = torch.randint(2 * padding + 1, (count, 1), device=images.device) + torch.arange(height, device=images.device)
    columns = torch.randint(2 * padding + 1, (count, 1), device=images.device) + torch.arange(
        width, device=images.device
    )
    batch = torch.arange(count, device=images.device)[:, None, None]
    return padded.movedim(1, -1)[batch, rows[:, :, None], columns[:, None, :]].movedim(-1, 1).contiguous()
