"""CIFAR-10 and CIFAR-100 from small files in the formats of the real ones."""

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import miniature
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from secateur.data.arrays import Arrays
from secateur.data.cifar import CIFAR10, CIFAR100, cifar10, cifar100
from secateur.errors import InvalidData

LAYOUTS: list[Literal["python", "binary"]] = ["python", "binary"]


def assert_examples(arrays: Arrays, written: miniature.Examples) -> None:
    images, labels = written
    assert arrays.images.dtype == torch.uint8
    assert arrays.images.is_contiguous()
    assert torch.equal(arrays.images, images)
    assert arrays.labels.dtype == torch.long
    assert torch.equal(arrays.labels, labels)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("write", "read"), [(miniature.write_cifar10, cifar10), (miniature.write_cifar100, cifar100)])
def test_what_was_written_is_read(
    write: Callable[..., Any], read: Callable[..., Any], layout: str, tmp_path: Path
) -> None:
    written = write(tmp_path, num_per_file=30, layout=layout, seed=3)
    (below,) = tmp_path.iterdir()
    renamed = shutil.copytree(below, tmp_path / "renamed")
    for folder in (tmp_path, str(tmp_path), below, renamed):
        train, test = read(folder)
        assert_examples(train, written[0])
        assert_examples(test, written[1])
    assert train.images.shape == (150 if read is cifar10 else 30, 3, 32, 32)
    assert not torch.equal(train.images[:30], test.images)


@pytest.mark.parametrize(
    ("write", "read", "mean", "std"),
    [
        (miniature.write_cifar10, cifar10, (0.4914, 0.4822, 0.4465), (0.247, 0.243, 0.261)),
        (miniature.write_cifar100, cifar100, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    ],
)
def test_batches(write: Callable[..., Any], read: Callable[..., Any], mean: Any, std: Any, tmp_path: Path) -> None:
    _, (images, labels) = write(tmp_path, num_per_file=200)
    train, test = read(tmp_path, batch_size=50)
    assert (train.shuffle, train.crop, train.flip, train.batch_size) == (True, 4, True, 50)
    assert read(tmp_path)[0].batch_size == 128
    assert len(next(iter(train))[1]) == 50
    ((batch, batch_labels),) = test  # of up to 1000
    numbers = torch.tensor([mean, std])[:, :, None, None]
    assert torch.allclose(batch, (images / 255 - numbers[0]) / numbers[1], atol=1e-6)
    assert torch.equal(batch_labels, labels)
    assert (train.mean, train.std) == (test.mean, test.std) == (mean, std)


@pytest.mark.parametrize("protocol", [2, 5])
@pytest.mark.parametrize("keys", [str, str.encode])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("labels", [list, np.array])
def test_pickles_of_python_3(protocol: int, keys: Any, order: Any, labels: Any, tmp_path: Path) -> None:
    written = {}
    for name in ("train", "test"):
        images, numbers = miniature.examples(7, 100, (3, 32, 32), seed=len(written))
        rows = images.flatten(1).numpy().copy(order=order)
        batch = {"fine_labels": labels(numbers.tolist()), "data": rows, "batch_label": ""}
        (tmp_path / name).write_bytes(pickle.dumps({keys(key): value for key, value in batch.items()}, protocol))
        written[name] = images, numbers
    train, test = cifar100(tmp_path)
    assert_examples(train, written["train"])
    assert_examples(test, written["test"])


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("originals")
    for layout in LAYOUTS:
        miniature.write_cifar10(folder, 2, layout=layout)
        miniature.write_cifar100(folder, 2, layout=layout)
    return folder


FILES = [
    ("cifar-10-batches-py/data_batch_4", cifar10),
    ("cifar-10-batches-py/test_batch", cifar10),
    ("cifar-10-batches-bin/data_batch_1.bin", cifar10),
    ("cifar-100-python/train", cifar100),
    ("cifar-100-binary/test.bin", cifar100),
]


def copied(originals: Path, path: Path) -> Path:
    shutil.copytree(originals / path.parent.name, path.parent)
    return path


@pytest.mark.parametrize(("name", "read"), FILES)
def test_files_that_are_missing(name: str, read: Callable[..., Any], originals: Path, tmp_path: Path) -> None:
    path = copied(originals, tmp_path / name)
    path.unlink()
    for folder in (tmp_path, path.parent):
        with pytest.raises(InvalidData) as caught:
            read(folder)
        assert caught.value.what.endswith(f"there is no {path}")
        assert caught.value.remedy == str(CIFAR10 if read is cifar10 else CIFAR100)
        path.mkdir(exist_ok=True)


def test_folders_that_are_missing(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()  # of another dataset
    for folder in (tmp_path, tmp_path / "none"):
        for read, name in ((cifar10, "cifar-10-batches-py"), (cifar100, "cifar-100-python")):
            with pytest.raises(InvalidData) as caught:
                read(folder)
            assert caught.value.what.endswith(f"there is no {folder}/{name}")


@pytest.mark.parametrize(("name", "read"), FILES)
def test_files_cut_short(name: str, read: Callable[..., Any], originals: Path, tmp_path: Path) -> None:
    path = copied(originals, tmp_path / name)
    whole = path.read_bytes()
    row = 3073 if read is cifar10 else 3074
    sizes = {*range(0, 100, 3), *range(100, len(whole), 397), len(whole) - 1} - ({row} if path.suffix else set())
    for data in (*(whole[:size] for size in sizes), whole + b"\0" if path.suffix else b"N" + whole):
        path.write_bytes(data)
        with pytest.raises(InvalidData) as caught:
            read(path.parent)
        assert caught.value.what.endswith(f"{path} is damaged")


@pytest.mark.parametrize(("name", "read"), FILES)
def test_changed_files_are_read_or_refused(
    name: str, read: Callable[..., Any], originals: Path, tmp_path: Path
) -> None:
    path = copied(originals, tmp_path / name)
    whole = path.read_bytes()
    # Where the pickles have more than pixels, and the plain files have labels.
    places = [k for k in range(len(whole)) if k < 400 or k > len(whole) - 200]

    @settings(deadline=None, max_examples=40)
    @given(st.lists(st.tuples(st.sampled_from(places), st.integers(0, 7)), min_size=1, max_size=3))
    def change(flips: list[tuple[int, int]]) -> None:
        data = bytearray(whole)
        for position, bit in flips:
            data[position] ^= 1 << bit
        path.write_bytes(data)
        try:
            parts = read(path.parent)
        except InvalidData as error:
            assert str(path) in str(error)  # noqa: PT017
            return
        for part, count in zip(parts, (10 if read is cifar10 else 2, 2), strict=True):
            assert part.images.shape == (count, 3, 32, 32)
            assert part.labels.shape == (count,)
            assert 0 <= int(part.labels.min()) <= int(part.labels.max()) < (10 if read is cifar10 else 100)

    change()


ROWS = np.zeros((2, 3072), np.uint8)
BOMB = ()
for _ in range(60):
    BOMB = (BOMB, BOMB)


@pytest.mark.parametrize(
    ("batch", "got"),
    [
        ([1, 2], "a list, and a dict is wanted"),
        ({"data": ROWS}, "no labels"),
        ({"labels": [1, 2]}, "no data"),
        ({"data": ROWS, "fine_labels": [1, 2]}, "no labels"),
        ({"data": ROWS, "labels": [1]}, "labels of 1 values"),
        ({"data": ROWS, "labels": [1, 2, 3]}, "labels of 3 values"),
        ({"data": ROWS, "labels": None}, "labels of type NoneType"),
        ({"data": ROWS, "labels": BOMB}, "labels of type tuple"),
        ({"data": ROWS, "labels": np.array(1)}, "labels of type int"),
        ({"data": ROWS, "labels": [1, 10]}, "a label 10 in row 1"),
        ({"data": ROWS, "labels": [-1, 1]}, "a label -1 in row 0"),
        ({"data": ROWS, "labels": [1, 2**70]}, "a label 1180591620717411303424 in row 1"),
        ({"data": ROWS, "labels": [1, 2.0]}, "a label float in row 1"),
        ({"data": ROWS, "labels": [1, BOMB]}, "a label tuple in row 1"),
        ({"data": ROWS, "labels": [True, 2]}, "a label True in row 0"),
        ({"data": ROWS, "labels": np.array([[1], [2]])}, "a label list in row 0"),
        ({"data": BOMB, "labels": [1, 2]}, "data of type tuple"),
        ({"data": [[0] * 3072] * 2, "labels": [1, 2]}, "data of 2 values"),
        ({"data": ROWS[0], "labels": [1]}, "data of torch.uint8 and shape 3072"),
        ({"data": ROWS[:, 1:], "labels": [1, 2]}, "data of torch.uint8 and shape 2x3071"),
        ({"data": ROWS.reshape(2, 3, 32, 32), "labels": [1, 2]}, "and shape 2x3x32x32"),
        ({"data": ROWS.astype("i2"), "labels": [1, 2]}, "data of torch.int16 and shape 2x3072"),
        ({"data": ROWS.astype("f4"), "labels": [1, 2]}, "an array of '<f4'; only plain data"),
        ({"data": ROWS[:0], "labels": []}, "shape does not fit its 0 bytes"),
        ({"data": ROWS, "labels": [1, 2], "run": print}, ".print'; only plain data"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("protocol", [2, 5])
def test_pickles_of_other_things(batch: object, got: str, protocol: int, originals: Path, tmp_path: Path) -> None:
    path = copied(originals, tmp_path / "cifar-10-batches-py/data_batch_3")
    check_damaged(path, pickle.dumps(batch, protocol), got, cifar10)


def check_damaged(path: Path, data: bytes, got: str, read: Callable[..., Any]) -> None:
    path.write_bytes(data)
    with pytest.raises(InvalidData) as caught:
        read(path.parent)
    assert caught.value.what.endswith(f"{path} is damaged")
    assert got in str(caught.value.got)


@pytest.mark.parametrize(
    ("name", "data", "got"),
    [
        ("cifar-10-batches-bin/test_batch.bin", b"", "0 bytes, and rows of 3,073 are wanted"),
        ("cifar-10-batches-bin/test_batch.bin", b"\0" * 3072, "3,072 bytes, and rows of 3,073 are wanted"),
        ("cifar-10-batches-bin/test_batch.bin", b"\x09" * 3073 + b"\x0a" * 3073, "a label 10 in row 1"),
        ("cifar-100-binary/train.bin", b"\0" * 3073, "3,073 bytes, and rows of 3,074 are wanted"),
        ("cifar-100-binary/train.bin", b"\x13\x63" + b"\0" * 3072 + b"\x13\x64" * 1537, "a label 100 in row 1"),
    ],
)
def test_plain_files_of_other_things(name: str, data: bytes, got: str, originals: Path, tmp_path: Path) -> None:
    check_damaged(copied(originals, tmp_path / name), data, got, cifar10 if "10-" in name else cifar100)


@pytest.mark.parametrize(("name", "read"), FILES)
def test_files_that_are_too_large_are_not_read(
    name: str, read: Callable[..., Any], originals: Path, tmp_path: Path
) -> None:
    path = copied(originals, tmp_path / name)
    with path.open("r+b") as file:
        file.truncate(2**40)  # on disk it takes nothing
    with pytest.raises(InvalidData) as caught:
        read(tmp_path)
    assert (caught.value.got, caught.value.wanted) == ("1,099,511,627,776 bytes", "1,073,741,824 at most")
