"""Fashion-MNIST, in the idx format of MNIST: a header with the shape, then bytes."""

from __future__ import annotations

import gzip
import math
from io import BufferedIOBase
from pathlib import Path

import torch
from torch import Tensor

from secateur.data.arrays import Arrays
from secateur.data.layout import Layout
from secateur.words import counted

FASHION_MNIST = Layout(
    name="Fashion-MNIST",
    tree="""\
train-images-idx3-ubyte   N x 28 x 28 bytes after a header of 16
train-labels-idx1-ubyte   N bytes, 0 to 9, after a header of 8
t10k-images-idx3-ubyte
t10k-labels-idx1-ubyte
each also as .gz, and also below FashionMNIST/raw""",
    source="train-images-idx3-ubyte.gz and the three with it",
)

_NUM_CLASSES = 10
_MAX_BYTES = 2**30
_PIECE = 2**20


def fashion_mnist(folder: str | Path, batch_size: int = 128) -> tuple[Arrays, Arrays]:
    """Training images (shifted by up to 2 pixels, randomly flipped) and test images of ten classes of clothes."""
    mean, std = (0.2860,), (0.3530,)
    images, labels = _read_pair(Path(folder), "train")
    train = Arrays(images, labels, batch_size, shuffle=True, crop=2, flip=True, mean=mean, std=std)
    images, labels = _read_pair(Path(folder), "t10k")
    return train, Arrays(images, labels, 1000, mean=mean, std=std)


def _read_pair(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    path, images = _read(folder, f"{part}-images-idx3-ubyte", num_dimensions=3)
    if images.shape[1:] != (28, 28):
        raise FASHION_MNIST.damaged(path, f"images of {'x'.join(map(str, images.shape[1:]))} pixels", "28x28")
    path, labels = _read(folder, f"{part}-labels-idx1-ubyte", num_dimensions=1)
    if len(labels) != len(images):
        raise FASHION_MNIST.damaged(path, counted(len(labels), "label"), counted(len(images), "image"))
    if labels.max() >= _NUM_CLASSES:
        raise FASHION_MNIST.damaged(path, f"a label {labels.max()}", f"0 to {_NUM_CLASSES - 1}")
    return images[:, None], labels.long()


def _read(folder: Path, name: str, num_dimensions: int) -> tuple[Path, Tensor]:
    """The path of the file, and its array."""
    below = f"FashionMNIST/raw/{name}"
    path = FASHION_MNIST.find(folder, name, f"{name}.gz", below, f"{below}.gz")
    if not path.is_file():
        raise FASHION_MNIST.missing(path)
    with FASHION_MNIST.reading(path), gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        return path, _read_array(file, num_dimensions)


def _read_array(file: BufferedIOBase, num_dimensions: int) -> Tensor:
    header = file.read(4 + 4 * num_dimensions)
    wanted = bytes([0, 0, 0x08, num_dimensions])  # 0x08: of bytes
    if header[:4] != wanted:
        raise ValueError(f"a header of {header[:4].hex(' ')} instead of {wanted.hex(' ')}")
    if len(header) < 4 + 4 * num_dimensions:
        raise ValueError("an incomplete header")
    shape = [int.from_bytes(header[start : start + 4], "big") for start in range(4, len(header), 4)]
    size = math.prod(shape)
    if not 0 < size <= _MAX_BYTES:
        raise ValueError(f"{'x'.join(map(str, shape))} bytes in its header, more than {_MAX_BYTES:,} or none")
    # Piece by piece: neither the header nor compressed data may take more memory than the data need.
    data = bytearray()
    while len(data) <= size and (piece := file.read(_PIECE)):
        data += piece
    if len(data) != size:
        found = "more" if len(data) > size else f"{len(data):,}"
        raise ValueError(f"{found} bytes instead of the {size:,} in its header")
    return torch.frombuffer(data, dtype=torch.uint8).reshape(shape)
