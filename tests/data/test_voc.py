"""VOC 2011 with SBD."""

from pathlib import Path

import numpy as np
import pytest
import torch
from miniature_images import dataset_of, write_sbd_map, write_voc2011_sbd, write_voc_map
from PIL import Image

from secateur.data.maps import compose
from secateur.data.voc import voc2011_sbd
from secateur.errors import InvalidSetting

SBD = "benchmark_RELEASE/dataset"


def test_images_as_they_are_with_a_class_for_each_pixel(tmp_path: Path) -> None:
    write_voc2011_sbd(tmp_path)
    train, test = voc2011_sbd(tmp_path)
    assert [Path(path).stem for path in dataset_of(train).paths] == [f"2007_{index:06d}" for index in range(8)]
    assert [Path(path).stem for path in dataset_of(test).paths] == [f"2008_{index:06d}" for index in range(8)]
    sizes = set()
    for index, (images, maps) in enumerate(test):
        with Image.open(dataset_of(test).paths[index]) as image:
            assert torch.equal(images[0], compose()(image))
        assert maps.dtype == torch.long
        assert images.shape[2:] == maps.shape[1:]
        sizes.add(maps.shape[1:])
        assert set(maps.unique().tolist()) <= {0, 1, 2, 3, 4, 5, 255}
        assert (255 in maps) == bool(index % 2)
    assert len(sizes) > 1
    # A class has one colour, and background another.
    shades = {0: [], 1: [], 2: [], 3: [], 4: [], 5: []}
    for images, maps in train:
        for label in set(maps.unique().tolist()) - {255}:
            shades[label].append(images[0][:, maps[0] == label].mean(1))
    assert len(shades[0]) == 8
    assert all(torch.stack(found).std(0).max() < 0.3 for found in shades.values() if len(found) > 1)


@pytest.mark.parametrize("place", [None, "VOCdevkit", "TrainVal/VOCdevkit"])
def test_finer_label_maps_are_preferred(tmp_path: Path, place: str | None) -> None:
    write_voc2011_sbd(tmp_path, finer=place is not None)
    if place == "TrainVal/VOCdevkit":
        (tmp_path / "TrainVal").mkdir()
        (tmp_path / "VOCdevkit").rename(tmp_path / place)
    train, _ = voc2011_sbd(str(tmp_path))
    endings = [Path(path).suffix for path in dataset_of(train).maps]
    assert endings == ([".mat"] * 8 if place is None else [".mat", ".png"] * 4)


def test_both_kinds_of_label_maps_agree_where_both_tell(tmp_path: Path) -> None:
    write_voc2011_sbd(tmp_path / "fine")
    write_voc2011_sbd(tmp_path / "coarse", finer=False)
    pair = [dataset_of(voc2011_sbd(tmp_path / name)[0]) for name in ("fine", "coarse")]
    for index in range(8):
        (_, fine), (_, coarse) = (part[index] for part in pair)
        assert torch.equal(fine[fine != 255], coarse[fine != 255])
        assert bool((fine == 255).any()) == bool(index % 2)


def test_a_label_map_of_sbd_is_not_turned_round(tmp_path: Path) -> None:
    write_voc2011_sbd(tmp_path, num_images=1, finer=False)
    train, _ = voc2011_sbd(tmp_path)
    values = (np.arange(32 * 40) % 21).astype(np.uint8).reshape(32, 40)
    write_sbd_map(Path(dataset_of(train).maps[0]), values)
    assert torch.equal(dataset_of(train)[0][1], torch.from_numpy(values).long())
    values[3, 5] = 255
    write_voc_map(tmp_path / "VOCdevkit/VOC2011/SegmentationClass/2007_000000.png", values)
    train, _ = voc2011_sbd(tmp_path)
    assert torch.equal(dataset_of(train)[0][1], torch.from_numpy(values).long())


GOOD = np.zeros((32, 40), np.uint8)
NO_FIELD = "its variable GTcls has no field Segmentation of bytes"


def test_batches_hold_one_image(tmp_path: Path) -> None:
    write_voc2011_sbd(tmp_path, num_images=1)
    with pytest.raises(InvalidSetting) as caught:
        voc2011_sbd(tmp_path, batch_size=2)
    assert (caught.value.got, caught.value.wanted) == (2, 1)
