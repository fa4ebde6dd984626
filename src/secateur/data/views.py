"""What a network sees of an image: a part of it, resized, perhaps mirrored; for one image, or for many at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import exp, log, prod, sqrt
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._utils import _flatten_dense_tensors

Part = tuple[int, int, int, int]
"""Left, top, width and height of a part of an image, in pixels."""
TRIES = 10
"""To find a random part of a shape that fits into the image."""
MOST_PIXELS = 24_000_000
"""Of the images that are resized together, with what fills them up to one size."""


class View(NamedTuple):
    """A window onto a part of an image, which is resized to `across` x `down` pixels first.

    The window begins at column x and row y of that; what is outside is black.
    """

    part: Part
    across: int
    down: int
    x: int = 0
    y: int = 0
    mirrored: bool = False


@dataclass(frozen=True)
class Crops:
    """Both sides are resized to `resized` pixels; the network sees `size` x `size` in the middle of it.

    random: anywhere in it, with this padding of black around it, and mirrored half of the time.
    """

    size: int = 224
    resized: int = 256
    padding: int = 0
    random: bool = False

    @property
    def numbers(self) -> int:
        """How many random numbers a view takes."""
        return 3 if self.random else 0

    def plain(self) -> Crops:
        """The same without chance."""
        return replace(self, padding=0, random=False)

    def view(self, part: Part, numbers: Sequence[float]) -> View:
        """The view of a part of an image that these numbers, from 0 to below 1, choose."""
        if not self.random:
            middle = round((self.resized - self.size) / 2)
            return View(part, self.resized, self.resized, middle, middle)
        places = self.resized + 2 * self.padding - self.size + 1
        x, y = (int(number * places) - self.padding for number in numbers[:2])
        return View(part, self.resized, self.resized, x, y, numbers[2] < 0.5)


@dataclass(frozen=True)
class ResizedCrops:
    """A random part of the image is resized to `size` x `size` pixels, and mirrored half of the time.

    area: from and to which share of the image.
    ratio: from and to which ratio of its width to its height.
    """

    size: int = 224
    area: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)

    @property
    def numbers(self) -> int:
        """How many random numbers a view takes."""
        return 4 * TRIES + 1

    def plain(self) -> Crops:
        """The middle of the image, as it is tested."""
        return Crops(self.size, round(self.size * 256 / 224))

    def view(self, part: Part, numbers: Sequence[float]) -> View:
        """The view of a part of an image that these numbers, from 0 to below 1, choose."""
        *tries, mirror = numbers
        return View(self._within(part, tries), self.size, self.size, mirrored=mirror < 0.5)

    def _within(self, part: Part, numbers: Sequence[float]) -> Part:
        left, top, width, height = part
        low, high = map(log, self.ratio)
        for by_area, by_ratio, x, y in zip(*(numbers[i::4] for i in range(4)), strict=True):
            pixels = width * height * (self.area[0] + by_area * (self.area[1] - self.area[0]))
            ratio = exp(low + by_ratio * (high - low))
            across, down = round(sqrt(pixels * ratio)), round(sqrt(pixels / ratio))
            if 0 < across <= width and 0 < down <= height:
                return left + int(x * (width - across + 1)), top + int(y * (height - down + 1)), across, down
        # The largest part in the middle whose ratio is allowed.
        across = min(width, max(1, round(height * self.ratio[1])))
        down = min(height, max(1, round(width / self.ratio[0])))
        return left + (width - across) // 2, top + (height - down) // 2, across, down


def render(image: Any, view: View, size: int) -> Tensor:
    """The view of an image, of Pillow's or of bytes (height x width x colour), as bytes: size x size x colour."""
    pixels = pixels_of(image, view.part)
    # Torch does what Pillow does, up to rounding, in half the time.
    shape = (view.down, view.across)
    grid = F.interpolate(pixels.permute(2, 0, 1)[None], shape, mode="bilinear", antialias=True)[0].permute(1, 2, 0)
    before = max(0, -view.x), max(0, -view.y)
    after = max(0, view.x + size - view.across), max(0, view.y + size - view.down)
    if any((*before, *after)):
        grid = F.pad(grid, (0, 0, before[0], after[0], before[1], after[1]))
    x, y = view.x + before[0], view.y + before[1]
    shown = grid[y : y + size, x : x + size]
    return shown.flip(1) if view.mirrored else shown.contiguous()


def pixels_of(image: Any, part: Part) -> Tensor:
    """A part of an image, of Pillow's or of bytes, as bytes: height x width x colour."""
    left, top, width, height = part
    if isinstance(image, Tensor):
        return image[top : top + height, left : left + width]
    if (left, top, width, height) != (0, 0, *image.size):
        image = image.crop((left, top, left + width, top + height))
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(height, width, 3)


def together(shapes: Sequence[tuple[int, int]]) -> Iterator[list[int]]:
    """Groups of images, by their places in the list, that can be resized together; those of a group are alike."""
    group: list[int] = []
    down = across = 0
    for place in sorted(range(len(shapes)), key=lambda place: (shapes[place], place)):
        height, width = shapes[place]
        if group and (len(group) + 1) * max(down, height) * max(across, width) > MOST_PIXELS:
            yield group
            group, down, across = [], 0, 0
        group.append(place)
        down, across = max(down, height), max(across, width)
    if group:
        yield group


class Packed(NamedTuple):
    """Images of several sizes, one after another in memory."""

    pixels: Tensor
    shapes: list[tuple[int, ...]]
    """Colour x height x width of each."""


def pack(images: Sequence[Tensor]) -> Packed:
    """Images on one device, each colour x height x width, in one piece of memory."""
    longest = max(image.shape[2] for image in images)
    end = torch.zeros(longest, dtype=torch.uint8, device=images[0].device)
    return Packed(_flatten_dense_tensors([*images, end]), [tuple(image.shape) for image in images])


def render_batch(images: Packed, views: Sequence[View], size: int) -> Tensor:
    """The views of images, as bytes: image x size x size x colour.

    Resizing with the same filter, the window and the mirror are two matrix products for all images at once. `render`
    rounds in between, so that a pixel may differ by 1.
    """
    device = images.pixels.device
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    down, across = (max(shape[axis] for shape in images.shapes) for axis in (1, 2))
    numbers = [(*view.part, view.across, view.down, view.x, view.y, view.mirrored) for view in views]
    table = to_device(torch.tensor(numbers, dtype=torch.float32), device)
    left, top, width, height, grid_across, grid_down, x, y, mirrored = table[:, :, None, None].unbind(1)
    by_column = _weights(left, width, grid_across, x, mirrored, size, across).to(dtype)
    by_row = _weights(top, height, grid_down, y, torch.zeros_like(y), size, down).to(dtype)
    # Batches for evaluation are made where the network's precision is set, which would be too low.
    with torch.autocast(device.type, enabled=False):
        narrow = _rows(images, down, across).to(dtype) @ by_column.transpose(1, 2)
        rows = narrow.view(-1, 3, down, size).transpose(1, 2).reshape(-1, down, 3 * size)
        pixels = (by_row @ rows).view(-1, size, 3, size).transpose(2, 3)
    return pixels.round_().clamp_(0, 255).to(torch.uint8)


def _rows(images: Packed, down: int, across: int) -> Tensor:
    """All images as large as the largest: image x (colour and row) x column; what was not there has no meaning.

    A row begins where it does in memory, and goes on into the next ones as far as needed: a few operations for all
    images, where a copy for each would take the time of Python and of hundreds of kernels.
    """
    pixels, device = images.pixels, images.pixels.device
    begins = accumulate((prod(shape) for shape in images.shapes[:-1]), initial=0)
    table = [(begin, *shape[1:]) for begin, shape in zip(begins, images.shapes, strict=True)]
    begin, height, width = to_device(torch.tensor(table), device)[:, :, None, None].unbind(1)
    row = torch.minimum(torch.arange(down, device=device), height - 1)
    starts = begin + (torch.arange(3, device=device)[:, None] * height + row) * width
    return pixels.unfold(0, across, 1).index_select(0, starts.flatten()).view(-1, 3 * down, across)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A small tensor on the device, without waiting for it."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def _weights(
    start: Tensor, length: Tensor, grid: Tensor, offset: Tensor, mirrored: Tensor, size: int, longest: int
) -> Tensor:
    """How much each of `longest` pixels along an axis counts for each of `size`: a triangle around the same place."""
    place = torch.arange(size, device=start.device)[:, None]
    place = torch.where(mirrored > 0, size - 1 - place, place) + offset
    step = length / grid
    centre = start + (place + 0.5) * step
    pixel = torch.arange(longest, device=start.device)
    weights = (1 - (pixel + 0.5 - centre).abs() / step.clamp_min(1)).clamp_min_(0)
    weights *= (pixel >= start) & (pixel < start + length) & (place >= 0) & (place < grid)
    return weights / weights.sum(2, keepdim=True).clamp_min(1e-6)
