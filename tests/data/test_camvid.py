"""CamVid."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from miniature_images import COLOURS, save, write_camvid
from PIL import Image
from torch.utils.data import DataLoader

from secateur.data.camvid import CAMVID, camvid
from secateur.data.images import Maps, compose
from secateur.errors import InvalidData


def data(loader: DataLoader) -> Maps:
    assert isinstance(loader.dataset, Maps)
    return loader.dataset


def test_frames_and_classes(tmp_path: Path) -> None:
    write_camvid(tmp_path)
    train, test = camvid(tmp_path)
    assert (train.batch_size, test.batch_size) == (4, 4)
    assert {Path(path).parent.name for path in data(train).paths + data(train).maps} == {"train", "trainannot"}
    assert {Path(path).parent.name for path in data(test).paths + data(test).maps} == {"test", "testannot"}
    images, maps = (torch.cat(parts) for parts in zip(*test, strict=True))
    assert images.shape == (8, 3, 32, 64)
    assert maps.shape == (8, 32, 64)
    # The line between two classes is void.
    assert (maps[:, 16] == 255).all()
    assert int((maps == 255).sum()) == 8 * 64
    for label in set(maps.unique().tolist()) - {255}:
        colour = compose()(Image.new("RGB", (1, 1), COLOURS[label]))[:, 0, 0]
        assert torch.dist(images.movedim(1, -1)[maps == label].mean(0), colour) < 0.2


def test_frames_are_mirrored_in_training_only(tmp_path: Path) -> None:
    write_camvid(tmp_path, num_images=1)
    values = np.repeat(np.arange(64, dtype=np.uint8)[None] // 6, 32, 0)
    for part in ("train", "test"):
        save(tmp_path / f"{part}annot/0001TP_000000.png", values)
        save(tmp_path / f"{part}/0001TP_000000.png", np.repeat(values[:, :, None] * 20, 3, 2))
    train, test = camvid(str(tmp_path))
    firsts = set()
    for _ in range(20):
        image, labels = data(train)[0]
        shade = ((image[0] * 0.229 + 0.485) * 255 / 20).round().long()
        assert torch.equal(shade, labels)
        firsts.add(int(labels[0, 0]))
        assert np.array_equal(data(test)[0][1].numpy(), values)
    assert firsts == {0, 10}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "train").rename(folder / "other"), "there is no .*/train;"),
        (lambda folder: (folder / "testannot").rename(folder / "other"), "there is no .*/testannot/0001TP_000000.png;"),
        (
            lambda folder: (folder / "trainannot/0001TP_000001.png").unlink(),
            "there is no .*trainannot/0001TP_000001.png;",
        ),
        (
            lambda folder: [path.unlink() for path in (folder / "test").iterdir()],
            r"test is broken: it holds no images \(",
        ),
    ],
)
def test_folders_that_do_not_fit_are_named(tmp_path: Path, change: Any, message: str) -> None:
    write_camvid(tmp_path, num_images=2)
    change(tmp_path)
    with pytest.raises(InvalidData, match=rf"^CamVid: .*{message}.*{re.escape(str(CAMVID))}$"):
        camvid(tmp_path)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (np.full((32, 64), 12, np.uint8), "it holds the value 12, wanted 0 to 11"),
        (np.full((32, 64), 255, np.uint8), "it holds the value 255, wanted 0 to 11"),
        (np.zeros((64, 32), np.uint8), "it has 32x64 pixels and its image 64x32"),
        (
            np.zeros((32, 64, 3), np.uint8),
            "a label map has one value of 8 bits for each pixel, got an image of mode RGB",
        ),
    ],
)
def test_label_maps_that_do_not_fit_are_named(tmp_path: Path, values: np.ndarray, reason: str) -> None:
    write_camvid(tmp_path, num_images=1)
    save(tmp_path / "testannot/0001TP_000000.png", values)
    _, test = camvid(tmp_path)
    with pytest.raises(InvalidData, match=rf"testannot/0001TP_000000.png is broken: {reason}; unpack it again"):
        data(test)[0]
