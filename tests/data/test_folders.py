"""Images in a folder per class."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from miniature_images import (
    dataset_of,
    picture,
    save,
    write_class_folders,
    write_imagenet,
    write_tiny_imagenet,
)
from pictures import alike
from PIL import Image, ImageOps
from torch import Tensor

from secateur.data.folders import class_folders, imagenet, images, tiny_imagenet
from secateur.data.maps import compose
from secateur.data.photos import Photos
from secateur.errors import InvalidData, InvalidSetting


def labelled(loader: Photos) -> dict[str, int]:
    """The number of the class of each file."""
    images = dataset_of(loader)
    return {Path(path).name: target for path, target in zip(images.paths, images.targets, strict=True)}


def check_colours(loader: Photos) -> None:
    """Every image must have the colour of its class."""
    images, labels = (torch.cat(parts) for parts in zip(*loader, strict=True))
    colours = images.mean(dim=(2, 3))
    middles = torch.stack([colours[labels == label].mean(0) for label in range(int(labels.max()) + 1)])
    assert torch.equal(torch.cdist(colours, middles).argmin(1), labels)


# A user's own


def test_own_folders(tmp_path: Path) -> None:
    write_class_folders(tmp_path)
    train, test = class_folders(tmp_path, batch_size=6)
    assert Counter(dataset_of(train).targets) == {0: 8, 1: 8, 2: 8}
    assert Counter(dataset_of(test).targets) == {0: 4, 1: 4, 2: 4}
    assert [Path(path).parent.name for path in dataset_of(test).paths] == [
        f"class_{label}" for label in dataset_of(test).targets
    ]
    assert next(iter(train))[0].shape == (6, 3, 224, 224)
    check_colours(test)


def test_own_sizes(tmp_path: Path) -> None:
    write_class_folders(tmp_path, size=(64, 64))
    train, test = class_folders(str(tmp_path), size=56)
    assert dataset_of(train)[0][0].shape == (3, 56, 56)
    # As 224 goes with 256, so does 56 with 64, which these images have.
    with Image.open(dataset_of(test).paths[0]) as image:
        assert alike(dataset_of(test)[0][0], compose()(image.crop((4, 4, 60, 60))))


def write_plain(folder: Path, counts: dict[str, int]) -> None:
    """A folder for each class, and nothing above."""
    for label, (name, count) in enumerate(counts.items()):
        for index in range(count):
            save(folder / name / f"{index}.jpg", picture(label, (40, 32), np.random.default_rng(index)))


def test_folders_of_classes_alone_are_split(tmp_path: Path) -> None:
    write_plain(tmp_path, {"cat": 10, "dog": 5, "eel": 2})
    (tmp_path / "notes.txt").write_text("")
    train, test = class_folders(tmp_path, batch_size=4, size=28)
    assert train.classes == test.classes == ["cat", "dog", "eel"]
    assert Counter(dataset_of(train).targets) == {0: 8, 1: 4, 2: 1}
    assert Counter(dataset_of(test).targets) == {0: 2, 1: 1, 2: 1}
    assert not set(train.paths) & set(test.paths)
    assert len({*train.paths, *test.paths}) == 17
    assert (train.shuffle, test.shuffle) == (True, False)
    check_colours(test)
    once, again = (torch.cat([images for images, _ in test]) for _ in range(2))
    assert torch.equal(once, again)
    assert once.shape == (4, 3, 28, 28)


def test_images_are_held_out_of_those_for_training(tmp_path: Path) -> None:
    write_class_folders(tmp_path, per_class=8)
    train, test = class_folders(tmp_path)
    rest, held = train.hold_out(6)
    assert Counter(dataset_of(held).targets) == {0: 2, 1: 2, 2: 2}
    assert {*rest.paths, *held.paths} == set(train.paths)
    assert not {*rest.paths, *held.paths} & set(test.paths)
    assert len(rest.paths) == 18
    assert (rest.crops, held.crops, held.shuffle) == (train.crops, test.crops, False)
    with pytest.raises(InvalidSetting, match="without labels"):
        images(tmp_path)[0].hold_out(2)


@pytest.mark.parametrize(
    ("counts", "words"),
    [({"cat": 3, "dog": 1}, "dog.*one image"), ({"cat": 3}, "one folder, cat"), ({}, "no folders")],
)
def test_folders_of_classes_alone_that_cannot_be_split(tmp_path: Path, counts: dict[str, int], words: str) -> None:
    write_plain(tmp_path, counts)
    with pytest.raises(InvalidData, match=words):
        class_folders(tmp_path)


@pytest.mark.parametrize("size", [0, -1])
def test_sizes_that_no_image_has(tmp_path: Path, size: int) -> None:
    with pytest.raises(InvalidSetting, match=f"got {size}"):
        class_folders(tmp_path, size=size)


def test_test_may_be_the_name_and_may_have_fewer_classes(tmp_path: Path) -> None:
    write_class_folders(tmp_path, parts=("train", "test"))
    for path in (tmp_path / "test/class_0").iterdir():
        path.unlink()
    (tmp_path / "test/class_0").rmdir()
    _, test = class_folders(tmp_path)
    assert set(dataset_of(test).targets) == {1, 2}


def test_what_counts_as_an_image(tmp_path: Path) -> None:
    write_class_folders(tmp_path, num_classes=2, per_class=1)
    folder = tmp_path / "train/class_0"
    for name in (".hidden.jpg", "Thumbs.db", "notes.txt", "two.JPEG", "three.Tiff"):
        (folder / name).write_bytes(b"")
    (folder / "one.PNG").symlink_to(folder / "0.jpg")
    (tmp_path / "train/.cache").mkdir()
    (tmp_path / "train/README.txt").write_text("")
    (tmp_path / "train/class_2").symlink_to(tmp_path / "train/class_1")
    train, _ = class_folders(tmp_path)
    names = [Path(path).name for path in dataset_of(train).paths]
    assert names == ["0.jpg", "one.PNG", "three.Tiff", "two.JPEG", "0.jpg", "0.jpg"]
    assert dataset_of(train).targets == [0, 0, 0, 0, 1, 2]
    assert dataset_of(train)[1][0].shape == (3, 224, 224)


def test_images_without_labels(tmp_path: Path) -> None:
    write_class_folders(tmp_path, num_classes=2, per_class=2, size=(256, 256))
    (tmp_path / "Above.PNG").write_bytes((tmp_path / "train/class_0/0.jpg").read_bytes())
    for name in (".hidden.jpg", "notes.txt", "train/.cache/0.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    train, test = images(str(tmp_path), batch_size=4)
    paths = [str(tmp_path / "Above.PNG")]
    paths += [str(tmp_path / f"train/class_{label}/{index}.jpg") for label in (0, 1) for index in (0, 1)]
    paths += [str(tmp_path / f"val/class_{label}/0.jpg") for label in (0, 1)]
    assert test.paths == paths
    found = torch.cat(list(test))
    for pixels, path in zip(found, paths, strict=True):
        with Image.open(path) as image:
            assert alike(pixels, compose()(image.convert("RGB").crop((16, 16, 240, 240))))
    orders = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        shown = torch.cat(list(train)).flatten(1)
        orders.append([int((found.flatten(1) == image).all(1).nonzero()[-1]) for image in shown])
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize(("name", "got"), [("nowhere", None), ("empty", "no images")])
def test_a_folder_without_images(tmp_path: Path, name: str, got: str | None) -> None:
    (tmp_path / "empty/deep").mkdir(parents=True)
    (tmp_path / "empty/deep/notes.txt").write_text("")
    with pytest.raises(InvalidData) as caught:
        images(tmp_path / name)
    assert str(tmp_path / name) in caught.value.what
    assert (caught.value.got, "to any depth" in str(caught.value.remedy)) == (got, True)


# ImageNet


@pytest.mark.parametrize("devkit", [False, True])
def test_imagenet(tmp_path: Path, devkit: bool) -> None:
    write_imagenet(tmp_path, devkit=devkit)
    train, test = imagenet(tmp_path)
    assert (train.batch_size, test.batch_size) == (256, 256)
    assert Counter(dataset_of(train).targets) == {0: 8, 1: 8, 2: 8}
    assert Counter(dataset_of(test).targets) == {0: 4, 1: 4, 2: 4}
    assert all(
        name.startswith(("n01440764", "n01440781", "n01440798")[label]) for name, label in labelled(train).items()
    )
    images, _ = next(iter(train))
    assert images.shape == (24, 3, 224, 224)
    check_colours(test)


# Tiny-ImageNet


def test_tiny_imagenet(tmp_path: Path) -> None:
    write_tiny_imagenet(tmp_path)
    train, test = tiny_imagenet(tmp_path)
    assert train.batch_size == 128
    names = ["n02124075", "n02124106", "n02124137"]  # sorted, other than in wnids.txt
    assert all(name.startswith(names[label]) for name, label in labelled(train).items())
    assert Counter(dataset_of(train).targets) == {0: 8, 1: 8, 2: 8}
    assert Counter(dataset_of(test).targets) == {0: 4, 1: 4, 2: 4}
    check_colours(test)
    assert next(iter(train))[0].shape == (24, 3, 64, 64)


def test_images_of_tiny_imagenet_keep_their_pixels(tmp_path: Path) -> None:
    write_tiny_imagenet(tmp_path, num_classes=1, per_class=1)
    train, test = tiny_imagenet(tmp_path / "tiny-imagenet-200")
    with Image.open(dataset_of(test).paths[0]) as image:
        assert alike(dataset_of(test)[0][0], compose()(image))
    # In training they are moved by up to 4 pixels either way, over black.
    with Image.open(dataset_of(train).paths[0]) as image:
        padded = compose()(ImageOps.expand(image, 4))
    torch.manual_seed(0)
    views = [dataset_of(train)[0][0] for _ in range(60)]
    found = [places(view, padded) + places(view.flip(-1), padded) for view in views]
    assert all(len(ways) == 1 for ways in found)
    assert {y for ((y, _),) in found} == {x for ((_, x),) in found} == set(range(9))


def places(view: Tensor, whole: Tensor) -> list[tuple[int, int]]:
    """Where an image of 64x64 pixels is found in one of 72x72."""
    return [(y, x) for y in range(9) for x in range(9) if alike(whole[:, y : y + 64, x : x + 64], view)]
