"""Oxford-IIIT Pets: breeds and trimaps."""

from collections import Counter
from pathlib import Path

import numpy as np
import torch
from miniature_images import dataset_of, save, write_pets
from pictures import alike, as_tested
from PIL import Image

from secateur.data.maps import compose
from secateur.data.pets import pets, pets_segmentation


def test_breeds(tmp_path: Path) -> None:
    write_pets(tmp_path)
    train, test = pets(tmp_path)
    assert (train.batch_size, test.batch_size) == (64, 64)
    for loader, rest in ((train, 0), (test, 1)):
        names = [Path(path).stem.split("_") for path in dataset_of(loader).paths]
        assert [int(label) for _, label, _ in names] == dataset_of(loader).targets
        assert {int(index) % 2 for _, _, index in names} == {rest}
        assert Counter(dataset_of(loader).targets) == {0: 4, 1: 4, 2: 4}
    assert next(iter(train))[0].shape == (12, 3, 224, 224)
    with Image.open(dataset_of(test).paths[0]) as image:
        assert alike(dataset_of(test)[0][0], as_tested(image), levels=1)


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
        image, labels = dataset_of(train)[0]
        bright = image[0] > 0
        assert (bright == (labels == 0)).float().mean() > 0.97  # JPEG blurs the edge
        sides.add(int(labels[0, 0]))
        assert int(dataset_of(test)[0][1][0, 0]) == 0
    assert sides == {0, 1}
