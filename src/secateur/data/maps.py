"""Datasets of image files with a class for every pixel, which are decoded when they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from secateur.data.decode import read_image
from secateur.data.layout import Layout
from secateur.data.photos import IMAGENET_MEAN, IMAGENET_STD
from secateur.data.workers import num_workers
from secateur.extras import import_extra
from secateur.training.batches import check_batch_size

VOID = 255
"""The label of pixels that are ignored."""


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

    def read_bytes(self, index: int) -> tuple[Tensor, Tensor]:
        """An image as it is, colour x height x width, and its classes, without resizing or transform."""
        image = read_image(self.paths[index], self.layout)
        classes = self._classes(self.maps[index], image.size)
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        return pixels.view(image.height, image.width, 3).permute(2, 0, 1), classes

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


def compose(*steps: Any) -> Callable[..., Any]:
    """These transforms of torchvision, then normalization by ImageNet's mean and standard deviation."""
    v2 = import_extra("torchvision.transforms.v2", "vision")
    normalize = v2.Normalize(IMAGENET_MEAN, IMAGENET_STD)
    return v2.Compose([*steps, v2.ToImage(), v2.ToDtype(torch.float32, scale=True), normalize, v2.ToPureTensor()])


def loaders(train: Maps, test: Maps, batch_size: int) -> tuple[DataLoader, DataLoader]:
    """Shuffled batches for training, and batches for testing; with up to 8 workers if there is much data."""
    return _loader(train, batch_size, shuffle=True, generator=torch.Generator()), _loader(test, batch_size)


def _loader(dataset: Maps, batch_size: int, **options: Any) -> DataLoader:
    check_batch_size(batch_size)
    workers = num_workers(len(dataset))
    # No persistent workers: their random numbers would not start from the loader's seed in each pass.
    return DataLoader(dataset, batch_size, num_workers=workers, pin_memory=torch.cuda.is_available(), **options)
