"""VOC 2011 with SBD."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from miniature_images import save, write_sbd_map, write_voc2011_sbd, write_voc_map
from PIL import Image
from scipy.io import savemat
from torch.utils.data import DataLoader

from secateur.data.images import Maps, compose
from secateur.data.voc import VOC2011_SBD, voc2011_sbd
from secateur.errors import InvalidData, InvalidSetting

SBD = "benchmark_RELEASE/dataset"


def data(loader: DataLoader) -> Maps:
    assert isinstance(loader.dataset, Maps)
    return loader.dataset


def test_images_as_they_are_with_a_class_for_each_pixel(tmp_path: Path) -> None:
    write_voc2011_sbd(tmp_path)
    train, test = voc2011_sbd(tmp_path)
    assert [Path(path).stem for path in data(train).paths] == [f"2007_{index:06d}" for index in range(8)]
    assert [Path(path).stem for path in data(test).paths] == [f"2008_{index:06d}" for index in range(8)]
    sizes = set()
    for index, (images, maps) in enumerate(test):
        with Image.open(data(test).paths[index]) as image:
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
    endings = [Path(path).suffix for path in data(train).maps]
    assert endings == ([".mat"] * 8 if place is None else [".mat", ".png"] * 4)


def test_both_kinds_of_label_maps_agree_where_both_tell(tmp_path: Path) -> None:
    write_voc2011_sbd(tmp_path / "fine")
    write_voc2011_sbd(tmp_path / "coarse", finer=False)
    pair = [data(voc2011_sbd(tmp_path / name)[0]) for name in ("fine", "coarse")]
    for index in range(8):
        (_, fine), (_, coarse) = (part[index] for part in pair)
        assert torch.equal(fine[fine != 255], coarse[fine != 255])
        assert bool((fine == 255).any()) == bool(index % 2)


def test_a_label_map_of_sbd_is_not_turned_round(tmp_path: Path) -> None:
    write_voc2011_sbd(tmp_path, num_images=1, finer=False)
    train, _ = voc2011_sbd(tmp_path)
    values = (np.arange(32 * 40) % 21).astype(np.uint8).reshape(32, 40)
    write_sbd_map(Path(data(train).maps[0]), values)
    assert torch.equal(data(train)[0][1], torch.from_numpy(values).long())
    values[3, 5] = 255
    write_voc_map(tmp_path / "VOCdevkit/VOC2011/SegmentationClass/2007_000000.png", values)
    train, _ = voc2011_sbd(tmp_path)
    assert torch.equal(data(train)[0][1], torch.from_numpy(values).long())


def struct(segmentation: Any) -> dict[str, Any]:
    return {"GTcls": {"Segmentation": segmentation}}


GOOD = np.zeros((32, 40), np.uint8)
NO_FIELD = "its variable GTcls has no field Segmentation of bytes"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (struct(np.full((32, 40), 21, np.uint8)), "it holds the value 21, wanted 0 to 20, 255"),
        (struct(np.full((32, 40), 254, np.uint8)), "it holds the value 254, wanted 0 to 20, 255"),
        (struct(GOOD.T), "it has 32x40 pixels and its image 40x32"),
        (struct(np.zeros((32, 40, 3), np.uint8)), "it has 3x40x32 pixels and its image 40x32"),
        (struct(GOOD.astype(float)), NO_FIELD),
        (struct(np.full((32, 40), "x", object)), NO_FIELD),
        (struct("text"), NO_FIELD),
        ({"GTcls": {"Boundaries": GOOD}}, NO_FIELD),
        ({"GTcls": GOOD}, NO_FIELD),
        ({"GTcls": "text"}, NO_FIELD),
        ({"GTinst": GOOD}, "it has no variable GTcls"),
        (b"", "it is not a file of MATLAB 5 to 7, with low bytes first"),
        (bytes(400), "it is not a file of MATLAB 5 to 7, with low bytes first"),
        (b"MATLAB 5.0 MAT-file".ljust(124) + b"\0\1IM" + bytes(2**24), "it has 16,777,344 bytes, more than 16,777,216"),
    ],
)
def test_a_hostile_label_map_is_named(tmp_path: Path, content: dict[str, Any] | bytes, reason: str) -> None:
    write_voc2011_sbd(tmp_path, num_images=1, finer=False)
    train, _ = voc2011_sbd(tmp_path)
    path = Path(data(train).maps[0])
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        savemat(path, content)
    broken, tree = rf"2007_000000.mat is broken: .*{reason}", re.escape(str(VOC2011_SBD))
    with pytest.raises(InvalidData, match=rf"^VOC 2011 with SBD: .*{broken}.*; unpack it again; {tree}$"):
        data(train)[0]


@pytest.mark.parametrize("kept", [0, 100, 128, 200, 300, 400])
def test_half_a_label_map_is_named(tmp_path: Path, kept: int) -> None:
    write_voc2011_sbd(tmp_path, num_images=1, finer=False)
    train, _ = voc2011_sbd(tmp_path)
    path = Path(data(train).maps[0])
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(InvalidData, match=r"2007_000000.mat is broken: .+; unpack it again"):
        data(train)[0]


def test_a_broken_finer_label_map_is_named(tmp_path: Path) -> None:
    write_voc2011_sbd(tmp_path, num_images=2)
    train, _ = voc2011_sbd(tmp_path)
    path = Path(data(train).maps[1])
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(InvalidData, match=r"SegmentationClass/2007_000001.png is broken: Truncated File Read;"):
        data(train)[1]
    save(path, np.zeros((33, 41, 3), np.uint8))
    with pytest.raises(InvalidData, match=r"2007_000001.png is broken: a label map has one value .* of mode RGB"):
        data(train)[1]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("2007_000000\n2009_000001\n", f"there is no .*{SBD}/img/2009_000001.jpg;"),
        ("../../../secret\n", "train.txt is broken: '../../../secret.jpg' leads out of the folder;"),
        ("/etc/passwd\n", "train.txt is broken: '/etc/passwd.jpg' leads out of the folder;"),
        ("2007_000000 1\n", "train.txt is broken: line 1 is '2007_000000 1', wanted: name;"),
        ("", "train.txt is broken: it is empty;"),
        (None, f"there is no .*{SBD}/train.txt;"),
    ],
)
def test_a_list_that_does_not_fit_is_named(tmp_path: Path, names: str | None, message: str) -> None:
    write_voc2011_sbd(tmp_path, num_images=1)
    path = tmp_path / SBD / "train.txt"
    path.unlink()
    if names is not None:
        path.write_text(names)
    with pytest.raises(InvalidData, match=rf"^VOC 2011 with SBD: .*{message}.*{re.escape(str(VOC2011_SBD))}$"):
        voc2011_sbd(tmp_path)


def test_a_missing_label_map_is_named(tmp_path: Path) -> None:
    write_voc2011_sbd(tmp_path, num_images=2)
    (tmp_path / SBD / "cls/2007_000001.mat").unlink()
    voc2011_sbd(tmp_path)  # there is a finer one
    (tmp_path / SBD / "cls/2007_000000.mat").unlink()
    with pytest.raises(InvalidData, match=rf"there is no .*{SBD}/cls/2007_000000.mat;"):
        voc2011_sbd(tmp_path)


def test_batches_hold_one_image(tmp_path: Path) -> None:
    write_voc2011_sbd(tmp_path, num_images=1)
    with pytest.raises(
        InvalidSetting, match="images of VOC differ in size, so that a batch holds 1 of them, got batch_s"
    ):
        voc2011_sbd(tmp_path, batch_size=2)
