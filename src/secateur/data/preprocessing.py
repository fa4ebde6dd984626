"""What becomes of a photograph before a network sees it: part of a network as much as its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from torch import Tensor

from secateur.data.layout import Layout
from secateur.data.photos import IMAGENET_MEAN, IMAGENET_STD, Photos
from secateur.data.views import Crops
from secateur.errors import InvalidData

FILES = Layout("images", "1.jpg", "your own images")
LARGEST = 2**14
"""Pixels a side."""


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """An image in RGB is resized, cropped to its middle, brought to numbers from 0 to 1, and normalized."""

    resize: int = 256
    """Pixels of both sides after resizing, whatever the shape of the image."""
    crop: int = 224
    """Pixels of both sides of the middle, which the network sees."""
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    interpolation: str = "bilinear"
    """Of resizing; with antialiasing, as Pillow does it."""

    def __post_init__(self) -> None:
        sizes = (self.resize, self.crop)
        if not all(type(size) is int and 0 < size <= LARGEST for size in sizes) or self.crop > self.resize:
            raise InvalidData("the sizes of images are wrong", got=sizes, wanted="resize, and crop of at most that")
        for name in ("mean", "std"):
            numbers = tuple(getattr(self, name))
            if len(numbers) != 3 or not all(type(n) in (int, float) and isfinite(n) for n in numbers):
                raise InvalidData(f"{name} is wrong", got=f"{numbers!r:.80}", wanted="three numbers")
            object.__setattr__(self, name, numbers)
        if not min(self.std) > 0:
            raise InvalidData("std is out of range", got=self.std, wanted="numbers above 0")
        if self.interpolation != "bilinear":
            raise InvalidData("the interpolation is not known", got=f"{self.interpolation!r:.80}", wanted="bilinear")

    @classmethod
    def of(cls, photos: Photos) -> Preprocessing:
        """That of tests on these photographs."""
        crops = photos.crops.plain()
        return cls(resize=crops.resized, crop=crops.size, mean=photos.mean, std=photos.std)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Preprocessing:
        """What `to_dict` has described, or anybody in a file."""
        try:
            return cls(**values)
        except TypeError as error:
            raise InvalidData("the preprocessing has the wrong form", got=error) from error

    def to_dict(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    def __str__(self) -> str:
        return (
            f"RGB, resized to {self.resize}x{self.resize} ({self.interpolation}, antialiased), cropped to the "
            f"{self.crop}x{self.crop} in the middle, divided by 255, normalized with mean {_text(self.mean)} and "
            f"deviation {_text(self.std)}"
        )

    def batches(self, paths: Sequence[str | Path], batch_size: int = 32) -> Iterator[Tensor]:
        """These image files as a network gets them, in batches."""
        names = [str(path) for path in paths]
        for name in names:
            if not Path(name).is_file():
                raise InvalidData(f"there is no file {name}")
        crops = Crops(self.crop, self.resize)
        try:
            yield from Photos(names, None, FILES, crops, batch_size, mean=self.mean, std=self.std)
        except InvalidData as error:
            raise InvalidData(error.what.removeprefix(f"{FILES.name}: "), got=error.got, wanted="an image") from error


def _text(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:g}" for number in numbers)
