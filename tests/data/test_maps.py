"""Label maps: more of them with the datasets that have some."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from pictures import LAYOUT, to_bytes, write
from PIL import Image
from torch import Tensor

from secateur.data.decode import read_map
from secateur.data.maps import Maps, compose, loaders
from secateur.errors import InvalidSetting, MissingExtra


def test_label_maps_are_resized_about_the_middle_of_each_pixel(tmp_path: Path) -> None:
    values = np.random.default_rng(0).choice(np.array([0, 1, 2, 7], np.uint8), (6, 9))
    paths = [write(tmp_path / "image.png", values)], [write(tmp_path / "map.png", values)]
    pixels, labels = Maps(*paths, {0: 0, 1: 1, 2: 2, 7: 255}, compose(), LAYOUT, read_map, size=3)[0]
    assert type(pixels) is type(labels) is Tensor
    assert (pixels.shape, labels.dtype) == ((3, 3, 3), torch.long)
    # Of three pixels the one in the middle, of two the later one.
    wanted = values[1::2, 1::3]
    assert np.array_equal(labels.numpy(), np.where(wanted == 7, 255, wanted))
    image = np.array(Image.fromarray(values).resize((3, 3), Image.Resampling.BILINEAR))
    assert np.array_equal(to_bytes(pixels)[:, :, 0].numpy(), image)


def test_batches_have_an_image_or_more(tmp_path: Path) -> None:
    path = write(tmp_path / "image.png", np.zeros((4, 4), np.uint8))
    data = Maps([path], [path], {0: 0}, compose(), LAYOUT, read_map)
    with pytest.raises(InvalidSetting, match="batch_size"):
        loaders(data, data, 0)


def test_nothing_is_imported_before_it_is_needed() -> None:
    code = """
import sys
import secateur.data.maps, secateur.data.photos, secateur.data.folders, secateur.data.cub, secateur.data.voc
import secateur.data.pets, secateur.data.camvid
print(sorted({"torchvision", "PIL", "scipy"} & set(sys.modules)))
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision.transforms.v2", None)
    with pytest.raises(MissingExtra, match=r'pip install "secateur\[vision\]"'):
        compose()
