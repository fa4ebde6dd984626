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
from torch import Tensor

from secateur.data.arrays import Arrays
from secateur.data.cifar import cifar10, cifar100
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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_classes_can_be_told_apart(layout: Any, tmp_path: Path) -> None:
    """What `miniature` promises to those who train on it."""
    for write, read in ((miniature.write_cifar10, cifar10), (miniature.write_cifar100, cifar100)):
        write(tmp_path, num_per_file=300, layout=layout)
        train, test = read(tmp_path)
        means = torch.stack([bands(train.images[train.labels == k]).mean(0) for k in train.labels.unique()])
        nearest = torch.cdist(bands(test.images), means).argmin(1)
        assert (nearest == test.labels).float().mean() > 0.95


def bands(images: Tensor) -> Tensor:
    return images.float().mean(3).flatten(1)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
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


@pytest.mark.parametrize(("name", "read"), FILES)
def test_files_that_are_missing(name: str, read: Callable[..., Any], originals: Path, tmp_path: Path) -> None:
    path = tmp_path / name
    shutil.copytree(originals / path.parent.name, path.parent)
    path.unlink()
    for folder in (tmp_path, path.parent):
        with pytest.raises(InvalidData, match=f"there is no {path}; the folder of CIFAR-10") as caught:
            read(folder)
    for shown in ("cifar-10-batches-py/", "-bin/") if read is cifar10 else ("cifar-100-python/", "-binary/"):
        assert shown in str(caught.value)
    path.mkdir()
    with pytest.raises(InvalidData, match=f"there is no {path};"):
        read(tmp_path)


def test_folders_that_are_missing(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()  # of another dataset
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(InvalidData, match=f"CIFAR-10: there is no {folder}/cifar-10-batches-py"):
            cifar10(folder)
        with pytest.raises(InvalidData, match=f"CIFAR-100: there is no {folder}/cifar-100-python"):
            cifar100(folder)


@pytest.mark.parametrize(("name", "read"), FILES)
def test_files_cut_short(name: str, read: Callable[..., Any], originals: Path, tmp_path: Path) -> None:
    path = tmp_path / name
    shutil.copytree(originals / path.parent.name, path.parent)
    whole = path.read_bytes()
    row = 3073 if read is cifar10 else 3074
    cuts = {*range(0, 100, 3), *range(100, len(whole), 197), len(whole) - 1}
    for size in cuts - ({row} if path.suffix else set()):
        path.write_bytes(whole[:size])
        with pytest.raises(InvalidData, match=f"{path} is broken: it "):
            read(path.parent)
    path.write_bytes(whole + b"\0" if path.suffix else b"N" + whole)
    with pytest.raises(InvalidData, match="is broken"):
        read(path.parent)


@pytest.mark.parametrize(("name", "read"), FILES)
def test_changed_files_are_read_or_refused(
    name: str, read: Callable[..., Any], originals: Path, tmp_path: Path
) -> None:
    path = tmp_path / name
    shutil.copytree(originals / path.parent.name, path.parent)
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
    ("batch", "reason"),
    [
        ([1, 2], "it holds a list, and a dict is wanted"),
        ({"data": ROWS}, "it has no labels"),
        ({"labels": [1, 2]}, "it has no data"),
        ({"data": ROWS, "fine_labels": [1, 2]}, "it has no labels"),
        ({"data": ROWS, "labels": [1]}, "its labels are a list of 1, and a list of 2 is wanted"),
        ({"data": ROWS, "labels": [1, 2, 3]}, "its labels are a list of 3"),
        ({"data": ROWS, "labels": None}, "its labels are of type NoneType"),
        ({"data": ROWS, "labels": BOMB}, "its labels are of type tuple"),
        ({"data": ROWS, "labels": np.array(1)}, "its labels are of type int"),
        ({"data": ROWS, "labels": [1, 10]}, "the label of row 1 is 10, and 0 to 9 are wanted"),
        ({"data": ROWS, "labels": [-1, 1]}, "the label of row 0 is -1"),
        ({"data": ROWS, "labels": [1, 2**70]}, "the label of row 1 is 1180591620717411303424"),
        ({"data": ROWS, "labels": [1, 2.0]}, "the label of row 1 is float"),
        ({"data": ROWS, "labels": [1, BOMB]}, "the label of row 1 is tuple"),
        ({"data": ROWS, "labels": [True, 2]}, "the label of row 0 is True"),
        ({"data": ROWS, "labels": np.array([[1], [2]])}, "the label of row 0 is list"),
        ({"data": BOMB, "labels": [1, 2]}, "its data are of type tuple, and an array of N x 3072 bytes is wanted"),
        ({"data": [[0] * 3072] * 2, "labels": [1, 2]}, "its data are a list of 2"),
        ({"data": ROWS[0], "labels": [1]}, "its data are an array of torch.uint8 and shape 3072"),
        ({"data": ROWS[:, 1:], "labels": [1, 2]}, "its data are an array of torch.uint8 and shape 2x3071"),
        ({"data": ROWS.reshape(2, 3, 32, 32), "labels": [1, 2]}, "and shape 2x3x32x32"),
        ({"data": ROWS.astype("i2"), "labels": [1, 2]}, "its data are an array of torch.int16 and shape 2x3072"),
        ({"data": ROWS.astype("f4"), "labels": [1, 2]}, "it holds an array of '<f4'; only plain data"),
        ({"data": ROWS[:0], "labels": []}, "a shape that does not go with its 0 bytes"),
        ({"data": ROWS, "labels": [1, 2], "run": print}, "it holds '(__builtin__|builtins).print'; only plain data"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("protocol", [2, 5])
def test_pickles_of_other_things(batch: object, reason: str, protocol: int, originals: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(originals / "cifar-10-batches-py", tmp_path / "cifar-10-batches-py")
    (folder / "data_batch_3").write_bytes(pickle.dumps(batch, protocol))
    with pytest.raises(InvalidData, match=f"CIFAR-10: {folder}/data_batch_3 is broken: .*{reason}"):
        cifar10(tmp_path)


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("cifar-10-batches-bin/test_batch.bin", b"", "it has 0 bytes, and rows of 3,073 are wanted, one or more"),
        ("cifar-10-batches-bin/test_batch.bin", b"\0" * 3072, "it has 3,072 bytes, and rows of 3,073"),
        (
            "cifar-10-batches-bin/test_batch.bin",
            b"\x09" * 3073 + b"\x0a" * 3073,
            "the label of row 1 is 10, and 0 to 9",
        ),
        ("cifar-100-binary/train.bin", b"\0" * 3073, "it has 3,073 bytes, and rows of 3,074"),
        ("cifar-100-binary/train.bin", b"\x13\x63" + b"\0" * 3072 + b"\x13\x64" * 1537, "the label of row 1 is 100"),
    ],
)
def test_plain_files_of_other_things(name: str, data: bytes, reason: str, originals: Path, tmp_path: Path) -> None:
    path = tmp_path / name
    shutil.copytree(originals / path.parent.name, path.parent)
    path.write_bytes(data)
    with pytest.raises(InvalidData, match=f"{path} is broken: .*{reason}"):
        (cifar10 if "10-" in name else cifar100)(tmp_path)


@pytest.mark.parametrize(("name", "read"), FILES)
def test_files_that_are_too_large_are_not_read(
    name: str, read: Callable[..., Any], originals: Path, tmp_path: Path
) -> None:
    path = tmp_path / name
    shutil.copytree(originals / path.parent.name, path.parent)
    with path.open("r+b") as file:
        file.truncate(2**40)  # on disk it takes nothing
    with pytest.raises(InvalidData, match=f"{path} is broken: it has 1,099,511,627,776 bytes, more than 1,073,741,824"):
        read(tmp_path)
