"""Datasets by name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

from secateur.errors import InvalidData, InvalidSetting, unknown_name


@dataclass(frozen=True)
class Dataset:
    """How a dataset is read, and what it consists of."""

    summary: str
    reader: str
    """`module:function` of this package, which takes a folder (if there is one) and a batch size."""
    input_size: tuple[int, int, int]
    """Of the images as a network gets them; an example where they differ in size."""
    batch_size: int = 128
    maps: bool = False
    """Whether every pixel has a label."""
    num_classes: int | None = None
    """None: as many as there are in the training data."""
    layout: str = ""
    """The name of its `Layout` in that module, if it is not the function's in capitals."""
    folder: bool = True
    """Whether it is read from a folder of the user's."""
    labelled: bool = True
    """Whether a batch is images and labels; otherwise it is images alone."""

    @property
    def any_size(self) -> bool:
        """Whether the size of its images can be chosen."""
        module, function = self._home()
        return "size" in signature(getattr(module, function)).parameters

    def load(
        self, folder: str | Path | None, batch_size: int | None = None, size: int | None = None
    ) -> tuple[Iterable[Any], Iterable[Any]]:
        """Batches for training, and batches for testing.

        size: of the images, in pixels, for datasets of which it can be chosen.
        """
        if not self.folder and folder is not None:
            raise InvalidData(f"{self.summary} need no folder", got=folder, remedy="Leave it out")
        module, function = self._home()
        read = getattr(module, function)
        batch_size = self.batch_size if batch_size is None else batch_size
        sizes = {} if size is None else {"size": size}
        if sizes and not self.any_size:
            raise InvalidSetting(f"the size of images cannot be chosen for {self.summary}", got=size)
        if not self.folder:
            return read(batch_size)
        if folder is None:
            raise InvalidData(f"no folder is named for {self.summary}", remedy="Name it")
        return read(Path(folder), batch_size, **sizes)

    def describe(self) -> str:
        """How its folder looks."""
        if not self.folder:
            return f"{self.summary} need no folder"
        module, function = self._home()
        return str(getattr(module, self.layout or function.upper()))

    def _home(self) -> tuple[ModuleType, str]:
        module, _, function = self.reader.partition(":")
        return import_module(f"secateur.data.{module}"), function


DATASETS = {
    "digits": Dataset("scikit-learn's digits", "digits:digits", (1, 8, 8), batch_size=64, num_classes=10, folder=False),
    "fashion_mnist": Dataset("Fashion-MNIST", "idx:fashion_mnist", (1, 28, 28), num_classes=10),
    "cifar10": Dataset("CIFAR-10", "cifar:cifar10", (3, 32, 32), num_classes=10),
    "cifar100": Dataset("CIFAR-100", "cifar:cifar100", (3, 32, 32), num_classes=100),
    "tiny_imagenet": Dataset("Tiny-ImageNet", "folders:tiny_imagenet", (3, 64, 64)),
    "imagenet": Dataset("ImageNet (ILSVRC-2012)", "folders:imagenet", (3, 224, 224), batch_size=256),
    "cub200": Dataset("CUB-200-2011", "cub:cub200", (3, 224, 224), batch_size=64),
    "pets": Dataset("Oxford-IIIT Pets", "pets:pets", (3, 224, 224), batch_size=64),
    "pets_segmentation": Dataset(
        "trimaps of Oxford-IIIT Pets",
        "pets:pets_segmentation",
        (3, 128, 128),
        batch_size=16,
        maps=True,
        num_classes=3,
        layout="PETS",
    ),
    "camvid": Dataset("CamVid", "camvid:camvid", (3, 360, 480), batch_size=4, maps=True, num_classes=11),
    "voc2011_sbd": Dataset(
        "PASCAL VOC 2011 with SBD", "voc:voc2011_sbd", (3, 384, 512), batch_size=1, maps=True, num_classes=21
    ),
    "class_folders": Dataset("your own images in a folder per class", "folders:class_folders", (3, 224, 224), 64),
    "images": Dataset("your own images without labels", "folders:images", (3, 224, 224), 64, labelled=False),
}


def find_dataset(name: str) -> Dataset:
    """The dataset of that name."""
    if name not in DATASETS:
        raise unknown_name("dataset", name, list(DATASETS))
    return DATASETS[name]
