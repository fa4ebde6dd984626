"""Small datasets in the formats of the real ones. Each class has colours of its own, so a network can learn them.

Every function writes below `folder` and returns what it wrote: (images, labels) for training and for testing.
"""

import gzip
import struct
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

Examples = tuple[Tensor, Tensor]


def write_cifar10(
    folder: str | Path, num_per_file: int = 20, layout: Literal["python", "binary"] = "python", seed: int = 0
) -> tuple[Examples, Examples]:
    """Five files to train on and one to test on, as many examples in each."""
    below = Path(folder) / ("cifar-10-batches-py" if layout == "python" else "cifar-10-batches-bin")
    below.mkdir(parents=True, exist_ok=True)
    parts = []
    for number, name in enumerate([*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]):
        images, labels = examples(num_per_file, 10, (3, 32, 32), seed=6 * seed + number)
        if layout == "python":
            entries = {"batch_label": text(name), "labels": numbers(labels), "data": array(images.flatten(1))}
            (below / name).write_bytes(python2_pickle(entries))
        else:
            (below / f"{name}.bin").write_bytes(rows(labels, images))
        parts.append((images, labels))
    images, labels = zip(*parts[:5], strict=True)
    return (torch.cat(images), torch.cat(labels)), parts[5]


def write_cifar100(
    folder: str | Path, num_per_file: int = 200, layout: Literal["python", "binary"] = "python", seed: int = 0
) -> tuple[Examples, Examples]:
    """One file to train on and one to test on, as many examples in each; a coarse label for five fine ones."""
    below = Path(folder) / ("cifar-100-python" if layout == "python" else "cifar-100-binary")
    below.mkdir(parents=True, exist_ok=True)
    parts = []
    for number, name in enumerate(["train", "test"]):
        images, labels = examples(num_per_file, 100, (3, 32, 32), seed=2 * seed + number)
        if layout == "python":
            entries = {
                "filenames": b"](" + b"".join(text(f"{label}.png") for label in labels.tolist()) + b"e",
                "coarse_labels": numbers(labels // 5),
                "fine_labels": numbers(labels),
                "data": array(images.flatten(1)),
            }
            (below / name).write_bytes(python2_pickle(entries))
        else:
            (below / f"{name}.bin").write_bytes(rows(labels // 5, labels, images))
        parts.append((images, labels))
    return parts[0], parts[1]


def write_fashion_mnist(
    folder: str | Path, num_train: int = 100, num_test: int = 20, compressed: bool = False, seed: int = 0
) -> tuple[Examples, Examples]:
    """The four files, compressed or not."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    parts = []
    for number, (name, count) in enumerate([("train", num_train), ("t10k", num_test)]):
        images, labels = examples(count, 10, (1, 28, 28), seed=2 * seed + number)
        for kind, values in (("images-idx3", images[:, 0]), ("labels-idx1", labels)):
            data, path = idx(values), Path(folder) / f"{name}-{kind}-ubyte"
            if compressed:
                path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(data))
            else:
                path.write_bytes(data)
        parts.append((images, labels))
    return parts[0], parts[1]


def examples(count: int, num_classes: int, shape: tuple[int, int, int], seed: int) -> Examples:
    """Noise over four bands of colours, the same ones for a class whatever the seed, and for mirrored images."""
    channels, height, width = shape
    bands = torch.randint(30, 226, (num_classes, channels, 4, 1), generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randperm(count, generator=generator) % num_classes
    noise = 20 * torch.randn(count, channels, height, width, generator=generator)
    images = bands[labels].repeat_interleave(height // 4, dim=2) + noise
    return images.clamp(0, 255).to(torch.uint8), labels


def idx(values: Tensor) -> bytes:
    """A file of the idx format: zero, zero, 8 for bytes, the number of dimensions, the dimensions, the bytes."""
    header = struct.pack(f">4B{values.dim()}I", 0, 0, 8, values.dim(), *values.shape)
    return header + bytes(values.flatten().tolist())


def rows(*columns: Tensor) -> bytes:
    """Labels and pixels of each example, one example after the other."""
    table = torch.cat([column.reshape(len(column), -1).to(torch.uint8) for column in columns], dim=1)
    return bytes(table.flatten().tolist())


def python2_pickle(entries: dict[str, bytes]) -> bytes:
    """A dict as Python 2.7 writes it with protocol 2: text is bytes. The values are pickled already."""
    items = b"".join(text(key) + value for key, value in entries.items())
    return b"\x80\x02}q\x01(" + items + b"u."


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return (b"U" + struct.pack("<B", len(data)) if len(data) < 256 else b"T" + struct.pack("<i", len(data))) + data


def numbers(values: Tensor) -> bytes:
    return b"](" + b"".join(b"K" + bytes([value]) for value in values.tolist()) + b"e"


def array(values: Tensor) -> bytes:
    """A numpy array of bytes."""
    shape = b"(" + b"".join(b"J" + struct.pack("<i", size) for size in values.shape) + b"t"
    dtype = (
        b"cnumpy\ndtype\n"
        + text("u1")
        + b"K\0K\x01\x87R(K\x03"
        + text("|")
        + b"NNN"
        + 2 * b"J\xff\xff\xff\xff"
        + b"K\0tb"
    )
    new = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85" + text("b") + b"\x87Rq\x02"
    return new + b"(K\x01" + shape + dtype + b"\x89" + text(bytes(values.flatten().tolist())) + b"tb"
