"""Datasets that fit in memory and live on the device, where batches are made without waiting for the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from secateur.errors import InvalidData
from secateur.training.batches import check_batch_size, choose, without_single
from secateur.training.shards import BatchShard


@dataclass(frozen=True)
class Arrays:
    """Images and labels in batches. Pixels that are stored as uint8 become numbers between 0 and 1.

    shuffle: in an order drawn for each pass. This and all augmentation use torch's global random numbers.
    augment: applied to a batch of images, as they are stored, after `crop` and `flip`.
    crop: each image is shifted by up to so many pixels in each direction; zeros fill the border.
    flip: each image is mirrored left to right with probability 1/2.
    erase: a square of so many pixels a side, at a random place of each image, gets the mean colour.
    mean, std: of each channel, for normalization at the end; between 0 and 1 for images of uint8.
    drop_last: whether a smaller last batch is left out.
    channels_last: the memory format in which convolutions on GPUs are fastest.
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
    drop_last: bool = False
    channels_last: bool = False

    def __post_init__(self) -> None:
        _check_pair(self.images, self.labels)
        size = self.labels.shape[0]
        check_batch_size(self.batch_size)
        if self.drop_last and size < self.batch_size:
            remedy = "Use smaller batches, or drop_last=False"
            raise InvalidData("no batch can be filled", got=size, wanted=f"{self.batch_size} examples", remedy=remedy)
        self._check_augmentation()

    def _check_augmentation(self) -> None:
        shape = tuple(self.images.shape)
        by_pixel = self.crop or self.flip
        if (by_pixel or self.erase or self.mean or self.std or self.channels_last) and len(shape) != 4:
            what = "crop, flip, erase, mean, std and channels_last are for images"
            raise InvalidData(what, got="x".join(map(str, shape)), wanted="NxCxHxW")
        if self.crop < 0:
            raise InvalidData("crop is out of range", got=self.crop, wanted="0 pixels or more")
        if self.erase and not 0 <= self.erase <= min(shape[2:]):
            raise InvalidData("erase is out of range", got=self.erase, wanted=f"0 to {min(shape[2:])} pixels")
        if by_pixel and self.labels.dim() != 1:
            raise InvalidData("crop and flip would move the images but not their label maps", remedy="Use neither")
        if (self.mean, self.std) != (None, None):
            counts = [len(numbers or ()) for numbers in (self.mean, self.std)]
            if counts != [shape[1]] * 2:
                raise InvalidData("mean and std do not fit the images", got=counts, wanted=f"{shape[1]} numbers each")
            if min(self.std or ()) <= 0:
                raise InvalidData("std is out of range", got=self.std, wanted="above 0 in every channel")

    def unaugmented(self) -> Arrays:
        """The same dataset with images as they are."""
        return replace(self, crop=0, flip=False, erase=0, augment=None)

    def __len__(self) -> int:
        return len(self.shard(0, 1))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.shard(0, 1))

    def to(self, device: torch.device | str) -> Arrays:
        """The same dataset on that device."""
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))

    def shard(self, rank: int, world: int) -> ArraysShard:
        """The part of each batch for process `rank` of `world`; all must start from the same seed."""
        return ArraysShard(self, rank, world)

    def subset(self, fraction: float, per_class: int | None, generator: torch.Generator) -> Arrays:
        """A random part: a fraction of all, or `per_class` examples of every class."""
        chosen = choose(self.labels.shape[0], self.labels.cpu(), fraction, per_class, generator)
        return self._take(chosen if per_class else without_single(chosen, self.batch_size))

    def _take(self, indices: Tensor) -> Arrays:
        indices = indices.to(self.labels.device)
        drops = self.drop_last and indices.numel() >= self.batch_size
        return replace(self, images=self.images[indices], labels=self.labels[indices], drop_last=drops)

    def hold_out(self, count: int, seed: int = 0) -> tuple[Arrays, Arrays]:
        """The rest, and `count` examples drawn by that seed, unshuffled and without augmentation."""
        size = self.labels.shape[0]
        if not 1 <= count < size:
            raise InvalidData("so many examples cannot be held out", got=count, wanted=f"1 to {size - 1}")
        order = torch.randperm(size, generator=torch.Generator().manual_seed(seed), device="cpu")
        held, rest = (self._take(part.sort().values) for part in (order[:count], order[count:]))
        numbers = {name: getattr(self, name) for name in ("mean", "std", "channels_last")}
        return rest, Arrays(held.images, held.labels, batch_size=1000, **numbers)


class ArraysShard(BatchShard):
    """One process's part of every batch. All processes draw for whole batches, so that their parts fit together."""

    def __len__(self) -> int:
        return self.count(self.batches.labels.shape[0], self.batches.drop_last)

    def weighted(self) -> Iterator[tuple[float, tuple[Tensor, Tensor]]]:
        arrays: Arrays = self.batches
        normalize = _normalization(arrays)
        layout = torch.channels_last if arrays.channels_last else torch.contiguous_format
        for indices in _order(arrays):
            size = indices.shape[0]
            places, erased = _places(arrays, size), _erased(arrays, size)
            part = self.part(size)
            if part is None:
                continue
            weight, here = part
            # The user's own function draws for the whole batch too.
            taken = slice(None) if arrays.augment else here
            images = arrays.images[indices[taken]]
            if places is not None:
                images = _take(images, places[0][taken], places[1][taken], arrays.crop)
            if arrays.augment:
                images = arrays.augment(images)[here]
            # While pixels are bytes there is least to move.
            images = normalize(images.contiguous(memory_format=layout))
            if erased is not None:
                images = images.clone().masked_fill_(erased[here], 0)  # in place keeps the memory format
            yield weight, (images, arrays.labels[indices[here]].long())


def _order(arrays: Arrays) -> Iterator[Tensor]:
    """The indices of each whole batch."""
    size, device = arrays.labels.shape[0], arrays.labels.device
    order = torch.randperm(size, device=device) if arrays.shuffle else torch.arange(size, device=device)
    if arrays.drop_last:
        order = order[: size - size % arrays.batch_size]
    yield from order.split(arrays.batch_size)


def _places(arrays: Arrays, count: int) -> tuple[Tensor, Tensor] | None:
    """The rows and columns to take of each of `count` images, after padding."""
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
    """The pixels to erase of each of `count` images: a square around a random pixel, perhaps in part outside."""
    if not arrays.erase:
        return None
    device, side = arrays.images.device, arrays.erase

    def within(size: int) -> Tensor:
        offset = torch.arange(size, device=device) - torch.randint(size, (count, 1), device=device) + side // 2
        return (offset >= 0) & (offset < side)

    rows, columns = map(within, arrays.images.shape[2:])
    return rows[:, None, :, None] & columns[:, None, None, :]


def _take(images: Tensor, rows: Tensor, columns: Tensor, padding: int) -> Tensor:
    padded = F.pad(images, [padding] * 4)
    batch = torch.arange(images.shape[0], device=images.device)[:, None, None]
    return padded.movedim(1, -1)[batch, rows[:, :, None], columns[:, None, :]].movedim(-1, 1)


def _normalization(arrays: Arrays) -> Callable[[Tensor], Tensor]:
    """From pixels as stored to the network's input; the numbers are copied to the device once for a whole pass."""
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
        shapes = f"images of shape {tuple(images.shape)} and labels of shape {tuple(labels.shape)}"
        raise InvalidData("images and labels do not fit", got=shapes, wanted="a label for every image")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        remedy = "Use labels.long()"
        raise InvalidData("labels are not integers", got=labels.dtype, wanted="numbers of classes", remedy=remedy)
    if images.device != labels.device:
        devices = f"{images.device} and {labels.device}"
        raise InvalidData("images and labels are on different devices", got=devices, wanted="one device")
