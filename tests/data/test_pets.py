"""Oxford-IIIT Pets: breeds and trimaps."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from miniature_images import save, write_pets
from PIL import Image
from torch.utils.data import DataLoader

from secateur.data.images import Images, Maps, compose, for_testing
from secateur.data.pets import PETS, pets, pets_segmentation
from secateur.errors import InvalidData


def images_of(loader: DataLoader) -> Images:
    assert isinstance(loader.dataset, Images)
    return loader.dataset


def maps_of(loader: DataLoader) -> Maps:
    assert isinstance(loader.dataset, Maps)
    return loader.dataset


def test_breeds(tmp_path: Path) -> None:
    write_pets(tmp_path)
    train, test = pets(tmp_path)
    assert (train.batch_size, test.batch_size) == (64, 64)
    for loader, rest in ((train, 0), (test, 1)):
        names = [Path(path).stem.split("_") for path in images_of(loader).paths]
        assert [int(label) for _, label, _ in names] == images_of(loader).targets
        assert {int(index) % 2 for _, _, index in names} == {rest}
        assert Counter(images_of(loader).targets) == {0: 4, 1: 4, 2: 4}
    assert next(iter(train))[0].shape == (12, 3, 224, 224)
    with Image.open(images_of(test).paths[0]) as image:
        assert torch.equal(images_of(test)[0][0], for_testing()(image))


def test_trimaps(tmp_path: Path) -> None:
    write_pets(tmp_path)
    train, test = pets_segmentation(str(tmp_path), size=32)
    assert (train.batch_size, test.batch_size) == (16, 16)
    images, maps = next(iter(test))
    assert images.shape == (12, 3, 32, 32)
    assert maps.shape == (12, 32, 32)
    assert maps[0, 16, 16] == 0  # the animal
    assert maps[0, 0, 0] == 1  # what lies around it
    assert set(maps.unique().tolist()) == {0, 1, 2}
    # The animal is where its colour is: all else is brown.
    brown = compose()(Image.new("RGB", (1, 1), (130, 90, 40)))[:, 0, 0]
    ground = images.movedim(1, -1)[maps == 1].mean(0)
    animal = images.movedim(1, -1)[maps == 0].mean(0)
    assert torch.dist(ground, brown) < 0.2 < torch.dist(animal, brown)


def test_trimaps_are_mirrored_with_their_images_in_training_only(tmp_path: Path) -> None:
    write_pets(tmp_path, num_classes=1, per_class=2, size=(32, 32))
    left = np.full((32, 32), 2, np.uint8)
    left[:, :10] = 1
    for index in range(2):
        save(tmp_path / f"annotations/trimaps/Breed_0_{index}.png", left)
        save(
            tmp_path / f"images/Breed_0_{index}.jpg",
            np.repeat(np.where(left == 1, 255, 0)[:, :, None], 3, 2).astype("u1"),
        )
    train, test = pets_segmentation(tmp_path, size=32)
    sides = set()
    for _ in range(20):
        image, labels = maps_of(train)[0]
        bright = image[0] > 0
        assert (bright == (labels == 0)).float().mean() > 0.97  # JPEG blurs the edge
        sides.add(int(labels[0, 0]))
        assert int(maps_of(test)[0][1][0, 0]) == 0
    assert sides == {0, 1}


@pytest.mark.parametrize("read", [pets, pets_segmentation])
@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("trainval.txt", "Breed_0_0 0 1 1\n", "trainval.txt is broken: Breed_0_0 has class 0, wanted 1 to 37;"),
        ("test.txt", "Breed_0_1 38 1 1\n", "test.txt is broken: Breed_0_1 has class 38, wanted 1 to 37;"),
        (
            "test.txt",
            "Breed_0_1 1\n",
            "test.txt is broken: line 1 is 'Breed_0_1 1', wanted: name number species breed;",
        ),
        ("test.txt", "Breed_0_99 1 1 1\n", "there is no .*images/Breed_0_99.jpg;"),
        ("test.txt", "../x 1 1 1\n", "test.txt is broken: '../x.jpg' leads out of the folder;"),
        ("test.txt", "", "test.txt is broken: it is empty;"),
        ("trainval.txt", None, "there is no .*annotations/trainval.txt;"),
    ],
)
def test_lists_that_do_not_fit_are_named(tmp_path: Path, read: Any, file: str, text: str | None, message: str) -> None:
    write_pets(tmp_path, per_class=2)
    path = tmp_path / "annotations" / file
    path.unlink()
    if text is not None:
        path.write_text(text)
    with pytest.raises(InvalidData, match=rf"^Oxford-IIIT Pets: .*{message}.*{re.escape(str(PETS))}$"):
        read(tmp_path)


def test_a_list_is_not_read_whatever_its_size(tmp_path: Path) -> None:
    write_pets(tmp_path)
    path = next(tmp_path.rglob("test.txt"))
    with path.open("ab") as file:
        file.truncate(1 << 34)  # of which the disk holds nothing
    with pytest.raises(InvalidData, match=r"test\.txt is broken: it has 17,179,869,184 bytes, more than any list"):
        pets(tmp_path, 4)


def test_trimaps_that_do_not_fit_are_named(tmp_path: Path) -> None:
    write_pets(tmp_path, num_classes=1, per_class=2)
    path = tmp_path / "annotations/trimaps/Breed_0_0.png"
    train, _ = pets_segmentation(tmp_path)
    save(path, np.zeros((32, 40), np.uint8))
    with pytest.raises(InvalidData, match=r"trimaps/Breed_0_0.png is broken: it holds the value 0, wanted 1 to 3;"):
        maps_of(train)[0]
    save(path, np.ones((32, 41), np.uint8))
    with pytest.raises(InvalidData, match=r"Breed_0_0.png is broken: it has 41x32 pixels and its image 40x32;"):
        maps_of(train)[0]
    path.unlink()
    pets(tmp_path)  # does not need it
    with pytest.raises(InvalidData, match=r"there is no .*annotations/trimaps/Breed_0_0.png;"):
        pets_segmentation(tmp_path)
