"""Operators that carry channels along one by one: any of the eight can go, whatever happens in space."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sandwich import IMAGE, Buffers, Sandwich, examine, members, parameter, reasons, rows, sizes
from torch import Tensor, nn

import secateur
from secateur import Plan

Body = Callable[..., Any]

SEVERAL: dict[str, Body] = {
    "power pooling": lambda m, x: F.lp_pool2d(x, 2, 2),
    "rotated": lambda m, x: x.rot90(1, (-2, -1)) + x.rot90(2, (2, 3)),
    "cumulative in space": lambda m, x: x.cumsum(2).cumsum_(3),
    "tokens": lambda m, x: x.flatten(2).transpose(1, 2).transpose(1, 2).unflatten(2, x.shape[2:]),
    "channels last": lambda m, x: x.to(memory_format=torch.channels_last),
    "folded into the batch": lambda m, x: F.conv2d(x.flatten(0, 1).unsqueeze(1), m.blur).view(*x.shape[:2], 4, 4),
    "places of one's own": lambda m, x: x.gather(3, x.argsort(3)),
    "frequencies": lambda m, x: torch.fft.irfft2(torch.fft.rfft2(x) * 2j, s=x.shape[2:]).square(),
    "a patch for every place": lambda m, x: F.unfold(x, 3).view(x.shape[0], x.shape[1], 9, 4, 4).mean(2),
    "own gate": lambda m, x: x * x.sigmoid(),
    "sine, square, root": lambda m, x: x.sin() + x**2 + x.abs().sqrt(),
    "in place": lambda m, x: x.mul_(2).relu_().tanh_(),
    "added in place": lambda m, x: x.clone().add_(x, alpha=0.3),
    "where": lambda m, x: torch.where(x > 0.3, x, torch.zeros_like(x)),
    "one slope": lambda m, x: m.slope(x * -1),
    "slope per channel": lambda m, x: m.slopes(x * -1),
    "dropout": lambda m, x: m.drop(x),
    "drawn": lambda m, x: torch.bernoulli((x > 0.2).to(x.dtype)) + x * torch.bernoulli(torch.ones_like(x)),
    "half precision and back": lambda m, x: x.float().double(),
    "sum of neighbours": lambda m, x: F.normalize(x, dim=1) + x / x.square().sum(1, keepdim=True).add(1),
}
"""Combinations; for every operator by itself see the table of rules."""

BROADCASTS: dict[str, Body] = {
    "one map for all channels": lambda m, x: x * m.map(x).sigmoid(),
    "one number per channel": lambda m, x: x * x.amax((2, 3), keepdim=True).sigmoid(),
    "a second bias": lambda m, x: x + m.bias[:, None, None],
    "a scale": lambda m, x: x * m.bias.view(1, -1, 1, 1),
    "a scale that is never zero": lambda m, x: x * m.bias.exp()[:, None, None],
    "one value per place": lambda m, x: x * m.place,
    "a value for each": lambda m, x: x + m.each,
    "buffers": lambda m, x: (x - m.buffers_of.mean[:, None, None]) * m.buffers_of.scale[:, None, None],
    "a later norm": lambda m, x: m.later(F.softplus(x)),
    "a norm per image": lambda m, x: m.image_norm(x),
    "as many groups as channels": lambda m, x: m.group_norm(x),
    "a blur from a buffer": lambda m, x: F.conv2d(x, m.buffers_of.blur, groups=x.shape[1]),
    "stacked": lambda m, x: torch.stack([x, x * 2, x.flip(2)]).mean(0),
    "attention over branches": lambda m, x: (
        torch.stack([x, x.flip(2)], 1) * m.branches(x).softmax(1)[..., None, None, None]
    ).sum(1),
}


def _model(body: Body) -> Sandwich:
    grid = torch.rand(1, 4, 4, 2, dtype=torch.float64)
    buffers = Buffers(mean=torch.rand(8), scale=torch.rand(8), blur=torch.rand(8, 1, 3, 3))
    model = Sandwich(
        body, slope=nn.PReLU(), slopes=nn.PReLU(8), drop=nn.Dropout2d(), map=nn.Conv2d(8, 1, 1), bias=parameter(8),
        place=parameter(6, 6), each=parameter(8, 6, 6), buffers_of=buffers, later=nn.BatchNorm2d(8),
        image_norm=nn.InstanceNorm2d(8, affine=True, track_running_stats=True), group_norm=nn.GroupNorm(8, 8),
        branches=nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)), blur=parameter(1, 1, 3, 3),
    )  # fmt: skip
    model.grid = grid
    return model


@pytest.mark.parametrize("name", SEVERAL | BROADCASTS)
def test_each_channel_alone(name: str) -> None:
    graph = examine(_model((SEVERAL | BROADCASTS)[name]))
    group = next(g for g in graph.groups if "first.weight" in {m.tensor for m in g.members})
    assert (group.size, group.filters_per_channel) == (8, 2 if name == "a blur from a buffer" else 1)
    assert members(graph, group.name)["last.weight", 1, "consumes"] == rows(range(8))


DOUBLED: dict[str, tuple[Body, list[list[int]]]] = {
    "the same twice": (lambda m, x: torch.cat([x, x], 1), rows(range(8), range(8, 16))),
    "repeat": (lambda m, x: x.repeat(1, 2, 1, 1), rows(range(8), range(8, 16))),
    "repeat_interleave": (lambda m, x: x.repeat_interleave(2, 1), rows(range(0, 16, 2), range(1, 16, 2))),
    "expand": (lambda m, x: x.unsqueeze(1).expand(-1, 2, -1, -1, -1).flatten(1, 2), rows(range(8), range(8, 16))),
    "complex numbers as pairs": (
        lambda m, x: torch.view_as_real(torch.complex(x, x.tanh())).movedim(4, 2).flatten(1, 2),
        rows(range(0, 16, 2), range(1, 16, 2)),
    ),
    "and copied": (
        lambda m, x: torch.view_as_real_copy(torch.complex(x, x.tanh())).movedim(4, 1).flatten(1, 2),
        rows(range(8), range(8, 16)),
    ),
    "and back": (
        lambda m, x: torch.cat([torch.view_as_complex(torch.stack([x, x.sin()], -1)).abs(), x], 1),
        rows(range(8), range(8, 16)),
    ),
    "both signs": (lambda m, x: torch.cat([x, -x.flip(1)], 1).relu(), rows(range(8), range(15, 7, -1))),
}


@pytest.mark.parametrize("name", DOUBLED)
def test_doubled(name: str) -> None:
    body, read = DOUBLED[name]
    graph = examine(Sandwich(body, 16), expected={"first": 8})
    assert members(graph, "first")["last.weight", 1, "consumes"] == read


@pytest.mark.parametrize("woken", [False, True])
@pytest.mark.parametrize("affine", [True, False])
def test_groups_of_a_norm_go_whole(affine: bool, woken: bool) -> None:
    body = lambda m, x: m.groups(x.sigmoid() if woken else x)  # noqa: E731
    model = Sandwich(body, groups=nn.GroupNorm(4, 8, affine=affine))
    if woken and not affine:
        assert "first" not in sizes(examine(model))
        return
    graph = examine(model, expected={"first": 4})
    assert members(graph, "first")["last.weight", 1, "consumes"] == rows([0, 2, 4, 6], [1, 3, 5, 7])
    assert secateur.shrink(model, Plan.random(graph, 0.5)).groups.num_groups == 2


def test_groups_of_a_norm_in_which_one_is_woken() -> None:
    body = lambda m, x: m.groups(torch.cat([x[:, ::2], x[:, 1::2].sigmoid()], 1))  # noqa: E731
    examine(Sandwich(body, groups=nn.GroupNorm(2, 8, affine=False)))


def test_fine_groups_of_a_norm_go_whole_even_if_less_would_do() -> None:
    model = Sandwich(lambda m, x: m.fine(x), 16, 16, fine=nn.GroupNorm(8, 16))
    graph = secateur.analyze(model.double(), IMAGE, inexact=True)
    assert [(group.size, group.exact) for group in graph.groups] == [(8, True)]


def test_padding_on_channels() -> None:
    graph = examine(Sandwich(lambda m, x: F.pad(x, (0, 0, 0, 0, 2, 3)), 13), expected={"first": 8})
    assert members(graph, "first")["last.weight", 1, "consumes"] == rows(range(2, 10))


def test_zero_padded_shortcut() -> None:
    """Where zeros meet channels, those stay."""
    model = Sandwich(lambda m, x: m.wide(x) + F.pad(x, (0, 0, 0, 0, 1, 3)), 12, wide=nn.Conv2d(8, 12, 1))
    graph = examine(model, expected={"first": 8})
    assert members(graph, "first")["wide.weight", 0, "produces"] == rows(range(1, 9))
    assert [f.indices.tolist() for f in graph.frozen if f.name == "wide"] == [[0], [9, 10, 11]]


class Heads(nn.Module):
    """Two inputs, nested outputs, and a head that only training sees."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 6, 1), nn.Conv2d(2, 6, 1)
        self.middle = nn.Conv2d(6, 4, 1)
        self.helper = nn.Sequential(nn.Conv2d(4, 5, 1), nn.ReLU(), nn.Conv2d(5, 2, 1))
        self.box, self.score = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 1, 1)

    def forward(self, image: Tensor, *, depth: list[Tensor]) -> dict[str, Any]:
        x = F.relu(self.middle(F.relu(self.left(image) + self.right(depth[0]))))
        result: dict[str, Any] = {"boxes": [self.box(x)], "scores": (self.score(x), {"shown": 1})}
        if self.training:
            result["helper"] = self.helper(x)
        return result


def test_several_inputs_nested_outputs_and_a_head_for_training() -> None:
    example = {"image": IMAGE, "depth": [IMAGE[:, :2]]}
    model = Heads().double()
    for probe in (False, True):
        graph = secateur.analyze(model, example, probe=probe)
        assert {g.name: g.size for g in graph.groups} == {"left": 6, "middle": 4, "helper.0": 5}
        assert members(graph, "middle")["helper.0.weight", 1, "consumes"] == rows(range(4))
        small = secateur.shrink(model, Plan.random(graph, 0.5))
        assert small.train()(**example)["helper"].shape == (2, 2, 6, 6)
        report = secateur.verify(model, Plan.random(graph, 0.5), example)
        assert report.modes == ("eval", "train")


@pytest.mark.parametrize("kind", [nn.RNN, pytest.param(nn.GRU, marks=pytest.mark.slow), nn.LSTM])
@pytest.mark.parametrize("size", [6, 8])  # 8 is how many features there are
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}], ids=["one", "four"])
# oneDNN has an LSTM for single precision alone.
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)])
def test_recurrent_modules_read_the_features(kind: Any, size: int, options: dict[str, Any], dtype: torch.dtype) -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.last = nn.Conv1d(3, 8, 3), nn.Linear(size * (2 if options else 1), 2)
            self.memory = kind(8, size, batch_first=True, **options)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.memory(F.relu(self.conv(x)).transpose(1, 2))[0][:, -1])

    model, example = Reader(), torch.randn(2, 3, 9)
    graph = secateur.analyze(model.to(dtype), example.to(dtype), probe=False)
    assert sizes(graph) == {"conv": 8, "memory": size}
    assert torch.backends.mkldnn.enabled  # pyright: ignore
    examine(model.double(), example.double(), probe=True)
    small = secateur.shrink(model, Plan.keep(graph, {"conv": [0, 3], "memory": [1, 2, 5]}))
    assert (small.memory.input_size, small.memory.hidden_size) == (2, 3)


def gates(m: Any, x: Tensor) -> Tensor:
    """As those of an LSTM, which are parts of one product."""
    one, other = m.wide(x).chunk(2, 1)
    return one.sigmoid_() * other.tanh_()


def the_other_part(m: Any, x: Tensor) -> Tensor:
    wide = m.wide(x)
    wide.chunk(2, 1)[0].sigmoid_()
    return wide.chunk(2, 1)[1]


def the_same_part(m: Any, x: Tensor) -> Tensor:
    wide = m.wide(x)
    wide.chunk(2, 1)[0].sigmoid_()
    return wide.chunk(2, 1)[0]


def the_whole(m: Any, x: Tensor) -> Tensor:
    wide = m.wide(x)
    wide.chunk(2, 1)[1].exp_()
    return sum(wide.chunk(2, 1))


def some_images(m: Any, x: Tensor) -> Tensor:
    wide = m.wide(x)
    wide[1:].sigmoid_()
    return wide.chunk(2, 1)[0]


def through_another_shape(m: Any, x: Tensor) -> Tensor:
    wide = m.wide(x)
    wide.flatten(2).chunk(2, 1)[0].sigmoid_()
    return wide.chunk(2, 1)[0]


@pytest.mark.parametrize("body", [gates, the_other_part, the_same_part, the_whole, some_images, through_another_shape])
def test_parts_that_are_changed_in_place(body: Any) -> None:
    """What became non-zero is known of the others that share the memory, and of those alone."""
    free = {"wide": 8} if body in (gates, the_other_part) else {}
    graph = examine(Sandwich(body, wide=nn.Conv2d(8, 16, 1)), expected={"first": 8, **free})
    assert free or "wide" in reasons(graph)


def test_rows_gathered_by_index() -> None:
    """As detectors do with the regions of several levels."""

    def body(module: nn.Module, x: Tensor) -> Tensor:
        out = torch.zeros(x.shape[0], x.shape[1], 3, 3, dtype=x.dtype)
        for level in range(2):
            rows = torch.where(torch.tensor([True, False]) == bool(level))[0]
            out[rows] = x[rows][:, :, level : level + 3, :3]
        return out

    graph = examine(Sandwich(body), expected={"first": 8})
    assert members(graph, "first")["last.weight", 1, "consumes"] == rows(range(8))


@pytest.mark.parametrize("kernel", ["expand", "repeat"])
def test_one_kernel_for_every_channel(kernel: str) -> None:
    def body(module: nn.Module, x: Tensor) -> Tensor:
        one = module.kernel.view(1, 1, 3, 3)
        many = one.expand(x.shape[1], 1, 3, 3) if kernel == "expand" else one.repeat(x.shape[1], 1, 1, 1)
        return F.conv2d(x, many, groups=x.shape[1])

    examine(Sandwich(body, kernel=parameter(3, 3)), expected={"first": 8})


@pytest.mark.parametrize("name", ["where", "masked_fill", "leaky_relu_", "full"])
def test_constants_that_keep_zero(name: str) -> None:
    bodies: dict[str, Body] = {
        "where": lambda m, x: torch.where(x > 0.3, x, 0.0),
        "masked_fill": lambda m, x: x.masked_fill(x > 0.3, 0.0),
        "leaky_relu_": lambda m, x: F.leaky_relu(x.clone(), 0.2, inplace=True),
        "full": lambda m, x: torch.maximum(x.abs(), torch.full((1,), 0, dtype=x.dtype)),
    }
    examine(Sandwich(bodies[name]), expected={"first": 8})


def test_an_index_that_is_expanded_but_has_channels_of_its_own() -> None:
    """A buffer of a fixed size: it meets the input too."""

    class Read(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, 1)
            self.register_buffer("index", torch.arange(5, -1, -1).view(1, 1, 1, 6).expand(2, 8, 6, 6))

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x).gather(3, self.index)) + x.gather(3, self.index).sum(1, keepdim=True)

    assert not secateur.analyze(Read(), torch.randn(2, 8, 6, 6), probe=False).groups
