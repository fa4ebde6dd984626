"""Zeros that the forward pass makes: where a recurrent network starts, and what pads a shortcut to more channels."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sandwich import Sandwich, examine, kinds, members, rows, sizes
from torch import Tensor, nn

from secateur.channels.reasons import Kind

Body = Callable[..., Tensor]

VIDEO = torch.randn(2, 3, 3, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Recurrent(nn.Module):
    """New state = tanh(one layer of the input + another of the state)."""

    def __init__(self, width: int | None) -> None:
        super().__init__()
        self.width = width
        self.read, self.again = nn.Conv2d(3, 7, 3, padding=1), nn.Conv2d(7, 7, 3, padding=1, bias=False)
        self.last = nn.Conv2d(7, 2, 1)

    def forward(self, video: Tensor) -> Tensor:
        state = video.new_zeros(video.shape[0], self.width or 7, *video.shape[3:])
        for frame in video.unbind(1):
            state = (self.read(frame) + self.again(state)).tanh()
        return self.last(state)


def test_state_that_a_layer_reads() -> None:
    examine(Recurrent(7), VIDEO, expected={"read": 7}, probe=True)


def test_state_of_a_width_that_the_code_states() -> None:
    graph = examine(Recurrent(None), VIDEO, expected={}, probe=True)
    assert kinds(graph)["read"] is Kind.FIXED_SIZE


def beside(x: Tensor, number: int) -> Tensor:
    return torch.cat([x, torch.zeros(x.shape[0], number, *x.shape[2:], dtype=x.dtype)], 1)


def behind(x: Tensor, number: int) -> Tensor:
    return F.pad(x, (0, 0, 0, 0, number, 0))


def missing(x: Tensor, y: Tensor) -> int:
    return y.shape[1] - x.shape[1]


ONE_SIDE: dict[str, Body] = {
    "zeros as many as are missing": lambda m, x, y: y + beside(x, missing(x, y)),
    "zeros by attribute": lambda m, x, y: y + beside(x, m.extra),
    "padding as much as is missing": lambda m, x, y: y + behind(x, missing(x, y)),
    "padding by attribute": lambda m, x, y: behind(x, m.extra) + y,
}


def shortcut(body: Body, extra: int) -> Sandwich:
    """`wide` has more channels than the shortcut around it."""
    wide = nn.Conv2d(8, 8 + extra, 3, padding=1)
    return Sandwich(lambda m, x: body(m, x, m.wide(x)), inner=8 + extra, extra=extra, wide=wide)


@pytest.mark.parametrize("name", ONE_SIDE)
def test_shortcut_that_is_padded(name: str) -> None:
    examine(shortcut(ONE_SIDE[name], 5), expected={"first": 8, "wide": 5}, probe=True, singly=True)


def both_sides(x: Tensor, y: Tensor) -> Tensor:
    before = missing(x, y) // 2
    return y + F.pad(x, (0, 0, 0, 0, before, missing(x, y) - before))


def test_padding_on_both_sides_goes_in_pairs() -> None:
    graph = examine(
        shortcut(lambda m, x, y: both_sides(x, y), 6), expected={"first": 8, "wide": 3}, probe=True, singly=True
    )
    assert members(graph, "wide")["wide.weight", 0, "produces"] == rows(range(3), range(11, 14))


@pytest.mark.parametrize("probe", [False, True])
def test_padding_of_unequal_sides_stays(probe: bool) -> None:
    """Which side has lost how many does not show in the shapes from which the code takes the numbers."""
    graph = examine(shortcut(lambda m, x, y: both_sides(x, y), 5), expected={"first": 8}, probe=probe)
    assert kinds(graph)["wide"] is Kind.UNSUPPORTED


def one_side_after_the_other(x: Tensor, y: Tensor) -> Tensor:
    before = missing(x, y) // 2
    padded = behind(x, before).relu()
    return y + beside(padded, missing(padded, y))


def sides_that_are_joined(x: Tensor, y: Tensor) -> Tensor:
    left, right = x.chunk(2, 1)
    before = missing(x, y) // 2
    return y + torch.cat([behind(left, before), beside(right, missing(x, y) - before)], 1)


@pytest.mark.parametrize("padded", [one_side_after_the_other, sides_that_are_joined])
@pytest.mark.parametrize("extra", [5, 6])
def test_padding_that_is_put_together_stays(padded: Callable[[Tensor, Tensor], Tensor], extra: int) -> None:
    graph = examine(shortcut(lambda m, x, y: padded(x, y), extra), probe=True)
    assert "wide" not in sizes(graph)
    assert kinds(graph)["wide"] is Kind.UNSUPPORTED


def along_rows(m: Any, x: Tensor, y: Tensor) -> Tensor:
    padded = m.mix(behind(x, missing(x, y) // 2))
    return y + beside(padded, missing(padded, y))


def in_the_weight(m: Any, x: Tensor, y: Tensor) -> Tensor:
    weight = F.pad(m.narrow.weight, (0, 0, 0, 0, 0, 0, missing(m.narrow.weight[None], y) // 2, 0))
    padded = F.conv2d(x, weight)
    return y + beside(padded, missing(padded, y))


@pytest.mark.parametrize(("body", "part"), [(along_rows, "mix"), (in_the_weight, "narrow")])
def test_product_that_does_not_tell_how_many_zeros_there_are(body: Body, part: str) -> None:
    """It sums over another axis than that of the zeros."""
    layers = {"mix": nn.Linear(6, 6, bias=False), "narrow": nn.Conv2d(8, 8, 1, bias=False)}
    model = shortcut(body, 6)
    setattr(model, part, layers[part])
    graph = examine(model, probe=True)
    assert Kind.UNSUPPORTED in {frozen.reason.kind for frozen in graph.frozen}
    assert all(group.size == 8 for group in graph.groups)


def around_a_slope(m: Any, x: Tensor, y: Tensor) -> Tensor:
    padded = m.slope(behind(x, missing(x, y) // 2))
    return y + beside(padded, missing(padded, y))


@pytest.mark.parametrize("extra", [4, 5, 6])
def test_number_of_zeros_that_is_half_of_a_sum(extra: int) -> None:
    """The slope tells how many zeros there are, but the code asks the shortcut, which has lost others too."""
    model = shortcut(around_a_slope, extra)
    model.slope = nn.PReLU(8 + extra // 2)
    graph = examine(model, probe=True, singly=True)
    assert kinds(graph)["wide"] is Kind.FIXED_SIZE


def test_no_zeros_beside_channels() -> None:
    body = ONE_SIDE["zeros as many as are missing"]
    examine(shortcut(body, 0), expected={"first": 8}, probe=True)


def twice(m: Any, x: Tensor, y: Tensor) -> Tensor:
    first, second = y + behind(x, missing(x, y)), m.wider(x)
    return beside(first, missing(first, second)) + second


def test_padding_again_after_a_sum() -> None:
    """The sum has told how many zeros there were."""
    model = shortcut(twice, 4)
    model.wider, model.last = nn.Conv2d(8, 15, 3, padding=1), nn.Conv2d(15, 5, 1)
    examine(model, expected={"first": 8, "wide": 4, "wider": 3}, probe=True)


def test_padding_that_the_code_states_stays() -> None:
    graph = examine(shortcut(lambda m, x, y: y + beside(x, 5), 5), expected={"first": 8}, probe=True)
    assert kinds(graph)["wide"] is Kind.FIXED_SIZE


def test_padding_with_ones_stays() -> None:
    body = ONE_SIDE["padding as much as is missing"]
    graph = examine(shortcut(lambda m, x, y: body(m, x, y) * F.pad(x, (0, 0, 0, 0, 5, 0), value=1.0), 5), probe=True)
    assert sizes(graph) == {"first": 8}
    assert kinds(graph)["wide"] is Kind.FIXED_TENSOR


def summed(m: Sandwich, x: Tensor) -> Tensor:
    total = torch.zeros(x.shape[0], m.number, *x.shape[2:], dtype=x.dtype)  # pyright: ignore
    for power in (1, 2):
        total += x**power
    return total


def test_sum_that_starts_with_zeros() -> None:
    examine(Sandwich(summed, number=8), probe=True, expected={"first": 8})


class Frames(nn.Module):
    """Frames that are late by two, with zeros in front: of features or of the images themselves."""

    def __init__(self, late: str) -> None:
        super().__init__()
        self.late = late
        self.first, self.second, self.last = nn.Conv2d(3, 4, 3), nn.Linear(5 * 4, 6), nn.Linear(6, 2)

    def forward(self, video: Tensor) -> Tensor:
        if self.late == "images":
            video = torch.cat([torch.zeros_like(video[:, :1]), video.new_zeros(*video[:, :1].shape), video], 1)
        x = self.first(video.flatten(0, 1)).relu().mean((2, 3)).view(*video.shape[:2], -1)
        if self.late == "features":
            x = torch.cat([x.new_zeros(x.shape[0], 2, x.shape[2]), x], 1)
        return self.last(self.second(x.flatten(1)).relu())


@pytest.mark.parametrize("late", ["features", "images"])
def test_frames_of_zeros_are_no_channels(late: str) -> None:
    examine(Frames(late), VIDEO, expected={"first": 4, "second": 6}, probe=True)


def after_a_first(first: Callable[..., Tensor]) -> Sandwich:
    return Sandwich(lambda m, x: torch.stack([first(x.shape, dtype=x.dtype), x], 2).amax(2) - x)


def test_zeros_laid_beside_channels() -> None:
    examine(after_a_first(torch.zeros), expected={"first": 8}, probe=True)
    graph = examine(after_a_first(torch.ones), expected={}, probe=True)
    assert kinds(graph)["first"] is Kind.NOT_ZERO
