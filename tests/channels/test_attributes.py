"""Numbers that modules keep: those that count channels follow a cut, those that equal a width by chance do not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import randomize_
from sandwich import IMAGE, Sandwich, examine, kinds, members, parameter, rows, sizes
from torch import Tensor, nn

import secateur
from secateur import Plan
from secateur.channels.reasons import Kind

Body = Callable[..., Any]

SIZES: dict[str, tuple[Body, dict[str, Any], dict[str, Any]]] = {
    "two numbers": (
        lambda m, x: torch.cat(torch.split(x, [m.narrow, m.broad], 1)[::-1], 1),
        {"narrow": 3, "broad": 5},
        {"narrow": 1, "broad": 3},
    ),
    "a list": (lambda m, x: torch.cat(torch.split(x, m.parts, 1)[::-1], 1), {"parts": [3, 5]}, {"parts": [1, 3]}),
    "a tuple": (lambda m, x: torch.cat(torch.split(x, m.parts, 1)[::-1], 1), {"parts": (5, 3)}, {"parts": (2, 2)}),
    "a slice": (lambda m, x: torch.cat([x[:, m.start :], x[:, : m.start]], 1), {"start": 3}, {"start": 1}),
    "a view": (lambda m, x: x.view(-1, m.width, 36).view(-1, m.width, 6, 6), {"width": 8}, {"width": 4}),
}


@pytest.mark.parametrize("name", SIZES)
def test_size_attributes_follow(name: str) -> None:
    """Numbers that a module keeps and cuts by are changed with the channels."""
    body, before, after = SIZES[name]
    model = Sandwich(body, **{key: value for key, value in before.items() if key != "width"})
    vars(model).update(before)
    graph = examine(model, expected={"first": 8}, probe=True)
    small = secateur.shrink(model, Plan.keep(graph, {"first": [1, 4, 5, 6]}))
    assert {key: getattr(small, key) for key in after} == after
    assert {key: getattr(model, key) for key in before} == before


def test_numbers_and_a_list_of_the_same_sizes() -> None:
    body = Sandwich(lambda m, x: torch.cat(x.split([m.narrow, m.broad], 1)[::-1], 1), narrow=3, broad=5, parts=[3, 5])
    examine(body, expected={"first": 8}, probe=True)


def test_norms_follow_where_they_are_admitted() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.normalized_shape = (8,)
            self.weight, self.bias = parameter(8), parameter(8)

        def forward(self, x: Tensor) -> Tensor:
            return F.layer_norm(x, self.normalized_shape, self.weight, self.bias)

    for norm in (nn.RMSNorm(8), nn.LayerNorm(8), Own()):
        model = nn.Sequential(nn.Linear(3, 8), norm, nn.Linear(8, 2))
        graph = secateur.analyze(model, torch.randn(2, 3), inexact=True)
        assert sizes(graph) == {"0": 8}
        small = secateur.shrink(model, Plan.random(graph, 0.4))
        assert small[1].normalized_shape == (5,)  # pyright: ignore
        assert small(torch.randn(2, 3)).shape == (2, 2)


class Counting(nn.Module):
    """Attributes that equal a width by chance; a view makes the analysis look at all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_classes = self.steps = self.channels = 8
        self.features, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 8)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        x = F.adaptive_avg_pool2d(self.features(x), 1).view(-1, self.channels)
        for _ in range(self.steps):
            x = x * 1.1
        x = self.head(x)
        return x * F.one_hot(labels, self.num_classes) if self.training and labels is not None else x


def test_only_attributes_that_count_channels_follow_the_cut() -> None:
    model = randomize_(Counting())
    labels = torch.tensor([7, 1])
    for example in (IMAGE, (IMAGE, labels)):
        graph = secateur.analyze(model, example)
        assert sizes(graph) == {"features": 8}
        small: Any = secateur.shrink(model, Plan.random(graph, 0.4))
        assert (small.num_classes, small.steps, small.channels) == (8, 8, 5)
        assert small.train()(IMAGE, labels).shape == (2, 8)


def swapped(m: Any, x: Tensor) -> Tensor:
    """The attributes are as large as the parts, but nobody asks them."""
    half = x.shape[1] // 2
    low, high = x.split([half, x.shape[1] - half], 1)
    return torch.cat([high, low], 1)


def swapped_before(m: Any, x: Tensor) -> Tensor:
    """One of the attributes is as large as something else, too."""
    x = m.other(swapped(m, x))
    return x.flatten(2).view(x.shape)


@pytest.mark.parametrize("width", [7, 9, 11])
def test_border_that_is_half_of_a_width(width: int) -> None:
    low, high = width // 2, width - width // 2
    examine(Sandwich(swapped, inner=width, width=width, low=low, high=high), expected={}, probe=True)
    model = Sandwich(swapped_before, inner=low, width=width, low=low, high=high, other=nn.Conv2d(width, low, 1))
    graph = examine(model, expected={"other": low}, probe=True)
    assert kinds(graph)["first"] is Kind.FIXED_PARTS


class Head(nn.Module):
    """Two numbers of channels, and a third number that equals them by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = self.hidden = self.num_classes = 8
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.mean((2, 3)).view(-1, self.inner)).relu()
        return self.last(x.view(-1, self.hidden))


def test_two_attributes_that_count_follow_and_the_third_does_not() -> None:
    model = randomize_(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), Head()))
    small: Any = secateur.shrink(model, Plan.random(secateur.analyze(model, IMAGE), 0.4))
    assert (small[2].inner, small[2].hidden, small[2].num_classes) == (5, 5, 8)


VIDEO = torch.randn(2, 3, 3, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Lstm(nn.Module):
    """A convolutional LSTM cell as people write it."""

    def __init__(self, inner: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.gates = nn.Conv2d(inner + hidden, 4 * hidden, 3, padding=1)

    def start(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shape = x.shape[0], self.hidden, *x.shape[2:]
        return torch.zeros(shape, dtype=x.dtype), torch.zeros(shape, dtype=x.dtype)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        short, long = state
        i, f, o, g = torch.split(self.gates(torch.cat([x, short], 1)), self.hidden, 1)
        long = f.sigmoid() * long + i.sigmoid() * g.tanh()
        return o.sigmoid() * long.tanh(), long


class Unnamed(Lstm):
    """Nothing but the weight says how wide the state is."""

    def __init__(self, inner: int, hidden: int) -> None:
        super().__init__(inner, hidden)
        del self.hidden

    def start(self, x: Tensor) -> tuple[Tensor, Tensor]:
        both = x.new_zeros(2, x.shape[0], self.gates.out_channels // 4, *x.shape[2:])
        return both[0], both[1]

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        short, long = state
        i, f, o, g = self.gates(torch.cat([x, short], 1)).chunk(4, 1)
        long = f.sigmoid() * long + i.sigmoid() * g.tanh()
        return o.sigmoid() * long.tanh(), long


class Video(nn.Module):
    """Layers of cells, the first of which sees the images themselves."""

    def __init__(self, cell: Callable[[int, int], Any]) -> None:
        super().__init__()
        self.cells = nn.ModuleList([cell(3, 6), cell(6, 6)])
        self.last = nn.Conv2d(6, 2, 1)

    def forward(self, video: Tensor) -> Tensor:
        for cell in self.cells:
            state = cell.start(video[:, 0])  # pyright: ignore
            states = []
            for frame in video.unbind(1):
                state = cell(frame, state)
                states.append(state[0])
            video = torch.stack(states, 1)
        return self.last(video[:, -1])


@pytest.mark.parametrize("cell", [Lstm, Unnamed])
def test_convolutional_lstm(cell: Callable[[int, int], Any]) -> None:
    model = Video(cell)
    if cell is Lstm:
        model.hidden = 6  # pyright: ignore # by chance the same number, which nothing uses
    expected = {"cells.0.gates": 6, "cells.1.gates": 6}
    graph = examine(model, VIDEO, expected=expected, probe=True, singly=True)
    attributes = [(a.module, a.attribute) for a in graph.attributes]
    assert attributes == ([("cells.0", "hidden"), ("cells.1", "hidden")] if cell is Lstm else [])
    gates = members(graph, "cells.0.gates")
    assert gates["cells.0.gates.weight", 0, "produces"] == rows(range(6), range(6, 12), range(12, 18), range(18, 24))
    assert gates["cells.0.gates.weight", 1, "consumes"] == rows(range(3, 9))


def plus_zeros(x: Tensor) -> Tensor:
    return x + torch.zeros(x.shape, dtype=x.dtype)


class Beside(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return plus_zeros(x)


@pytest.mark.parametrize("number", [5, 8])
def test_attribute_that_equals_several_widths_by_chance(number: int) -> None:
    """Neither are the channels tied that it equals, nor do they stay where the output has as many."""
    model = Sandwich(lambda m, x: plus_zeros(m.middle(plus_zeros(x)).relu()), number=number)
    model.middle, model.last = nn.Conv2d(8, 8, 1), nn.Sequential(model.last, Beside())  # pyright: ignore
    examine(model, expected={"first": 8, "middle": 8}, probe=True)
    model = Video(Lstm)
    model.last, model.number = nn.Sequential(nn.Conv2d(6, 6, 1), Beside()), 6  # pyright: ignore
    graph = examine(model, VIDEO, expected={"cells.0.gates": 6, "cells.1.gates": 6}, probe=True)
    assert {(a.module, a.attribute) for a in graph.attributes} == {("cells.0", "hidden"), ("cells.1", "hidden")}


class Several(nn.Module):
    """Three states, each with its own attribute, and one that only equals the last of them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three, self.most = 5, 6, 7, 7
        self.read = nn.ModuleList([nn.Conv2d(3, 5, 1), nn.Conv2d(5, 6, 1), nn.Conv2d(6, 7, 1)])
        self.again = nn.ModuleList([nn.Conv2d(n, n, 1, bias=False) for n in (5, 6, 7)])
        self.last = nn.Conv2d(7, 2, 1)

    def forward(self, video: Tensor) -> Tensor:
        states = [video.new_zeros(len(video), n, *video.shape[3:]) for n in (self.one, self.two, self.three)]
        for x in video.unbind(1)[: self.most]:
            for i, (read, again) in enumerate(zip(self.read, self.again, strict=True)):
                x = states[i] = (read(x) + again(states[i])).tanh()
        return self.last(states[-1])


def test_one_attribute_too_many() -> None:
    graph = examine(Several(), VIDEO, expected={"read.0": 5, "read.1": 6, "read.2": 7}, probe=True)
    assert [a.attribute for a in graph.attributes] == ["one", "two", "three"]
