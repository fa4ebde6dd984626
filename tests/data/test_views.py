"""Views: which part of an image they show, and that one image and a batch are shown alike."""

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import noise
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import functional as vision

from secateur.data import views
from secateur.data.views import Crops, ResizedCrops, View, pack, render, render_batch, together

PLAIN = Image.fromarray(noise())
WHOLE = (0, 0, 40, 32)


def drawn(crops: Crops | ResizedCrops, count: int, part: tuple[int, int, int, int] = WHOLE) -> list[View]:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.rand(count, crops.numbers, generator=generator, dtype=torch.float64).tolist()
    return [crops.view(part, some) for some in numbers]


def windows(pixels: np.ndarray, size: int) -> dict[bytes, tuple[int, int, bool]]:
    """Every square of that size in an image and in its mirror image, and where it is."""
    found = {}
    steps = range(pixels.shape[0] - size + 1)
    for mirrored in (False, True):
        whole = pixels[:, ::-1] if mirrored else pixels
        for y in steps:
            for x in steps:
                found[whole[y : y + size, x : x + size].tobytes()] = (y, x, mirrored)
    return found


def resized(side: int) -> np.ndarray:
    return np.array(PLAIN.resize((side, side), Image.Resampling.BILINEAR))


def test_padding_moves_the_image_over_black() -> None:
    image = Image.fromarray(resized(32))
    places = windows(np.pad(resized(32), [(2, 2), (2, 2), (0, 0)]), 32)
    shown = (render(image, view, 32) for view in drawn(Crops(32, 32, 2, random=True), 1000, (0, 0, 32, 32)))
    found = Counter(places[pixels.numpy().tobytes()] for pixels in shown)
    assert len(found) == 5 * 5 * 2
    assert min(found.values()) > 3


def test_the_sizes_of_the_paper() -> None:
    middle = render(PLAIN, Crops().view(WHOLE, ()), 224).numpy()
    assert near(middle, resized(256)[16:240, 16:240])
    places = Counter((view.x, view.y) for view in drawn(Crops(random=True), 500))
    assert {x for x, _ in places} | {y for _, y in places} == set(range(33))
    assert Crops(random=True, padding=3).plain() == Crops()


def near(one: np.ndarray, other: np.ndarray) -> bool:
    """The same up to rounding."""
    difference = np.abs(one.astype(int) - other)
    return bool(difference.max() <= 1 and difference.mean() < 0.35)


def by_torchvision(image: Any, view: View, size: int) -> np.ndarray:
    """Crop, resize, pad, crop and mirror, one after another."""
    left, top, width, height = view.part
    whole = vision.resize(vision.crop(image, top, left, height, width), [view.down, view.across])
    padded = np.pad(np.array(whole), [(99, 99), (99, 99), (0, 0)])
    window = padded[view.y + 99 :, view.x + 99 :][:size, :size]
    return window[:, ::-1] if view.mirrored else window


PARTS = [(0, 0, 60, 44), (7, 3, 31, 40), (59, 43, 1, 1)]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    "crops", [Crops(28, 32), Crops(28, 32, 3, random=True), ResizedCrops(28), Crops(90, 99)], ids=str
)
def test_a_view_is_what_torchvision_shows_step_by_step(crops: Crops, part: tuple[int, int, int, int]) -> None:
    image = Image.fromarray(noise(60, 44))
    for view in drawn(crops, 8, part):
        assert near(render(image, view, crops.size).numpy(), by_torchvision(image, view, crops.size))


def tensor(image: np.ndarray) -> Tensor:
    return torch.from_numpy(image).movedim(2, 0)


@pytest.mark.parametrize(
    "crops", [Crops(28, 32), Crops(28, 32, 3, random=True), ResizedCrops(28), Crops(90, 99)], ids=str
)
def test_a_batch_shows_what_single_images_do(crops: Crops) -> None:
    images = [noise(width, height, seed=width) for width, height in ((60, 44), (31, 80), (28, 28), (9, 5), (200, 33))]
    # The parts are within the smallest image.
    chosen = [
        drawn(crops, 1, (2, 1, 7, 4) if place % 2 else (0, 0, *image.shape[1::-1]))[0]
        for place, image in enumerate(images)
    ]
    both = render_batch(pack(list(map(tensor, images))), chosen, crops.size)
    for shown, image, view in zip(both, images, chosen, strict=True):
        one = render(Image.fromarray(image), view, crops.size)
        assert (shown.int() - one.int()).abs().max() <= 1


def test_random_parts_are_within_the_image_and_of_the_shape_that_is_asked_for() -> None:
    crops = ResizedCrops(area=(0.2, 0.5), ratio=(0.5, 2.0))
    part = (10, 20, 300, 200)
    found = [view.part for view in drawn(crops, 300, part)]
    for left, top, width, height in found:
        assert left >= 10
        assert top >= 20
        assert left + width <= 310
        assert top + height <= 220
        assert 0.19 < width * height / 60_000 < 0.51
        assert 0.49 < width / height < 2.05
    shares = [width * height / 60_000 for _, _, width, height in found]
    assert min(shares) < 0.23
    assert max(shares) > 0.47
    assert 0.4 < np.mean([view.mirrored for view in drawn(crops, 300, part)]) < 0.6
    assert {left for left, *_ in found} > {10}
    assert min(found)[0] < 30


@pytest.mark.parametrize("size", [(1000, 3), (3, 1000), (1, 1)])
def test_a_thin_image_is_shown_in_its_middle(size: tuple[int, int]) -> None:
    left, top, width, height = ResizedCrops(area=(1, 1)).view((0, 0, *size), [0.5] * 41).part
    assert (2 * left + width, 2 * top + height) == pytest.approx(size, abs=1)
    assert width >= 1
    assert height >= 1
    assert width <= max(1, round(height * 4 / 3))
    assert height <= max(1, round(width * 4 / 3))


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), max_size=30))
def test_groups_hold_every_image_once_and_little_else(shapes: list[tuple[int, int]]) -> None:
    most, views.MOST_PIXELS = views.MOST_PIXELS, 10_000
    try:
        groups = list(together(shapes))
    finally:
        views.MOST_PIXELS = most
    assert sorted(place for group in groups for place in group) == list(range(len(shapes)))
    for group in groups:
        down, across = (max(shapes[place][axis] for place in group) for axis in (0, 1))
        assert len(group) == 1 or len(group) * down * across <= 10_000
    # Two that follow each other would not fit together.
    for one, other in pairwise(groups):
        both = [shapes[place] for place in [*one, other[0]]]
        assert len(both) * max(height for height, _ in both) * max(width for _, width in both) > 10_000
