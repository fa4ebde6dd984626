"""Datasets whose images are files, decoded when they are needed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from secateur.data.files import Layout
from secateur.errors import InvalidSetting
from secateur.extras import import_extra

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

VOID = 255
"""The label of pixels that do not count."""

# Others of Pillow's decoders are seldom used, little tested, or start programs.
FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "PPM", "GIF", "TIFF")
MAX_PIXELS = 178_000_000

Box = tuple[float, float, float, float]
"""Left, top, width and height, in pixels."""


@dataclass(frozen=True, repr=False)
class Images(Dataset):
    """Images and the number of the class of each."""

    paths: list[str]
    """As text: every worker has them all, and objects for ImageNet's 1.3 million would fill its memory."""
    targets: list[int]
    transform: Callable[[Any], Tensor]
    layout: Layout
    boxes: list[Box] | None = None
    """What is cut out of each image before anything else."""

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = read_image(self.paths[index], self.layout)
        if self.boxes is not None:
            image = _cut_out(image, self.boxes[index], self.paths[index], self.layout)
        return self.transform(image), self.targets[index]


@dataclass(frozen=True, repr=False)
class Maps(Dataset):
    """Images and a class for every pixel of each."""

    paths: list[str]
    maps: list[str]
    values: dict[int, int]
    """The class that each value in a label map stands for; other values are refused."""
    transform: Callable[[Any, Any], tuple[Tensor, Tensor]]
    layout: Layout
    read: Callable[[str], Tensor]
    """Gives the values of a label map, height x width of uint8."""
    size: int | None = None
    """Images and label maps are resized to so many pixels a side; None leaves them as they are."""

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = read_image(self.paths[index], self.layout)
        classes = self._classes(self.maps[index], image.size)
        if self.size is not None:
            image = image.resize((self.size, self.size), import_extra("PIL.Image", "vision").Resampling.BILINEAR)
            # The pixel at the same place: plain "nearest" takes the one half a step further up and to the left.
            classes = F.interpolate(classes[None, None], (self.size, self.size), mode="nearest-exact")[0, 0]
        mask = import_extra("torchvision.tv_tensors", "vision").Mask(classes)
        pixels, labels = self.transform(image, mask)
        return pixels, labels.long()

    def _classes(self, path: str, size: tuple[int, int]) -> Tensor:
        with reading(path, self.layout):
            values = self.read(path)
        width, height = size
        if values.shape != (height, width):
            got = "x".join(str(side) for side in reversed(values.shape))
            raise self.layout.broken(Path(path), f"it has {got} pixels and its image {width}x{height}")
        table = torch.full((256,), -1, dtype=torch.int16)
        table[list(self.values)] = torch.tensor(list(self.values.values()), dtype=torch.int16)
        classes = table[values.long()]
        if (classes < 0).any():
            unknown = int(values[classes < 0][0])
            raise self.layout.broken(Path(path), f"it holds the value {unknown}, wanted {_in_words(self.values)}")
        return classes.to(torch.uint8)


def _in_words(values: Iterable[int]) -> str:
    """As in: 0 to 20, 255."""
    runs: list[list[int]] = []
    for value in sorted(values):
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


@contextmanager
def reading(path: str, layout: Layout) -> Iterator[None]:
    """Turns whatever goes wrong with a file into the error that names it."""
    try:
        yield
    except FileNotFoundError:
        raise layout.missing(Path(path)) from None
    except (OSError, ValueError) as error:
        raise layout.broken(Path(path), str(error)) from None
    except Exception as error:  # broken files make decoders fail in ways of their own
        raise layout.broken(Path(path), repr(error)) from error


def read_image(path: str, layout: Layout) -> Any:
    """A Pillow image with three colours of 8 bits, whatever the file has."""
    with reading(path, layout), open_image(path) as image:
        if image.mode in ("I", "F"):
            raise ValueError(f"its pixels have 32 bits (mode {image.mode}), of which white is not known")
        if image.mode.startswith("I;16"):
            # Pillow would take all above 255 for white.
            image = image.point(lambda value: value * (1 / 257))
        if image.mode == "P":
            # Otherwise Pillow warns of colours that are partly transparent.
            image = image.convert("RGBA")
        return image.convert("RGB")


def read_map(path: str) -> Tensor:
    """The values of a label map: shades of grey, or the places of colours in a palette."""
    with open_image(path) as image:
        if image.mode not in ("L", "P"):
            raise ValueError(f"a label map has one value of 8 bits for each pixel, got an image of mode {image.mode}")
        return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(image.height, image.width)


def open_image(path: str) -> Any:
    """A Pillow image of which only the header has been read, to see that it is not too large to decode."""
    image = import_extra("PIL.Image", "vision").open(path, formats=FORMATS)
    if image.width * image.height > MAX_PIXELS:
        image.close()
        raise ValueError(f"it claims {image.width}x{image.height} pixels, more than {MAX_PIXELS:,}")
    return image


def _cut_out(image: Any, box: Box, path: str, layout: Layout) -> Any:
    """The part of an image in a box, which may reach a little beyond it."""
    left, top, width, height = box
    corners = (max(left, 0), max(top, 0), min(left + width, image.width), min(top + height, image.height))
    left, top, right, bottom = map(round, corners)
    if left >= right or top >= bottom:
        raise layout.broken(Path(path), f"its box {box} lies outside its {image.width}x{image.height} pixels")
    return image.crop((left, top, right, bottom))


def for_training(size: int = 224, resized: int = 256, padding: int = 0) -> Callable[[Any], Tensor]:
    """Both sides to `resized`, with zeros around it; a square of it or of its mirror image; normalised."""
    v2 = import_extra("torchvision.transforms.v2", "vision")
    crop = v2.RandomCrop(size, padding=padding or None)
    return compose(v2.Resize((resized, resized)), crop, v2.RandomHorizontalFlip())


def for_testing(size: int = 224, resized: int = 256) -> Callable[[Any], Tensor]:
    """Both sides to `resized`; the square in the middle; normalised."""
    v2 = import_extra("torchvision.transforms.v2", "vision")
    return compose(v2.Resize((resized, resized)), v2.CenterCrop(size))


def compose(*steps: Any) -> Callable[..., Any]:
    """These transforms of torchvision, then from pixels to numbers with ImageNet's mean and standard deviation."""
    v2 = import_extra("torchvision.transforms.v2", "vision")
    normalize = v2.Normalize(IMAGENET_MEAN, IMAGENET_STD)
    return v2.Compose([*steps, v2.ToImage(), v2.ToDtype(torch.float32, scale=True), normalize, v2.ToPureTensor()])


def loaders(
    train: Images | Maps, test: Images | Maps, batch_size: int, workers: int | None = None
) -> tuple[DataLoader, DataLoader]:
    """Batches for training, shuffled, and for testing; by default by up to 8 workers, small datasets by none."""
    return (
        _loader(train, batch_size, workers, shuffle=True, generator=torch.Generator()),
        _loader(test, batch_size, workers),
    )


def _loader(dataset: Images | Maps, batch_size: int, workers: int | None, **options: Any) -> DataLoader:
    if batch_size < 1:
        raise InvalidSetting(f"batch_size must be 1 or more, got {batch_size}")
    if workers is None:
        # Starting them takes longer than decoding a few images.
        workers = 0 if len(dataset) < 1000 else min(8, _num_cores() - 1)
    # Workers that outlive a pass would go on with their own random numbers, where new ones start from the loader's.
    return DataLoader(dataset, batch_size, num_workers=workers, pin_memory=torch.cuda.is_available(), **options)


def _num_cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
