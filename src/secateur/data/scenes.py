"""Images with a label map each that fit in memory and live on the device, where whole batches are augmented at once."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from secateur.data.maps import VOID, Maps
from secateur.data.photos import IMAGENET_MEAN, IMAGENET_STD
from secateur.data.workers import num_cores
from secateur.errors import InvalidSetting
from secateur.training.batches import check_batch_size, choose, without_single
from secateur.training.shards import BatchShard

NUMBERS = 7
"""Random numbers for each image: its colours, its size, its place, and the mirror."""


@dataclass(frozen=True, repr=False, eq=False)
class Scenes:
    """Images, images x colour x height x width of uint8, and the class of every pixel, in batches.

    shuffle: in an order drawn for each pass. This and all augmentation use torch's global random numbers.
    scale: each image is enlarged by a factor between these two, and cut at a random place, or shrunk, and laid at a
        random place; what is outside is void.
    flip: each image is mirrored left to right with probability 1/2.
    jitter: brightness, contrast and saturation are multiplied by factors that differ from 1 by up to so much.
    channels_last: the memory format in which convolutions on GPUs are fastest.
    """

    images: Tensor
    labels: Tensor
    batch_size: int
    shuffle: bool = False
    scale: tuple[float, float] = (1.0, 1.0)
    flip: bool = False
    jitter: float = 0.0
    channels_last: bool = False

    def __post_init__(self) -> None:
        check_batch_size(self.batch_size)

    def __len__(self) -> int:
        return len(self.shard(0, 1))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.shard(0, 1))

    def to(self, device: torch.device | str) -> Scenes:
        """The same dataset on that device."""
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))

    def shard(self, rank: int, world: int) -> ScenesShard:
        """The part of each batch for process `rank` of `world`; all must start from the same seed."""
        return ScenesShard(self, rank, world)

    def unaugmented(self) -> Scenes:
        """The same dataset with images as they are."""
        return replace(self, scale=(1.0, 1.0), flip=False, jitter=0.0)

    def subset(self, fraction: float, per_class: int | None, generator: torch.Generator) -> Scenes:
        """A random part, this fraction of all."""
        if per_class is not None:
            raise InvalidSetting("images with label maps have no class each", remedy="Use a fraction instead")
        chosen = without_single(choose(len(self.labels), None, fraction, None, generator), self.batch_size)
        chosen = chosen.to(self.labels.device)
        return replace(self, images=self.images[chosen], labels=self.labels[chosen])


class ScenesShard(BatchShard):
    """One process's part of every batch. All processes draw for whole batches, so that their parts fit together."""

    batches: Scenes

    def __len__(self) -> int:
        return self.count(len(self.batches.labels), drop_last=False)

    def weighted(self) -> Iterator[tuple[float, tuple[Tensor, Tensor]]]:
        scenes = self.batches
        size, device = len(scenes.labels), scenes.labels.device
        order = torch.randperm(size, device=device) if scenes.shuffle else torch.arange(size, device=device)
        mean, std = torch.tensor([IMAGENET_MEAN, IMAGENET_STD], device=device)[:, :, None, None]
        layout = torch.channels_last if scenes.channels_last else torch.contiguous_format
        by_chance = scenes.flip or scenes.jitter > 0 or scenes.scale != (1.0, 1.0)
        for indices in order.split(scenes.batch_size):
            numbers = torch.rand(len(indices), NUMBERS, device=device) if by_chance else None
            part = self.part(len(indices))
            if part is None:
                continue
            weight, here = part
            images, labels = scenes.images[indices[here]] / 255, scenes.labels[indices[here]]
            if numbers is not None:
                images = jittered(images, scenes.jitter, numbers[here, :3])
            images = (images - mean) / std
            if numbers is not None:
                images, labels = moved(images, labels, scenes.scale, scenes.flip, numbers[here, 3:])
            yield weight, (images.contiguous(memory_format=layout), labels.long())


def jittered(images: Tensor, most: float, numbers: Tensor) -> Tensor:
    """Images from 0 to 1 in other colours.

    numbers: three for each image, from 0 to 1: they choose brightness, contrast and saturation.
    """
    if not most:
        return images
    brightness, contrast, saturation = (1 + most * (2 * numbers - 1))[:, :, None, None, None].unbind(1)
    images = images * brightness
    images = images.mean((1, 2, 3), keepdim=True).lerp(images, contrast)
    return images.mean(1, keepdim=True).lerp(images, saturation).clamp_(0, 1)


def moved(
    images: Tensor, labels: Tensor, scale: tuple[float, float], flip: bool, numbers: Tensor
) -> tuple[Tensor, Tensor]:
    """Images and label maps enlarged or shrunk, at a random place, perhaps mirrored; zeros and void are outside.

    numbers: four for each image, from 0 to 1: they choose its size, with every factor as likely per octave, its place
        across and down, and whether it is mirrored.
    """
    size, x, y, mirror = numbers.unbind(1)
    step = (scale[0] * (scale[1] / scale[0]) ** size).reciprocal()
    # From -1 to 1 across the image, which a larger image exceeds, and a smaller one leaves room in.
    height, width = images.shape[2:]
    down, across = (torch.arange(1, 2 * n, 2, device=images.device) / n - 1 for n in (height, width))
    turned = torch.where(mirror < 0.5, -step, step) if flip else step
    columns = across * turned[:, None] + ((2 * x - 1) * (1 - step))[:, None]
    rows = down * step[:, None] + ((2 * y - 1) * (1 - step))[:, None]
    shape = len(images), height, width
    grid = torch.stack([columns[:, None, :].expand(shape), rows[:, :, None].expand(shape)], 3)
    images = F.grid_sample(images, grid, mode="bilinear", align_corners=False)
    # Less the label of void, so that the zeros outside are void.
    classes = F.grid_sample(labels[:, None].float() - VOID, grid, mode="nearest", align_corners=False) + VOID
    return images, classes[:, 0]


def read(maps: Maps, batch_size: int) -> Scenes:
    """All images and label maps, decoded at once by as many threads as there are cores."""
    with ThreadPoolExecutor(num_cores()) as pool:
        decoded = pool.map(maps.read_bytes, range(len(maps)))
        images, labels = zip(*decoded, strict=True)
    for path, image in zip(maps.paths, images, strict=True):
        if image.shape != images[0].shape:
            got, wanted = (f"{each.shape[2]}x{each.shape[1]} pixels" for each in (image, images[0]))
            raise maps.layout.damaged(path, got, f"{wanted}, as the others")
    return Scenes(torch.stack(images), torch.stack(labels), batch_size)
