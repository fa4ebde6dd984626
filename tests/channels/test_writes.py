"""Tensors that are written into, part by part."""

from collections.abc import Callable

import pytest
import torch
from sandwich import Sandwich, examine, reasons
from torch import Tensor, nn

import secateur


def where_small(x: Tensor) -> Tensor:
    x[x < 0.1] = 0
    return x


def a_row(x: Tensor) -> Tensor:
    x[:, :, 0] = 0
    return x


def a_corner(x: Tensor) -> Tensor:
    x[:, :, :2, :2] = 0
    return x


def row_by_row(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for row in range(x.shape[2]):
        out[:, :, row] = 0.5 * x[:, :, row]
    return out


def image_by_image(x: Tensor) -> Tensor:
    out = torch.zeros(x.shape, dtype=x.dtype)
    for number, image in enumerate(x):
        out[number] = image * image
    return out


def cost_volume(x: Tensor) -> Tensor:
    """As for stereo, where every image is shifted by every disparity."""
    volume = x.new_zeros(*x.shape[:2], 3, *x.shape[2:])
    volume[:, :, 0] = x
    for shift in (1, 2):
        volume[:, :, shift, :, shift:] = x[..., shift:] - x[..., :-shift]
    return volume.sum(2)


def holes_in_ones(x: Tensor) -> Tensor:
    """As where flow leads out of the image."""
    mask = torch.ones(x.shape, dtype=x.dtype)
    mask[mask < 0.9] = 0
    mask[mask > 0] = 2
    return x * mask


@pytest.mark.parametrize("body", [where_small, a_row, a_corner, row_by_row, image_by_image, cost_volume, holes_in_ones])
def test_written_with_all_its_channels(body: Callable[[Tensor], Tensor]) -> None:
    examine(Sandwich(lambda m, x: body(x)), expected={"first": 8})


def ones_where_small(x: Tensor) -> Tensor:
    x[x < 0.1] = 1
    return x


def a_row_of_ones(x: Tensor) -> Tensor:
    x[:, :, 0] = 1
    return x


def a_channel(x: Tensor) -> Tensor:
    x[:, 0] = 0
    return x


def half_of_the_channels(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:, :4] = x[:, 4:]
    return out


@pytest.mark.parametrize("body", [ones_where_small, a_row_of_ones, a_channel, half_of_the_channels])
def test_written_so_that_channels_stay(body: Callable[[Tensor], Tensor]) -> None:
    graph = examine(Sandwich(lambda m, x: body(x)), expected={})
    assert "first" in reasons(graph)


def test_pairs_that_are_written_as_complex_numbers() -> None:
    """There are as many channels as parts of a number, and a mean over channels."""

    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 2), nn.Linear(2, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            pairs = torch.zeros(*x.shape, 2)
            torch.view_as_complex(pairs).copy_(torch.complex(x, x))
            return self.last(torch.ones(1, 2)) * pairs.mean(1).sum()

    assert not secateur.analyze(Written(), torch.randn(2, 3), probe=False).groups
