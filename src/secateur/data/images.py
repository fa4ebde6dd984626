"""Datasets of image files, which are decoded when they are needed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from secateur.data.layout import Layout
from secateur.errors import InvalidSetting
from secateur.extras import import_extra

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

VOID = 255
"""The label of pixels that are ignored."""

# Pillow's other decoders are little tested, or start programs.
FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "PPM", "GIF", "TIFF")
MAX_PIXELS = 178_000_000

Box = tuple[float, float, float, float]
"""Left, top, width and height, in pixels."""


@dataclass(frozen=True, repr=False)
class Images(Dataset):
    """Images and the class of each."""

    paths: list[str]
    """Text, since every worker holds them all, and Path objects for ImageNet's 1.3 million take much memory."""
    targets: list[int]
    transform: Callable[[Any], Tensor]
    layout: Layout
    boxes: list[Box] | None = None
    """Each image is cropped to its box first."""

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = read_image(self.paths[index], self.layout)
        if self.boxes is not None:
            image = _cut_out(image, self.boxes[index], self.paths[index], self.layout)
        return self.transform(image), self.targets[index]


@dataclass(frozen=True, repr=False)
class Unlabelled(Dataset):
    """Images alone."""

    paths: list[str]
    transform: Callable[[Any], Tensor]
    layout: Layout

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Tensor:
        return self.transform(read_image(self.paths[index], self.layout))


@dataclass(frozen=True, repr=False)
class Maps(Dataset):
    """Images and a class for every pixel of each."""

    paths: list[str]
    maps: list[str]
    values: dict[int, int]
    """The class of each value in a label map; other values are refused."""
    transform: Callable[[Any, Any], tuple[Tensor, Tensor]]
    layout: Layout
    read: Callable[[str], Tensor]
    """Returns the values of a label map, height x width of uint8."""
    size: int | None = None
    """Images and label maps are resized to so many pixels a side, unless it is None."""

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = read_image(self.paths[index], self.layout)
        classes = self._classes(self.maps[index], image.size)
        if self.size is not None:
            image = image.resize((self.size, self.size), import_extra("PIL.Image", "vision").Resampling.BILINEAR)
            # Plain "nearest" would shift the map by half a pixel.
            classes = F.interpolate(classes[None, None], (self.size, self.size), mode="nearest-exact")[0, 0]
        mask = import_extra("torchvision.tv_tensors", "vision").Mask(classes)
        pixels, labels = self.transform(image, mask)
        return pixels, labels.long()

    def _classes(self, path: str, size: tuple[int, int]) -> Tensor:
        with self.layout.reading(path):
            values = self.read(path)
        width, height = size
        if values.shape != (height, width):
            got = "x".join(str(side) for side in reversed(values.shape))
            raise self.layout.damaged(path, f"{got} pixels", f"{width}x{height}, as its image")
        table = torch.full((256,), -1, dtype=torch.int16)
        table[list(self.values)] = torch.tensor(list(self.values.values()), dtype=torch.int16)
        classes = table[values.long()]
        if (classes < 0).any():
            unknown = int(values[classes < 0][0])
            raise self.layout.damaged(path, f"the value {unknown}", ranges(self.values))
        return classes.to(torch.uint8)


Files = Images | Unlabelled | Maps


def ranges(values: Iterable[int]) -> str:
    """Numbers as text.

    >>> ranges([0, 1, 2, 255])
    '0 to 2, 255'
    """
    runs: list[list[int]] = []
    for value in sorted(values):
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def read_image(path: str, layout: Layout) -> Any:
    """A Pillow image in RGB, whatever mode the file has."""
    with layout.reading(path), open_image(path) as image:
        if image.mode in ("I", "F"):
            raise ValueError(f"pixels of 32 bits (mode {image.mode}), whose range is unknown")
        if image.mode.startswith("I;16"):
            # Pillow would clip at 255.
            image = image.point(lambda value: value * (1 / 257))
        if image.mode == "P":
            # Pillow warns of partly transparent palettes otherwise.
            image = image.convert("RGBA")
        return image.convert("RGB")


def read_map(path: str) -> Tensor:
    """The values of a label map: grey levels, or indices of a palette."""
    with open_image(path) as image:
        if image.mode not in ("L", "P"):
            raise ValueError(f"an image of mode {image.mode} instead of one value of 8 bits for each pixel")
        return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(image.height, image.width)


def open_image(path: str) -> Any:
    """A Pillow image of which only the header is read; raises if it is too large to decode."""
    image = import_extra("PIL.Image", "vision").open(path, formats=FORMATS)
    if image.width * image.height > MAX_PIXELS:
        image.close()
        raise ValueError(f"{image.width}x{image.height} pixels, more than {MAX_PIXELS:,}")
    return image


def _cut_out(image: Any, box: Box, path: str, layout: Layout) -> Any:
    """The part of an image in a box, which may reach beyond the image."""
    left, top, width, height = box
    corners = (max(left, 0), max(top, 0), min(left + width, image.width), min(top + height, image.height))
    left, top, right, bottom = map(round, corners)
    if left >= right or top >= bottom:
        raise layout.damaged(path, f"{image.width}x{image.height} pixels", f"some within the box {box}")
    return image.crop((left, top, right, bottom))


def for_training(size: int = 224, resized: int = 256, padding: int = 0) -> Callable[[Any], Tensor]:
    """Resize both sides to `resized` and pad with zeros; random crop and flip; normalize."""
    v2 = import_extra("torchvision.transforms.v2", "vision")
    crop = v2.RandomCrop(size, padding=padding or None)
    return compose(v2.Resize((resized, resized)), crop, v2.RandomHorizontalFlip())


def for_testing(size: int = 224, resized: int = 256) -> Callable[[Any], Tensor]:
    """Resize both sides to `resized`; center crop; normalize."""
    v2 = import_extra("torchvision.transforms.v2", "vision")
    return compose(v2.Resize((resized, resized)), v2.CenterCrop(size))


def compose(*steps: Any) -> Callable[..., Any]:
    """These transforms of torchvision, then normalization by ImageNet's mean and standard deviation."""
    v2 = import_extra("torchvision.transforms.v2", "vision")
    normalize = v2.Normalize(IMAGENET_MEAN, IMAGENET_STD)
    return v2.Compose([*steps, v2.ToImage(), v2.ToDtype(torch.float32, scale=True), normalize, v2.ToPureTensor()])


def loaders(train: Files, test: Files, batch_size: int, workers: int | None = None) -> tuple[DataLoader, DataLoader]:
    """Shuffled batches for training, and batches for testing; by default with up to 8 workers if there is much data."""
    return (
        _loader(train, batch_size, workers, shuffle=True, generator=torch.Generator()),
        _loader(test, batch_size, workers),
    )


def _loader(dataset: Files, batch_size: int, workers: int | None, **options: Any) -> DataLoader:
    if batch_size < 1:
        raise InvalidSetting("batch_size is out of range", got=batch_size, wanted="1 or more")
    if workers is None:
        # Starting workers takes longer than decoding a few images.
        workers = 0 if len(dataset) < 1000 else min(8, _num_cores() - 1)
    # No persistent workers: their random numbers would not start from the loader's seed in each pass.
    return DataLoader(dataset, batch_size, num_workers=workers, pin_memory=torch.cuda.is_available(), **options)


def _num_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
