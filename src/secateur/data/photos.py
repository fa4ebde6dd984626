"""Batches of image files, which are decoded while the network computes.

The order and the views follow from torch's global random numbers alone, whoever decodes: the GPU, where it can
(`gpu_reader`), or else worker processes. What travels is bytes; they are normalized on the device. Where there are few
images, all can be decoded once and kept there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from secateur.data.decode import gpu_decoder, read_photo, torchvision_decodes
from secateur.data.gpu_reader import GpuReader
from secateur.data.layout import Layout
from secateur.data.split import draw_count
from secateur.data.views import Crops, Part, ResizedCrops, pack, pixels_of, render, render_batch, to_device, together
from secateur.data.workers import in_workers, num_cores, num_workers
from secateur.errors import InvalidSetting
from secateur.extras import import_extra
from secateur.randomness import mix
from secateur.training.batches import check_batch_size, choose, without_single
from secateur.training.shards import BatchShard

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True, repr=False, eq=False)
class Photos:
    """Images and the class of each, in batches; without targets, images alone."""

    paths: list[str]
    """Text, since every worker holds them all, and Path objects for ImageNet's 1.3 million take much memory."""
    targets: list[int] | None
    layout: Layout
    crops: Crops | ResizedCrops
    batch_size: int
    shuffle: bool = False
    classes: list[str] | None = None
    """The name of each class, where they have names."""
    drawn: bool = False
    """Whether a draw decided which images are for training."""
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    """Of each colour, from 0 to 1, for normalization."""
    workers: int | None = None
    """Processes that decode, or read for a GPU that does; None for up to 8 if there is much data."""
    device: torch.device = torch.device("cpu")
    channels_last: bool = False
    kept: list[Tensor] | None = None
    """The images themselves on the device, as bytes: colour x height x width."""

    def __post_init__(self) -> None:
        check_batch_size(self.batch_size)

    def __len__(self) -> int:
        return len(self.shard(0, 1))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.shard(0, 1))

    def to(self, device: torch.device | str) -> Photos:
        """The same batches on that device."""
        kept = [pixels.to(device) for pixels in self.kept] if self.kept is not None else None
        return replace(self, device=torch.device(device), kept=kept)

    def decoded(self) -> Photos:
        """The same with every image decoded once and kept on the device: 3 bytes for each pixel."""
        import_extra("PIL.Image", "vision").init()
        torchvision_decodes()
        with ThreadPoolExecutor(num_cores()) as pool:
            kept = [pixels.to(self.device) for pixels in pool.map(self._decode, range(len(self.paths)))]
        return replace(self, kept=kept)

    def shard(self, rank: int, world: int) -> PhotosShard:
        """The part of each batch for process `rank` of `world`; all must start from the same seed."""
        return PhotosShard(self, rank, world)

    def weighted_from(self, start: int) -> Iterator[tuple[float, Any]]:
        """As the method of a shard of that name."""
        return self.shard(0, 1).weighted_from(start)

    def unaugmented(self) -> Photos:
        """The same images in the view of a test."""
        return replace(self, crops=self.crops.plain())

    def subset(self, fraction: float, per_class: int | None, generator: torch.Generator) -> Photos:
        """A random part, shuffled: a fraction of all, or `per_class` images of every class."""
        labels = torch.tensor(self.targets) if self.targets is not None else None
        if per_class is not None and labels is None:
            raise InvalidSetting("images without labels have no classes", remedy="Use a fraction instead")
        drawn = choose(len(self.paths), labels, fraction, per_class, generator)
        chosen = drawn if per_class else without_single(drawn, self.batch_size)
        return replace(self._take(chosen.tolist()), shuffle=True)

    def hold_out(self, count: int) -> tuple[Photos, Photos]:
        """The rest, and so many images, of each class in proportion, in the view of a test."""
        if self.targets is None:
            raise InvalidSetting("images without labels cannot be held out", remedy="Leave out hold_out")
        return self.parted(draw_count(self.paths, self.targets, count))

    def parted(self, held: list[int]) -> tuple[Photos, Photos]:
        """The images but these, and these in the view of a test."""
        rest = sorted(set(range(len(self.paths))) - set(held))
        train, test = (replace(self._take(places), drawn=True) for places in (rest, held))
        return train, replace(test.unaugmented(), shuffle=False)

    def _take(self, places: list[int]) -> Photos:
        lists = {name: getattr(self, name) for name in ("paths", "targets", "kept")}
        return replace(self, **{name: [items[i] for i in places] for name, items in lists.items() if items is not None})

    @property
    def num_workers(self) -> int:
        """How many processes read or decode."""
        return num_workers(len(self.paths)) if self.workers is None else self.workers

    def pixels(self, index: int, numbers: Sequence[float]) -> Tensor:
        """The view of one image that these random numbers choose, size x size x colour, decoded with care."""
        image, part = self._read(index)
        return render(image, self.crops.view(part, numbers), self.crops.size)

    def _read(self, index: int) -> tuple[Any, Part]:
        """An image, decoded with care, and the part that is all of it."""
        image = read_photo(self.paths[index], self.layout)
        width, height = image.shape[1::-1] if isinstance(image, Tensor) else image.size
        return image, (0, 0, width, height)

    def _decode(self, index: int) -> Tensor:
        """An image as bytes: colour x height x width."""
        return pixels_of(*self._read(index)).permute(2, 0, 1).contiguous()


Labelled = tuple[list[str], list[int]]
"""The paths of images, and the number of the class of each."""


def photos(train: Labelled, test: Labelled, layout: Layout, crops: Crops, batch_size: int) -> tuple[Photos, Photos]:
    """Shuffled batches for training, in random views, and batches for testing, in the view of a test."""
    return (
        Photos(*train, layout, replace(crops, random=True), batch_size, shuffle=True),
        Photos(*test, layout, crops.plain(), batch_size),
    )


class Batch(NamedTuple):
    """What a batch is made of: the images of this process, and the random numbers for the view of each."""

    weight: float
    indices: list[int]
    numbers: list[list[float]]


class PhotosShard(BatchShard):
    """One process's part of every batch. All processes draw for whole batches, so that their parts fit together."""

    batches: Photos

    def __len__(self) -> int:
        return self.count(len(self.batches.paths), drop_last=False)

    def weighted(self) -> Iterator[tuple[float, Any]]:
        return self.weighted_from(0)

    def weighted_from(self, start: int) -> Iterator[tuple[float, Any]]:
        """The same from this batch on; those before it are not decoded. The seed of the pass is drawn at once."""
        by_chance = self.batches.shuffle or self.batches.crops.numbers > 0
        return self._weighted(self._plan(int(torch.randint(2**62, ())) if by_chance else 0, start))

    def _weighted(self, plan: Iterator[Batch]) -> Iterator[tuple[float, Any]]:
        photos = self.batches
        normalize = _normalization(photos)
        for batch, pixels in _pixels(photos, plan):
            images = normalize(pixels)
            if photos.targets is None:
                yield batch.weight, images
                continue
            labels = torch.tensor([photos.targets[index] for index in batch.indices])
            yield batch.weight, (images, to_device(labels, photos.device))

    def _plan(self, seed: int, start: int) -> Iterator[Batch]:
        photos, size = self.batches, len(self.batches.paths)
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(size, generator=generator) if photos.shuffle else torch.arange(size)
        parts = ((indices, self.part(len(indices))) for indices in order.split(photos.batch_size))
        used = [(indices, *part) for indices, part in parts if part is not None]
        for number, (indices, weight, here) in enumerate(used):
            if number >= start:
                generator.manual_seed(mix(seed, number))
                shape = (len(indices), photos.crops.numbers)
                numbers = torch.rand(shape, generator=generator, dtype=torch.float64)
                yield Batch(weight, indices[here].tolist(), numbers[here].tolist())


def _pixels(photos: Photos, plan: Iterator[Batch]) -> Iterator[tuple[Batch, Tensor]]:
    """Bytes on the device, image x size x size x colour: from memory, by the GPU's decoder, or by processes."""
    if photos.kept is not None:
        return _from_memory(photos, photos.kept, plan)
    decode = gpu_decoder(photos.device)
    return GpuReader(photos, decode)(plan) if decode else _by_workers(photos, plan)


def _from_memory(photos: Photos, kept: list[Tensor], plan: Iterator[Batch]) -> Iterator[tuple[Batch, Tensor]]:
    """The views of images that are on the device."""
    for batch in plan:
        images = [kept[index] for index in batch.indices]
        sizes = [(image.shape[1], image.shape[2]) for image in images]
        views = [photos.crops.view((0, 0, w, h), by) for (h, w), by in zip(sizes, batch.numbers, strict=True)]
        groups = list(together(sizes))
        parts = [
            render_batch(pack([images[i] for i in group]), [views[i] for i in group], photos.crops.size)
            for group in groups
        ]
        order = torch.tensor([place for group in groups for place in group]).argsort()
        yield batch, torch.cat(parts)[to_device(order, photos.device)]


def _by_workers(photos: Photos, plan: Iterator[Batch]) -> Iterator[tuple[Batch, Tensor]]:
    """Bytes on the device, image x size x size x colour, decoded by processes."""
    # Here, so that not every worker has to.
    import_extra("PIL.Image", "vision").init()
    torchvision_decodes()
    shape = photos.crops.size, photos.crops.size, 3
    made = in_workers(
        partial(_views, replace(photos, device=torch.device("cpu"))),
        plan,
        photos.num_workers,
        size=photos.batch_size * prod(shape),
        used=1,
    )
    for batch, count, memory in made:
        pixels = memory[: count * prod(shape)].view(count, *shape)
        yield batch, to_device(pixels, photos.device)


def _views(photos: Photos, batch: Batch, memory: Tensor) -> int:
    """The pixels of a batch, one image after another; returns how many."""
    views = memory.view(-1, photos.crops.size, photos.crops.size, 3)
    for view, index, numbers in zip(views, batch.indices, batch.numbers, strict=False):
        view.copy_(photos.pixels(index, numbers))
    return len(batch.indices)


def _normalization(photos: Photos) -> Any:
    """From bytes to the network's input."""
    mean, std = (255 * torch.tensor(numbers, device=photos.device) for numbers in (photos.mean, photos.std))
    mean, scale = mean[:, None, None], 1 / std[:, None, None]
    layout = torch.channels_last if photos.channels_last else torch.contiguous_format

    def normalize(pixels: Tensor) -> Tensor:
        # While pixels are bytes there is least to move.
        return pixels.permute(0, 3, 1, 2).contiguous(memory_format=layout).float().sub_(mean).mul_(scale)

    return normalize
