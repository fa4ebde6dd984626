"""CIFAR-10 and CIFAR-100 from their authors' archives: pickles for Python, or plain bytes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from secateur.data.arrays import Arrays
from secateur.data.layout import Layout
from secateur.data.unpickle import unpickle

CIFAR10 = Layout(
    name="CIFAR-10",
    tree="""\
cifar-10-batches-py/
  data_batch_1 ... data_batch_5           pickles of data, N x 3072 bytes, and labels, 0 to 9
  test_batch
or
cifar-10-batches-bin/
  data_batch_1.bin ... data_batch_5.bin   rows of a label, 1 byte, and an image, 3072 bytes
  test_batch.bin""",
    source="cifar-10-python.tar.gz or cifar-10-binary.tar.gz",
)
CIFAR100 = Layout(
    name="CIFAR-100",
    tree="""\
cifar-100-python/
  train        pickles of data, N x 3072 bytes, and fine_labels, 0 to 99
  test
or
cifar-100-binary/
  train.bin    rows of a coarse label, 1 byte, a fine label, 1 byte, and an image, 3072 bytes
  test.bin""",
    source="cifar-100-python.tar.gz or cifar-100-binary.tar.gz",
)

_SHAPE = (3, 32, 32)
_PIXELS = 3 * 32 * 32
_MAX_BYTES = 2**30


@dataclass(frozen=True, kw_only=True)
class _Dataset:
    layout: Layout
    pickled: str
    """The folder of the pickles."""
    binary: str
    """The folder of the plain bytes, in files whose names end in .bin."""
    train: tuple[str, ...]
    test: tuple[str, ...]
    num_classes: int
    label_key: str
    """The key of the labels in a pickle."""
    num_label_bytes: int
    """Of a row of plain bytes; the last one is the label."""
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


_CIFAR10 = _Dataset(
    layout=CIFAR10,
    pickled="cifar-10-batches-py",
    binary="cifar-10-batches-bin",
    train=tuple(f"data_batch_{number}" for number in range(1, 6)),
    test=("test_batch",),
    num_classes=10,
    label_key="labels",
    num_label_bytes=1,
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.247, 0.243, 0.261),
)
_CIFAR100 = _Dataset(
    layout=CIFAR100,
    pickled="cifar-100-python",
    binary="cifar-100-binary",
    train=("train",),
    test=("test",),
    num_classes=100,
    label_key="fine_labels",
    num_label_bytes=2,
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
)


def cifar10(folder: str | Path, batch_size: int = 128) -> tuple[Arrays, Arrays]:
    """Training images (shifted by up to 4 pixels, randomly flipped) and test images of ten classes.

    folder: holds cifar-10-batches-py or cifar-10-batches-bin, or is one of them.
    """
    return _read(_CIFAR10, Path(folder), batch_size)


def cifar100(folder: str | Path, batch_size: int = 128) -> tuple[Arrays, Arrays]:
    """Training images (shifted by up to 4 pixels, randomly flipped) and test images of a hundred classes.

    folder: holds cifar-100-python or cifar-100-binary, or is one of them.
    """
    return _read(_CIFAR100, Path(folder), batch_size)


def _read(dataset: _Dataset, folder: Path, batch_size: int) -> tuple[Arrays, Arrays]:
    mean, std = dataset.mean, dataset.std
    folder, ending = _find(dataset, folder)
    images, labels = _read_files(dataset, [folder / f"{name}{ending}" for name in dataset.train])
    train = Arrays(images, labels, batch_size, shuffle=True, crop=4, flip=True, mean=mean, std=std)
    images, labels = _read_files(dataset, [folder / f"{name}{ending}" for name in dataset.test])
    return train, Arrays(images, labels, 1000, mean=mean, std=std)


def _find(dataset: _Dataset, folder: Path) -> tuple[Path, str]:
    """The folder that has any of the files, and the ending of their names."""
    for below, ending in ((dataset.pickled, ""), (dataset.binary, ".bin")):
        for place in (folder / below, folder):
            if any((place / f"{name}{ending}").is_file() for name in dataset.train + dataset.test):
                return place, ending
    raise dataset.layout.missing(folder / dataset.pickled)


def _read_files(dataset: _Dataset, paths: list[Path]) -> tuple[Tensor, Tensor]:
    rows, labels = zip(*(_read_file(dataset, path) for path in paths), strict=True)
    return torch.cat(rows).reshape(-1, *_SHAPE), torch.cat(labels)


def _read_file(dataset: _Dataset, path: Path) -> tuple[Tensor, Tensor]:
    """The rows of pixels and the labels of one file."""
    data = dataset.layout.read_bytes(path, _MAX_BYTES)
    with dataset.layout.reading(path):
        rows, labels = _from_bytes(dataset, data) if path.suffix == ".bin" else _from_pickle(dataset, data)
        for row, label in enumerate(labels):
            if type(label) is not int or not 0 <= label < dataset.num_classes:
                what = label if isinstance(label, int) else type(label).__name__
                raise ValueError(f"a label {what} in row {row}, and 0 to {dataset.num_classes - 1} are wanted")
        return rows, torch.tensor(labels)


def _from_bytes(dataset: _Dataset, data: bytes) -> tuple[Tensor, list[Any]]:
    size = dataset.num_label_bytes + _PIXELS
    if not data or len(data) % size:
        raise ValueError(f"{len(data):,} bytes, and rows of {size:,} are wanted, one or more")
    rows = torch.frombuffer(bytearray(data), dtype=torch.uint8).reshape(-1, size)
    return rows[:, dataset.num_label_bytes :], rows[:, dataset.num_label_bytes - 1].tolist()


def _from_pickle(dataset: _Dataset, data: bytes) -> tuple[Tensor, list[Any]]:
    batch = unpickle(data)
    if not isinstance(batch, dict):
        raise ValueError(f"a {type(batch).__name__}, and a dict is wanted")
    rows, labels = _entry(batch, "data"), _entry(batch, dataset.label_key)
    if not isinstance(rows, Tensor) or rows.dtype != torch.uint8 or rows.dim() != 2 or rows.shape[1] != _PIXELS:
        raise ValueError(f"data of {_describe(rows)}, and an array of N x {_PIXELS} bytes is wanted")
    labels = labels.tolist() if isinstance(labels, Tensor) else labels
    if not isinstance(labels, list) or len(labels) != len(rows):
        raise ValueError(f"{dataset.label_key} of {_describe(labels)}, and a list of {len(rows)} is wanted")
    return rows, labels


def _entry(batch: dict[str | bytes, object], key: str) -> Any:
    """The value under a key, which Python 2 wrote as bytes."""
    for spelling in (key.encode(), key):
        if spelling in batch:
            return batch[spelling]
    raise ValueError(f"no {key}")


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} and shape {'x'.join(map(str, value.shape))}"
    return f"{len(value)} values" if isinstance(value, list) else f"type {type(value).__name__}"
