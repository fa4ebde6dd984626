"""Images with a class for every pixel."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pictures import LAYOUT, to_bytes, write
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from secateur.data.images import Maps, compose, read_map
from secateur.errors import InvalidData


def maps(folder: Path, values: np.ndarray, *steps: Any, size: int | None = None) -> Maps:
    """Grey images that show their own label maps."""
    shown = np.repeat(values[:, :, None], 3, axis=2)
    paths = [write(folder / "image.png", shown)], [write(folder / "map.png", values)]
    return Maps(*paths, {0: 0, 1: 1, 2: 2, 7: 255}, compose(*steps), LAYOUT, read_map, size)


def some_values(width: int = 9, height: int = 6) -> np.ndarray:
    return np.random.default_rng(0).choice(np.array([0, 1, 2, 7], np.uint8), (height, width))


def test_values_become_classes(tmp_path: Path) -> None:
    pixels, labels = maps(tmp_path, some_values())[0]
    assert labels.dtype == torch.long
    assert type(pixels) is type(labels) is Tensor
    assert np.array_equal(to_bytes(pixels)[:, :, 0].numpy(), some_values())
    assert np.array_equal(labels.numpy(), np.where(some_values() == 7, 255, some_values()))


def test_label_maps_are_mirrored_with_their_images(tmp_path: Path) -> None:
    data = maps(tmp_path, some_values(), v2.RandomHorizontalFlip())
    mirrored = []
    for _ in range(20):
        pixels, labels = data[0]
        shown = to_bytes(pixels)[:, :, 0].long()
        assert torch.equal(torch.where(shown == 7, 255, shown), labels)
        mirrored.append(np.array_equal(shown.numpy(), some_values()[:, ::-1]))
    assert set(mirrored) == {False, True}


def test_label_maps_are_resized_about_the_middle_of_each_pixel(tmp_path: Path) -> None:
    pixels, labels = maps(tmp_path, some_values(9, 6), size=3)[0]
    assert pixels.shape == (3, 3, 3)
    # Of three pixels the one in the middle, of two the later one.
    wanted = some_values(9, 6)[1::2, 1::3]
    assert np.array_equal(labels.numpy(), np.where(wanted == 7, 255, wanted))
    image = np.array(Image.fromarray(some_values(9, 6)).resize((3, 3), Image.Resampling.BILINEAR))
    assert np.array_equal(to_bytes(pixels)[:, :, 0].numpy(), image)


def test_palettes_are_places_of_colours(tmp_path: Path) -> None:
    values = torch.arange(40 * 32).view(32, 40) % 256
    image = Image.frombytes("P", (40, 32), bytes(values.flatten().tolist()))
    image.putpalette([255 - shade for shade in range(256) for _ in range(3)])
    assert torch.equal(read_map(write(tmp_path / "map.png", image)).long(), values)


def test_label_maps_that_do_not_fit_are_named(tmp_path: Path) -> None:
    """More of them in test_damaged.py."""
    with pytest.raises(InvalidData) as caught:
        maps(tmp_path, np.full((6, 9), 5, np.uint8))[0]
    assert (caught.value.got, caught.value.wanted) == ("the value 5", "0 to 2, 7")
    data = maps(tmp_path, some_values())
    (tmp_path / "map.png").write_bytes(b"")
    with pytest.raises(InvalidData) as caught:
        data[0]
    assert "cannot identify image file" in str(caught.value.got)
