"""Datasets that fit in memory, and live on the device: a batch is made there without waiting for the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from secateur.errors import InvalidTask
from secateur.words import counted


@dataclass(frozen=True)
class Arrays:
    """Images and labels, handed out in batches. Pixels that are stored as uint8 come out between 0 and 1.

    shuffle: in an order drawn anew for each pass, from torch's random numbers, as everything random here.
    augment: what is done to a batch of images, as they are stored, after `crop` and `flip`.
    crop: each image is moved by up to so many pixels either way, with zeros moving in.
    flip: each image is mirrored left to right, or not, by chance.
    erase: of each image a square of so many pixels, anywhere and perhaps in part beside it, is made the mean colour.
    mean, std: of each channel, taken off and divided by at the end; between 0 and 1 for images of uint8.
    last: whether a last batch that is smaller comes as it is or is left out.
    channels_last: the order in memory that convolutions on GPUs like best.
    """

    images: Tensor
    labels: Tensor
    batch_size: int
    shuffle: bool = False
    augment: Callable[[Tensor], Tensor] | None = None
    crop: int = 0
    flip: bool = False
    erase: int = 0
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    last: Literal["keep", "drop"] = "keep"
    channels_last: bool = False

    def __post_init__(self) -> None:
        _check_pair(self.images, self.labels)
        _check_batches(self.labels.shape[0], self.batch_size, self.last)
        for name in ("crop", "erase"):
            if getattr(self, name) < 0:
                raise InvalidTask(f"{name} is a number of pixels, got {getattr(self, name)}")
        by_pixel = self.crop or self.flip
        if (by_pixel or self.erase or self.mean or self.std or self.channels_last) and self.images.dim() != 4:
            raise InvalidTask(
                "crop, flip, erase, mean, std and channels_last are for images of shape NxCxHxW, got "
                + "x".join(map(str, self.images.shape))
            )
        if self.erase and self.erase > min(self.images.shape[2:]):
            size = "x".join(map(str, self.images.shape[2:]))
            raise InvalidTask(f"erase={self.erase} is larger than the images, {size}")
        if by_pixel and self.labels.dim() != 1:
            raise InvalidTask("crop and flip would move the images but not their label maps: use neither")
        if (self.mean, self.std) != (None, None):
            _check_numbers(self.mean, self.std, self.images.shape[1])

    def __len__(self) -> int:
        return len(self.shard(0, 1))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.shard(0, 1))

    def to(self, device: torch.device | str) -> Arrays:
        """The same dataset on that device, where its batches are made from then on."""
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))

    def shard(self, rank: int, world: int) -> Shard:
        """The part of each batch that falls to process `rank` of `world`; all must start from the same seed."""
        return Shard(self, rank, world)

    def subset(self, fraction: float, per_class: int | None, generator: torch.Generator) -> Arrays:
        """A random part: a fraction of all, or this many examples of every class."""
        size = self.labels.shape[0]
        order = torch.randperm(size, generator=generator, device="cpu").to(self.labels.device)
        if per_class is None:
            chosen = order[: max(1, round(fraction * size))]
        else:
            labels = self.labels[order]
            chosen = torch.cat([order[labels == label][:per_class] for label in labels.unique()])
            mixed = torch.randperm(chosen.shape[0], generator=generator, device="cpu")
            chosen = chosen[mixed.to(chosen.device)]
        return replace(self, images=self.images[chosen], labels=self.labels[chosen])

    def hold_out(self, count: int, seed: int = 0) -> tuple[Arrays, Arrays]:
        """The rest, and `count` examples drawn at random by that seed, in one order and without augmentation."""
        size = self.labels.shape[0]
        if not 1 <= count < size:
            raise InvalidTask(f"of {size} examples 1 to {size - 1} can be held out, got {count}")
        order = torch.randperm(size, generator=torch.Generator().manual_seed(seed), device="cpu")
        held, kept = (part.sort().values.to(self.labels.device) for part in (order[:count], order[count:]))
        rest = replace(self, images=self.images[kept], labels=self.labels[kept])
        return rest, Arrays(
            self.images[held],
            self.labels[held],
            batch_size=1000,
            mean=self.mean,
            std=self.std,
            channels_last=self.channels_last,
        )


@dataclass(frozen=True)
class Shard:
    """One process's part of every batch. All processes draw for whole batches, so their parts belong together.

    Parts are as even as can be; a batch with fewer examples than processes is left out.
    """

    arrays: Arrays
    rank: int
    world: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise InvalidTask(f"a process's rank goes from 0 to {self.world - 1}, got {self.rank}")
        if self.arrays.batch_size < self.world:
            raise InvalidTask(
                f"batches of {self.arrays.batch_size} cannot be cut into {self.world} parts: use larger batches"
            )

    def __len__(self) -> int:
        full, rest = divmod(self.arrays.labels.shape[0], self.arrays.batch_size)
        return full + (self.arrays.last == "keep" and rest >= self.world)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (batch for _, batch in self.weighted())

    def weighted(self) -> Iterator[tuple[float, tuple[Tensor, Tensor]]]:
        """Each part behind its weight, its size over the mean size of the batch's parts.

        The mean over processes of weight times mean loss is the mean loss of the whole batch.
        """
        arrays = self.arrays
        normalize = _normalization(arrays)
        for indices in _order(arrays):
            size = indices.shape[0]
            places, erased = _places(arrays, size), _erased(arrays, size)
            if size < self.world:
                continue
            part = slice(self.rank * size // self.world, (self.rank + 1) * size // self.world)
            # What the user's own function draws is for the whole batch too.
            taken = slice(None) if arrays.augment else part
            images = arrays.images[indices[taken]]
            if places is not None:
                images = _take(images, places[0][taken], places[1][taken], arrays.crop)
            if arrays.augment:
                images = arrays.augment(images)[part]
            # While pixels are bytes there is least to move.
            images = images.contiguous(
                memory_format=torch.channels_last if arrays.channels_last else torch.contiguous_format
            )
            weight = (part.stop - part.start) * self.world / size
            images = normalize(images)
            if erased is not None:
                images = images.clone().masked_fill_(erased[part], 0)  # in place keeps the order in memory
            yield weight, (images, arrays.labels[indices[part]].long())


def _order(arrays: Arrays) -> Iterator[Tensor]:
    """The indices of each whole batch."""
    size, device = arrays.labels.shape[0], arrays.labels.device
    order = torch.randperm(size, device=device) if arrays.shuffle else torch.arange(size, device=device)
    if arrays.last == "drop":
        order = order[: size - size % arrays.batch_size]
    yield from order.split(arrays.batch_size)


def _places(arrays: Arrays, count: int) -> tuple[Tensor, Tensor] | None:
    """The rows and the columns to take of each of `count` images, once they are padded."""
    if not (arrays.crop or arrays.flip):
        return None
    device = arrays.images.device
    rows, columns = (torch.arange(size, device=device).expand(count, size) for size in arrays.images.shape[2:])
    if arrays.crop:
        rows = rows + torch.randint(2 * arrays.crop + 1, (count, 1), device=device)
        columns = columns + torch.randint(2 * arrays.crop + 1, (count, 1), device=device)
    if arrays.flip:
        columns = torch.where(torch.randint(2, (count, 1), device=device) == 1, columns.flip(1), columns)
    return rows, columns


def _erased(arrays: Arrays, count: int) -> Tensor | None:
    """The pixels to erase of each of `count` images: a square about one that is drawn at random."""
    if not arrays.erase:
        return None
    device, side = arrays.images.device, arrays.erase

    def within(size: int) -> Tensor:
        behind = torch.arange(size, device=device) - torch.randint(size, (count, 1), device=device) + side // 2
        return (behind >= 0) & (behind < side)

    rows, columns = map(within, arrays.images.shape[2:])
    return rows[:, None, :, None] & columns[:, None, None, :]


def _take(images: Tensor, rows: Tensor, columns: Tensor, padding: int) -> Tensor:
    padded = F.pad(images, [padding] * 4)
    batch = torch.arange(images.shape[0], device=images.device)[:, None, None]
    return padded.movedim(1, -1)[batch, rows[:, :, None], columns[:, None, :]].movedim(-1, 1)


def _normalization(arrays: Arrays) -> Callable[[Tensor], Tensor]:
    """From pixels as stored to what the network sees; the numbers go to the device once for a whole pass."""
    images, numbers = arrays.images, None
    if arrays.mean is not None and arrays.std is not None:
        dtype = images.dtype if images.is_floating_point() else None
        numbers = torch.tensor([arrays.mean, arrays.std], dtype=dtype, device=images.device)[:, :, None, None]

    def normalize(images: Tensor) -> Tensor:
        if images.dtype == torch.uint8:
            images = images / 255
        return images if numbers is None else (images - numbers[0]) / numbers[1]

    return normalize


def _check_pair(images: Tensor, labels: Tensor) -> None:
    if labels.dim() == 0 or images.shape[:1] != labels.shape[:1]:
        raise InvalidTask(
            f"every image needs a label, got images of shape {tuple(images.shape)} and labels of shape "
            f"{tuple(labels.shape)}"
        )
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise InvalidTask(f"labels must be integers, the numbers of classes, got {labels.dtype}: use labels.long()")
    if images.device != labels.device:
        raise InvalidTask(f"images are on {images.device} and labels on {labels.device}: move them to one device")


def _check_batches(size: int, batch_size: int, last: str) -> None:
    if batch_size < 1:
        raise InvalidTask(f"batch_size must be 1 or more, got {batch_size}")
    if last not in ("keep", "drop"):
        raise InvalidTask(f"last must be 'keep' or 'drop', got {last!r}")
    if last == "drop" and size < batch_size:
        raise InvalidTask(
            f"no batch of {batch_size} can be filled with {counted(size, 'example')}, and smaller ones are dropped: "
            "use smaller batches, or last='keep'"
        )


def _check_numbers(mean: tuple[float, ...] | None, std: tuple[float, ...] | None, channels: int) -> None:
    if mean is None or std is None:
        raise InvalidTask("mean and std go together: give both or neither")
    if len(mean) != channels or len(std) != channels:
        raise InvalidTask(
            f"mean and std need {counted(channels, 'number')}, one per channel, got {len(mean)} and {len(std)}"
        )
    if min(std) <= 0:
        raise InvalidTask(f"std must be above 0 in every channel, got {std}")
