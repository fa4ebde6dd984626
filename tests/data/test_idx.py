"""Fashion-MNIST from small files in the format of the real ones."""

import gzip
import struct
import tracemalloc
from pathlib import Path

import miniature
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from secateur.data.idx import FASHION_MNIST, fashion_mnist
from secateur.errors import InvalidData

IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
NAMES = [IMAGES, LABELS, "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"]


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("below", ["", "FashionMNIST/raw"])
def test_what_was_written_is_read(compressed: bool, below: str, tmp_path: Path) -> None:
    written = miniature.write_fashion_mnist(tmp_path / below, 70, 30, compressed, seed=3)
    for arrays, (images, labels) in zip(fashion_mnist(str(tmp_path)), written, strict=True):
        assert arrays.images.dtype == torch.uint8
        assert arrays.images.shape == (len(labels), 1, 28, 28)
        assert torch.equal(arrays.images, images)
        assert arrays.labels.dtype == torch.long
        assert torch.equal(arrays.labels, labels)


def test_batches(tmp_path: Path) -> None:
    _, (images, labels) = miniature.write_fashion_mnist(tmp_path)
    train, test = fashion_mnist(tmp_path, batch_size=30)
    assert (train.shuffle, train.crop, train.flip, train.batch_size) == (True, 2, True, 30)
    assert fashion_mnist(tmp_path)[0].batch_size == 128
    assert (train.mean, train.std) == (test.mean, test.std)
    ((batch, batch_labels),) = test
    assert torch.allclose(batch, (images / 255 - 0.2860) / 0.3530, atol=1e-6)
    assert torch.equal(batch_labels, labels)


@pytest.mark.parametrize("name", NAMES)
def test_files_that_are_missing(name: str, tmp_path: Path) -> None:
    miniature.write_fashion_mnist(tmp_path, 3, 3)
    path = tmp_path / name
    path.unlink()
    for _ in range(2):
        with pytest.raises(InvalidData) as caught:
            fashion_mnist(tmp_path)
        assert caught.value.what == f"Fashion-MNIST: there is no {path}"
        assert caught.value.remedy == str(FASHION_MNIST)
        path.mkdir(exist_ok=True)


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_files_cut_short(compressed: bool, name: str, tmp_path: Path) -> None:
    miniature.write_fashion_mnist(tmp_path, 3, 3, compressed)
    path = tmp_path / (f"{name}.gz" if compressed else name)
    whole = path.read_bytes()
    sizes = {*range(min(40, len(whole))), *range(40, len(whole), 50), len(whole) - 1}
    others = [whole + b"\1", *([b"not compressed"] if compressed else [])]
    for data in (*(whole[:size] for size in sizes), *others):
        path.write_bytes(data)
        with pytest.raises(InvalidData) as caught:
            fashion_mnist(tmp_path)
        assert caught.value.what == f"Fashion-MNIST: {path} is damaged"


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("name", [IMAGES, LABELS])
def test_changed_files_are_read_or_refused(compressed: bool, name: str, tmp_path: Path) -> None:
    written = miniature.write_fashion_mnist(tmp_path, 3, 3, compressed)
    path = tmp_path / (f"{name}.gz" if compressed else name)
    whole = path.read_bytes()

    @settings(deadline=None, max_examples=60)
    @given(st.integers(0, min(len(whole), 100) - 1) | st.integers(0, len(whole) - 1), st.integers(0, 7))
    def change(position: int, bit: int) -> None:
        data = bytearray(whole)
        data[position] ^= 1 << bit
        path.write_bytes(data)
        try:
            train, _ = fashion_mnist(tmp_path)
        except InvalidData as error:
            assert str(path) in str(error)  # noqa: PT017
            return
        # A checksum keeps what is compressed; of plain bytes, one has changed.
        changed = int((train.images != written[0][0]).sum() + (train.labels != written[0][1]).sum())
        assert changed == (0 if compressed else 1)
        assert int(train.labels.max()) < 10

    change()


def header(*sizes: int, magic: tuple[int, int, int] = (0, 0, 8)) -> bytes:
    return struct.pack(f">4B{len(sizes)}I", *magic, len(sizes), *sizes)


DAMAGED = [
    (IMAGES, b"", "a header of  instead of 00 00 08 03"),
    (IMAGES, b"\0\0\x08", "a header of 00 00 08 instead of"),
    (IMAGES, header(2, 28, 28)[:-1], "an incomplete header"),
    (IMAGES, header(2, 784) + b"\0" * 1568, "a header of 00 00 08 02 instead of 00 00 08 03"),
    (IMAGES, header(2, 28, 28, magic=(0, 0, 9)) + b"\0" * 1568, "a header of 00 00 09 03"),
    (IMAGES, header(2, 28, 28, magic=(0, 1, 8)) + b"\0" * 1568, "a header of 00 01 08 03"),
    (IMAGES, header(0, 28, 28), "0x28x28 bytes in its header"),
    (IMAGES, header(2**32 - 1, 2**32 - 1, 28), "4294967295x4294967295x28 bytes in its header"),
    (IMAGES, header(2**20, 32, 33), "1048576x32x33 bytes in its header"),
    (IMAGES, header(2**20, 32, 32) + b"\0", "1 bytes instead of the 1,073,741,824 in its header"),
    (IMAGES, header(2, 28, 28) + b"\0" * 1567, "1,567 bytes instead of the 1,568 in its header"),
    (IMAGES, header(2, 28, 28) + b"\0" * 1569, "more bytes instead of the 1,568 in its header"),
    (IMAGES, header(3, 28, 28) + bytes(200_000_000), "more bytes instead of the 2,352 in its header"),
    (IMAGES, header(2, 14, 56) + b"\0" * 1568, "images of 14x56 pixels"),
    (LABELS, header(2, 28, 28) + b"\0" * 1568, "a header of 00 00 08 03 instead of 00 00 08 01"),
    (LABELS, header(4) + b"\0" * 4, "4 labels"),
    (LABELS, header(3) + b"\0\x0a\0", "a label 10"),
    (LABELS, header(2**32 - 1) + b"\0\0\0", "4294967295 bytes in its header"),
]


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize(("name", "data", "got"), DAMAGED, ids=[got for *_, got in DAMAGED])
def test_damaged_files_take_little_memory(name: str, data: bytes, got: str, compressed: bool, tmp_path: Path) -> None:
    miniature.write_fashion_mnist(tmp_path, 3, 3, compressed)
    path = tmp_path / (f"{name}.gz" if compressed else name)
    path.write_bytes(gzip.compress(data, 1) if compressed else data)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidData) as caught:
            fashion_mnist(tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.what == f"Fashion-MNIST: {path} is damaged"
    assert got in str(caught.value.got)
    assert peak < 10_000_000
