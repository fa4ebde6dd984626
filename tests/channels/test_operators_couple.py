"""Which slices each structure couples, and that cutting them is exact."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sandwich import IMAGE, Sandwich, examine, members, parameter, rows
from torch import Tensor, nn

import secateur
from secateur import Plan
from secateur.channels.reasons import Kind, Reason

EIGHT = rows(range(8))

NORM = ["norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"]


def first(indices: list[list[int]]) -> dict[tuple[str, int, str], list[list[int]]]:
    """What belongs to the first convolution of a sandwich, and its norm, if these of its filters go together."""
    made = {("first.weight", 0, "produces"): indices, ("first.bias", 0, "produces"): indices}
    return made | {(name, 0, "passes"): indices for name in NORM}


def last(indices: list[list[int]]) -> dict[tuple[str, int, str], list[list[int]]]:
    return {("last.weight", 1, "consumes"): indices}


def made_by(name: str, indices: list[list[int]], axis: int = 0) -> dict[tuple[str, int, str], list[list[int]]]:
    return {(f"{name}.weight", axis, "produces"): indices, (f"{name}.bias", 0, "produces"): indices}


def read_by(name: str, indices: list[list[int]], axis: int = 1) -> dict[tuple[str, int, str], list[list[int]]]:
    return {(f"{name}.weight", axis, "consumes"): indices}


def test_chain() -> None:
    graph = examine(Sandwich(lambda m, x: x), expected={"first": 8})
    assert members(graph, "first") == first(EIGHT) | last(EIGHT)
    assert graph.group("first").filters_per_channel == 1
    assert [(f.name, f.size, f.reason) for f in graph.frozen] == [("last", 5, Reason(Kind.OUTPUT))]


def test_convolution_without_norm_or_bias() -> None:
    graph = examine(nn.Sequential(nn.Conv2d(3, 6, 3, bias=False), nn.Tanh(), nn.Conv2d(6, 2, 1)), expected={"0": 6})
    six = rows(range(6))
    assert members(graph, "0") == {("0.weight", 0, "produces"): six, ("2.weight", 1, "consumes"): six}


def test_norm_without_affine() -> None:
    layers = [nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, affine=False), nn.ReLU(), nn.Conv2d(6, 2, 1)]
    graph = examine(nn.Sequential(*layers), expected={"0": 6})
    assert members(graph, "0")["1.running_mean", 0, "passes"] == rows(range(6))


def test_residual() -> None:
    graph = examine(Sandwich(lambda m, x: x + m.conv(x), conv=nn.Conv2d(8, 8, 1)), expected={"first": 8})
    assert members(graph, "first") == first(EIGHT) | made_by("conv", EIGHT) | read_by("conv", EIGHT) | last(EIGHT)
    assert graph.group("first").filters_per_channel == 2
    assert graph.group("first").layers == ["first", "conv"]


def test_preactivation() -> None:
    parts = {"before": nn.BatchNorm2d(8), "one": nn.Conv2d(8, 6, 1), "two": nn.Conv2d(6, 8, 1)}
    body = Sandwich(lambda m, x: x + m.two(F.relu(m.one(F.relu(m.before(x))))), **parts)
    graph = examine(body, expected={"first": 8, "one": 6})
    assert members(graph, "first")["before.weight", 0, "passes"] == EIGHT


def test_concat_with_offsets() -> None:
    body = Sandwich(lambda m, x: torch.cat([m.side(x), x, m.side(x)], 1), inner=16, side=nn.Conv2d(8, 4, 1))
    graph = examine(body, expected={"first": 8, "side": 4})
    assert members(graph, "first") == first(EIGHT) | read_by("side", EIGHT) | last(rows(range(4, 12)))
    assert members(graph, "side") == made_by("side", rows(range(4))) | last(rows(range(4), range(12, 16)))


def test_concat_with_the_input() -> None:
    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Conv2d(3, 4, 1), nn.Conv2d(7, 2, 1)

        def forward(self, image: Tensor) -> Tensor:
            return self.two(torch.cat([image, self.one(image)], 1))

    graph = examine(Dense(), expected={"one": 4})
    assert members(graph, "one") == made_by("one", rows(range(4))) | read_by("two", rows(range(3, 7)))


HALVES = rows(range(4), range(4, 8))

SPLITS: dict[str, tuple[Callable[..., Tensor], list[list[int]]]] = {
    "chunk": (lambda m, x: x.chunk(2, 1)[0], rows(range(4))),
    "split": (lambda m, x: x.split(x.shape[1] // 2, 1)[1], rows(range(4))),
    "slice": (lambda m, x: x[:, x.shape[1] // 2 :], rows(range(4))),
    "tensor_split": (lambda m, x: x.tensor_split(2, 1)[0], rows(range(4))),
    "glu": (lambda m, x: F.glu(x, 1), rows(range(4))),
    "both halves": (lambda m, x: torch.cat(x.chunk(2, 1)[::-1], 1), rows(range(4), range(4, 8))),
    "in turn": (lambda m, x: x.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2), rows([0, 2, 4, 6], [1, 3, 5, 7])),
    "channel shuffle": (lambda m, x: m.shuffle(x), rows([0, 2, 4, 6], [1, 3, 5, 7])),
    "maximum of two": (lambda m, x: x.unflatten(1, (2, -1)).amax(1), rows(range(4))),
    "half added": (lambda m, x: _added_in_place(x), rows(range(4), range(4, 8))),
}


def _added_in_place(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, : x.shape[1] // 2] += x[:, x.shape[1] // 2 :]
    return x


@pytest.mark.parametrize("name", SPLITS)
def test_split(name: str) -> None:
    """Both halves lose the same places, whether both are used or not."""
    body, read = SPLITS[name]
    inner = len(read) * len(read[0])
    graph = examine(Sandwich(body, inner, shuffle=nn.ChannelShuffle(2)), expected={"first": 4})
    assert members(graph, "first") == first(HALVES) | last(read)


def test_strided_slice() -> None:
    graph = examine(Sandwich(lambda m, x: x[:, ::2] * x[:, 1::2], 4), expected={"first": 4})
    assert members(graph, "first") == first(rows([0, 2, 4, 6], [1, 3, 5, 7])) | last(rows(range(4)))


def test_nested_chunks() -> None:
    def body(module: nn.Module, x: Tensor) -> Tensor:
        left, right = x.chunk(2, 1)
        one, two = left.chunk(2, 1)
        return torch.cat([two * one, right], 1)

    graph = examine(Sandwich(body, 6), expected={"first": 2})
    assert members(graph, "first")["first.weight", 0, "produces"] == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_flatten_to_linear() -> None:
    model = Sandwich(lambda m, x: m.linear(x.flatten(1)), 0, linear=nn.Linear(8 * 36, 3))
    graph = examine(model, expected={"first": 8})
    columns = [list(range(36 * c, 36 * c + 36)) for c in range(8)]
    assert members(graph, "first") == first(EIGHT) | read_by("linear", columns)


def test_pixel_shuffle() -> None:
    graph = examine(Sandwich(lambda m, x: F.pixel_shuffle(x, 2), 2), expected={"first": 2})
    assert members(graph, "first") == first([[0, 1, 2, 3], [4, 5, 6, 7]]) | last([[0], [1]])


def test_pixel_unshuffle() -> None:
    graph = examine(Sandwich(lambda m, x: F.pixel_unshuffle(x, 2), 32), expected={"first": 8})
    assert members(graph, "first") == first(EIGHT) | last([list(range(4 * c, 4 * c + 4)) for c in range(8)])


def test_depthwise() -> None:
    graph = examine(Sandwich(lambda m, x: m.depth(x), depth=nn.Conv2d(8, 8, 3, groups=8)), expected={"first": 8})
    assert members(graph, "first") == first(EIGHT) | made_by("depth", EIGHT) | last(EIGHT)


def test_depthwise_with_multiplier() -> None:
    model = Sandwich(lambda m, x: m.depth(x), 16, depth=nn.Conv2d(8, 16, 3, groups=8))
    graph = examine(model, expected={"first": 8})
    pairs = rows(range(0, 16, 2), range(1, 16, 2))
    assert members(graph, "first") == first(EIGHT) | made_by("depth", pairs) | last(pairs)
    assert graph.group("first").filters_per_channel == 3
    small = secateur.shrink(model, Plan.keep(graph, {"first": [1, 5, 6]}))
    assert repr(small.depth) == repr(nn.Conv2d(3, 6, 3, groups=3))


PAIRS, EVERY = rows(range(0, 8, 2), range(1, 8, 2)), rows(range(4), range(4, 8))


def test_grouped_by_whole_groups() -> None:
    model = Sandwich(lambda m, x: m.some(x), some=nn.Conv2d(8, 8, 3, groups=4))
    graph = examine(model, expected={"first": 4})
    assert members(graph, "first") == first(PAIRS) | made_by("some", PAIRS) | last(PAIRS)
    assert secateur.shrink(model, Plan.keep(graph, {"first": [0, 3]})).some.groups == 2


def test_grouped_by_position() -> None:
    model = Sandwich(lambda m, x: m.some(x), some=nn.Conv2d(8, 8, 3, groups=2))
    graph = examine(model, expected={"first": 4, "some": 4})
    assert members(graph, "first") == first(EVERY) | read_by("some", rows(range(4)))
    assert members(graph, "some") == made_by("some", EVERY) | last(EVERY)
    small = secateur.shrink(model, Plan.keep(graph, {"first": [0, 3], "some": [1]})).some
    assert (small.groups, small.in_channels, small.out_channels) == (2, 4, 2)


def test_grouped_by_whole_groups_on_a_tie() -> None:
    model = Sandwich(lambda m, x: m.some(x), 16, 16, some=nn.Conv2d(16, 16, 1, groups=4))
    graph = examine(model, expected={"first": 4})
    assert members(graph, "first")["first.weight", 0, "produces"][1] == [4, 5, 6, 7]


def test_transposed() -> None:
    model = Sandwich(lambda m, x: m.up(x), 6, up=nn.ConvTranspose2d(8, 6, 2, stride=2, output_padding=1))
    graph = examine(model, expected={"first": 8, "up": 6})
    assert members(graph, "first") == first(EIGHT) | read_by("up", EIGHT, axis=0)
    assert members(graph, "up") == made_by("up", rows(range(6)), axis=1) | last(rows(range(6)))


def test_transposed_by_whole_groups() -> None:
    model = Sandwich(lambda m, x: m.up(x), 16, up=nn.ConvTranspose2d(8, 16, 2, groups=4))
    graph = examine(model, expected={"first": 4})
    outer = [list(range(4 * g, 4 * g + 4)) for g in range(4)]
    bias = {("up.bias", 0, "produces"): outer}
    assert members(graph, "first") == first(PAIRS) | {("up.weight", 0, "produces"): PAIRS} | bias | last(outer)


def test_transposed_by_position() -> None:
    model = Sandwich(lambda m, x: m.up(x), up=nn.ConvTranspose2d(8, 8, 2, groups=2))
    graph = examine(model, expected={"first": 4, "up": 4})
    assert members(graph, "first") == first(EVERY) | read_by("up", EVERY, axis=0)
    bias = {("up.bias", 0, "produces"): EVERY}
    assert members(graph, "up") == {("up.weight", 1, "produces"): rows(range(4))} | bias | last(EVERY)


@pytest.mark.parametrize("dimensions", [1, 3])
def test_other_dimensions(dimensions: int) -> None:
    convolution = getattr(nn, f"Conv{dimensions}d")
    norm = getattr(nn, f"BatchNorm{dimensions}d")
    layers = [convolution(3, 8, 2), norm(8), nn.ReLU(), convolution(8, 8, 1, groups=8), convolution(8, 2, 1)]
    image = torch.randn(2, 3, *[4] * dimensions, dtype=torch.float64)
    graph = examine(nn.Sequential(*layers), image, expected={"0": 8})
    assert members(graph, "0")["4.weight", 1, "consumes"] == EIGHT


@pytest.mark.parametrize("kind", ["conv", "linear"])
def test_squeeze_excite(kind: str) -> None:
    if kind == "conv":
        parts: dict[str, Any] = {"down": nn.Conv2d(8, 4, 1), "up": nn.Conv2d(4, 8, 1)}
        model = Sandwich(lambda m, x: x * m.up(F.relu(m.down(F.adaptive_avg_pool2d(x, 1)))).sigmoid(), **parts)
    else:
        parts = {"down": nn.Linear(8, 4), "up": nn.Linear(4, 8)}
        model = Sandwich(
            lambda m, x: x * m.up(F.relu(m.down(x.mean((2, 3))))).sigmoid().view(*x.shape[:2], 1, 1), **parts
        )
    graph = examine(model, expected={"first": 8, "down": 4})
    assert members(graph, "first") == first(EIGHT) | read_by("down", EIGHT) | made_by("up", EIGHT) | last(EIGHT)


def test_shared_module() -> None:
    """Used twice in a row, its inputs and outputs are the same channels."""
    model = Sandwich(lambda m, x: m.conv(F.relu(m.conv(x))), conv=nn.Conv2d(8, 8, 3, padding=1))
    graph = examine(model, expected={"first": 8})
    assert members(graph, "first") == first(EIGHT) | made_by("conv", EIGHT) | read_by("conv", EIGHT) | last(EIGHT)


def test_shared_module_side_by_side() -> None:
    model = Sandwich(lambda m, x: torch.cat([m.conv(x), m.conv(x.flip(1))], 1), 12, conv=nn.Conv2d(8, 6, 1))
    graph = examine(model, expected={"first": 4, "conv": 6})
    mirrored = rows(range(4), range(7, 3, -1))
    assert members(graph, "first") == first(mirrored) | read_by("conv", mirrored)
    assert members(graph, "conv") == made_by("conv", rows(range(6))) | last(rows(range(6), range(6, 12)))


def test_tied_parameters() -> None:
    one, two = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
    two.weight = one.weight
    graph = examine(Sandwich(lambda m, x: m.two(m.one(x)), one=one, two=two), expected={"first": 8})
    small = secateur.shrink(Sandwich(lambda m, x: m.two(m.one(x)), one=one, two=two), Plan.random(graph, 0.5))
    assert small.one.weight is small.two.weight


OWN: dict[str, tuple[Callable[..., Tensor], list[int]]] = {
    "convolution": (lambda m, x: F.conv2d(x, m.kernel), [8, 8]),
    "matmul": (lambda m, x: (x.movedim(1, -1) @ m.matrix).movedim(-1, 1), [8, 8]),
    "linear": (lambda m, x: F.linear(x.movedim(1, -1), m.matrix, m.shift).movedim(-1, 1), [8, 8]),
    "einsum": (lambda m, x: torch.einsum("nchw,kc->nkhw", x, m.matrix), [8, 8]),
    "einsum of three": (lambda m, x: torch.einsum("nchw,nchw,ck->nkhw", x, x, m.matrix), [8, 8]),
    "tensordot": (lambda m, x: torch.tensordot(m.matrix, x, ([1], [1])).transpose(0, 1), [8, 8]),
    "product of weights": (lambda m, x: F.conv2d(x, m.kernel * m.matrix[:, :, None, None]), [8, 8]),
    "low rank": (lambda m, x: F.conv2d(x, (m.matrix @ m.other)[:, :, None, None]), [8, 8, 8]),
    "transposed too": (lambda m, x: F.conv_transpose2d(F.conv2d(x, m.kernel).relu(), m.kernel), [8, 8]),
    "symmetric": (lambda m, x: F.conv2d(x, (m.matrix + m.matrix.T)[:, :, None, None]), [8]),
    "reparametrised": (lambda m, x: F.conv2d(x, F.pad(m.kernel, (1, 1, 1, 1)) + m.wide), [8, 8]),
    "scale and shift": (lambda m, x: x * m.shift[:, None, None] + m.shift.view(1, -1, 1, 1), [8]),
}


@pytest.mark.parametrize("name", OWN)
def test_functional_calls_on_own_parameters(name: str) -> None:
    body, expected = OWN[name]
    parts = {"kernel": parameter(8, 8, 1, 1), "matrix": parameter(8, 8), "other": parameter(8, 8)}
    # Torch does without a matrix product, and so counts none, where einsum finds an axis of size 1.
    cost = name not in ("einsum", "einsum of three", "tensordot")
    graph = examine(Sandwich(body, **parts, wide=parameter(8, 8, 3, 3), shift=parameter(8)), cost=cost)
    assert [group.size for group in graph.groups] == expected


def test_embedding() -> None:
    class Labelled(nn.Module):
        """An embedded class shifts the features."""

        def __init__(self) -> None:
            super().__init__()
            self.conv, self.embed, self.last = nn.Conv2d(3, 8, 1), nn.Embedding(10, 8), nn.Conv2d(8, 2, 1)

        def forward(self, image: Tensor, label: Tensor) -> Tensor:
            return self.last(self.conv(image) + self.embed(label)[:, :, None, None])

    graph = examine(Labelled(), IMAGE, torch.tensor([3, 7]), expected={"conv": 8})
    assert members(graph, "conv")["embed.weight", 1, "produces"] == EIGHT
