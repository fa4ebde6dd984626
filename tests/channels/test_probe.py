"""Sizes that only Python code knows of: the probe freezes what raises or differs when cut."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import assert_exact, randomize_
from sandwich import IMAGE, Sandwich, examine, kinds, parameter, reasons, sizes
from torch import Tensor, nn

import secateur
from secateur import Plan
from secateur.channels.amounts import equal_widths, unequal_amounts
from secateur.channels.groups import ChannelGroup
from secateur.channels.reasons import Kind

Body = Callable[..., Any]

FIXED: dict[str, tuple[Body, str]] = {
    "split": (lambda m, x: torch.cat(x.split([4, 4], 1)[::-1], 1), "x.split([4, 4], 1)"),
    "view": (lambda m, x: x.view(-1, 8, 36).view(-1, 8, 6, 6), "x.view(-1, 8, 36)"),
    "groups": (lambda m, x: F.conv2d(x, m.depth, groups=8), "groups=8"),
    "expand": (lambda m, x: x * x.new_ones(1).expand(8).view(8, 1, 1), ".expand(8)"),
}


@pytest.mark.parametrize("name", FIXED)
def test_fixed_sizes_are_found_by_the_probe(name: str) -> None:
    """The reason quotes the line of the network's own code."""
    body, line = FIXED[name]
    graph = examine(Sandwich(body, depth=parameter(8, 1, 1, 1)), expected={}, probe=True)
    reason = reasons(graph)["first"]
    assert reason.kind is Kind.FIXED_SIZE
    assert reason.detail.startswith("RuntimeError: ")
    assert line in reason.detail
    assert "test_probe.py:" in reason.detail


DEPENDING: dict[str, Body] = {
    "divided by the number": lambda m, x: x / x.shape[1],
    "mean by hand": lambda m, x: x * x.sum(1, keepdim=True) / x.shape[1],
    "fixed slices": lambda m, x: torch.cat([x[:, 4:], x[:, :4]], 1),
    "loop": lambda m, x: sum((x * i for i in range(x.shape[1])), x),
}


@pytest.mark.parametrize("name", DEPENDING)
def test_what_depends_on_the_number_of_channels(name: str) -> None:
    graph = examine(Sandwich(DEPENDING[name]), expected={}, probe=True)
    assert kinds(graph)["first"] is Kind.DIFFERS


class Viewed(nn.Module):
    """The result of `value` is viewed as wide as what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.value, self.project = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
        self.query, self.key, self.last = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 4, 1), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        scores = (self.query(x).flatten(2).mT @ self.key(x).flatten(2)).softmax(-1)
        return self.last(x + self.project((self.value(x).flatten(2) @ scores.mT).view(x.shape)))


class Pair(nn.Module):
    """Two layers of the given widths, of which `body` makes what the last one reads, as wide as the second."""

    def __init__(self, body: Callable[[Tensor, Tensor], Tensor], wide: int = 8, narrow: int = 8) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, wide, 3, padding=1), nn.Conv2d(wide, narrow, 3, padding=1)
        self.last, self.body = nn.Conv2d(narrow, 2, 1), body

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).relu()
        return self.last(self.body(x, self.b(x).relu()))


def ratio(x: Tensor, y: Tensor) -> Tensor:
    return y * (y.shape[1] / x.shape[1])


def joined_if_alike(x: Tensor, y: Tensor) -> Tensor:
    return y + x if y.shape == x.shape else y


class Spread(nn.Module):
    """A grouped convolution makes several channels from each; the sum is left out where shapes differ."""

    def __init__(self, narrow: int, several: int, wide: int) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, narrow, 3, padding=1)
        self.spread = nn.Conv2d(narrow, several * narrow, 1, groups=narrow)
        self.b, self.last = nn.Conv2d(3, wide, 3, padding=1), nn.Conv2d(wide, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(x).relu()
        return self.last(joined_if_alike(self.spread(self.a(x).relu()), y))


@pytest.mark.parametrize(
    ("model", "stay"),
    [
        (Viewed(), {"stem", "value"}),
        (Pair(ratio), {"a", "b"}),
        (Pair(ratio, wide=16), {"a", "b"}),
        (Pair(joined_if_alike, wide=16), {"a"}),
        (Spread(2, 2, 2), {"a"}),
        (Spread(3, 3, 4), {"a"}),
    ],
    ids=["attention", "ratio", "ratio of other widths", "joined if alike", "spread", "spread unevenly"],
)
def test_sizes_that_only_the_code_ties(model: nn.Module, stay: set[str]) -> None:
    graph = secateur.analyze(randomize_(model), IMAGE)
    assert not stay & set(sizes(graph))
    for seed in range(3):
        assert_exact(model, Plan.random(graph, 0.4, seed), (IMAGE,), cost=False)


class Schooled(nn.Module):
    """Training runs `body` on features, too."""

    def __init__(self, body: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.last, self.aux = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 2, 1), nn.Linear(8 * 36, 2)
        self.body = body

    def forward(self, x: Tensor) -> Any:
        x = self.a(x).relu()
        return (self.last(x), self.body(self, x)) if self.training else self.last(x)


@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: m.aux(x.view(-1, 8 * 36)),
        lambda m, x: m.aux(x.flatten(1)) / x.shape[1],
        lambda m, x: x,
    ],
    ids=["a fixed size", "the number of channels", "an output"],
)
@pytest.mark.parametrize("image", [IMAGE, IMAGE[0]], ids=["batch", "no batch"])
def test_what_only_training_does(body: Callable[[nn.Module, Tensor], Any], image: Tensor) -> None:
    model = randomize_(Schooled(body))
    graph = secateur.analyze(model, image)
    assert not graph.groups or image.dim() == 3  # where training cannot run, a note says so
    if graph.groups:
        assert any("training mode cannot run" in note for note in graph.notes)


def groups_of(*widths: int) -> list[ChannelGroup]:
    return [ChannelGroup(str(i), 0, width, (), 1, 1, None) for i, width in enumerate(widths)]


def test_any_two_groups_of_a_size_lose_different_numbers_at_some_time() -> None:
    groups = groups_of(*[16] * 30, *[8] * 9, 5, 3, 64)
    ways = unequal_amounts(groups)[:-1]
    for a in groups:
        for b in groups:
            if a.size == b.size and a is not b:
                assert any(way[a.name] != way[b.name] for way in ways)
    for way in unequal_amounts(groups):
        assert all(0 < way[g.name] < g.size and (way[g.name] % 2 or g.size < 4) for g in groups)


def test_widths_made_equal() -> None:
    amounts = equal_widths(groups_of(16, 8, 3, 64))
    assert amounts == {"0": 8, "1": 0, "2": 0, "3": 56}
    assert equal_widths(groups_of(2, 3)) == {"0": 0, "1": 0}


class Deciding(nn.Module):
    """Code that goes another way where widths are equal, as wide as a number, or small."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.out_channels = way, 12
        self.stem, self.left, self.right = nn.Conv2d(3, 30, 1), nn.Conv2d(30, 8, 1), nn.Conv2d(30, 8, 1)
        self.conv, self.project = nn.Conv2d(16, 12, 3, padding=1), nn.Conv2d(16, 12, 1)
        self.wide, self.last = nn.Conv2d(12, 40, 1), nn.Conv2d(40, 12, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        x = torch.cat([self.left(x), self.right(x)], 1).relu()
        y = self.conv(x)
        if self.way != "equal" or x.shape != y.shape:
            x = self.project(x)
        y = self.wide((x + y).relu()).relu()
        if self.way == "number" and y.shape[1] == self.out_channels:
            y = y * 2
        if self.way == "small" and y.shape[1] < 6:
            y = y + y
        return self.last(y)


@pytest.mark.parametrize(
    ("way", "stay"), [("equal", {"left", "right"}), ("number", {"wide"}), ("small", {"wide"}), ("", set())]
)
def test_decisions_by_width(way: str, stay: set[str]) -> None:
    graph = secateur.analyze(randomize_(Deciding(way)), IMAGE)
    assert set(sizes(graph)) == {"stem", "left", "right", "conv", "wide"} - stay


@pytest.mark.parametrize(
    "act",
    [
        lambda y, wide: F.leaky_relu(y, 0.1 if wide else 0.3),
        lambda y, wide: F.gelu(y, approximate="none" if wide else "tanh"),
        lambda y, wide: y.roll(1 if wide else 2, 3),
        lambda y, wide: F.pad(y, (1, 0) if wide else (0, 1)),
    ],
)
def test_numbers_that_depend_on_a_width(act: Any) -> None:
    model = randomize_(Sandwich(lambda m, x: act(x, x.shape[1] >= 14), inner=32, width=32))
    assert Kind.DIFFERS in {frozen.reason.kind for frozen in secateur.analyze(model, IMAGE).frozen}


def test_a_model_whose_copy_does_not_run_says_so() -> None:
    features: list[Tensor] = []

    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 2, 1)
            self.first.register_forward_hook(lambda module, args, output: features.append(output))
            self.owner = id(self)

        def forward(self, x: Tensor) -> Tensor:
            features.clear()
            if self.owner == id(self):
                self.first(x)
            return self.last(features[0])

    graph = secateur.analyze(Hooked().double(), IMAGE)
    assert kinds(graph)["first"] is Kind.NOT_COPIED
    assert reasons(graph)["first"].detail.startswith("IndexError")


class Tapped(nn.Module):
    """Features are taken by a hook, and read by the model itself."""

    def __init__(self, bound: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 2, 1)
        self.kept: list[Tensor] = []
        self.first.register_forward_hook(self.keep if bound else lambda *given: self.keep(*given))

    def keep(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        self.kept[:] = [output]

    def forward(self, x: Tensor) -> Tensor:
        self.first(x)
        return self.last(self.kept[0].relu())


def test_a_hook_that_holds_the_original_is_told_of_and_a_method_is_fine() -> None:
    told = reasons(secateur.analyze(Tapped(bound=False).double(), IMAGE))["first"]
    assert told.kind is Kind.NOT_COPIED
    assert [group.name for group in secateur.analyze(Tapped(bound=True).double(), IMAGE).groups] == ["first"]


PICTURE = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class HardCoded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 16, 3, padding=1)
        self.inner = nn.Conv2d(8, 6, 1)
        self.outer = nn.Conv2d(6, 4, 1)
        self.linear = nn.Linear(256, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, _ = self.convolution(x).split([8, 8], 1)
        x = self.outer(self.inner(a).relu())
        return self.linear(x.view(-1, 256))


def test_the_probe_finds_fixed_sizes_and_names_the_line() -> None:
    graph = secateur.analyze(HardCoded(), PICTURE)
    assert [g.name for g in graph.groups] == ["inner"]
    reasons = {f.name: f.reason for f in graph.frozen}
    assert reasons["convolution"].kind is Kind.FIXED_SIZE
    assert "test_probe.py" in reasons["convolution"].detail
    assert ".split([8, 8], 1)" in reasons["convolution"].detail
    assert "x.view(-1, 256)" in reasons["outer"].detail


SHAPES: dict[str, Body] = {
    "even": lambda m, x: x * 2 if x.shape[1] % 2 == 0 else x,
    "first": lambda m, x: x * (torch.arange(x.shape[1]) > 0).view(-1, 1, 1),
}


@pytest.mark.parametrize("name", SHAPES)
def test_code_that_looks_at_the_number_of_channels(name: str) -> None:
    """Found by the probe."""
    examine(Sandwich(SHAPES[name]), expected={}, probe=True, singly=True)


def test_operator_that_raises_on_zeros() -> None:
    """What the probe reports must come from the cut, not from the probe."""
    body = Sandwich(
        lambda m, x: x * (torch.multinomial(m.one(x).exp().log().abs().flatten(1), 1) >= 0).view(-1, 1, 1, 1)
    )
    body.one = nn.Conv2d(8, 2, 1)
    examine(body, expected={"first": 8}, probe=True)


PICTURES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Shortcut(nn.Module):
    """A sum wherever the shapes allow it, and the narrower tensor is an output."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1), nn.Conv2d(32, 4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.a(x))
        y = F.relu(self.b(x))
        return x, self.c(y + x if y.shape == x.shape else y)


def test_widths_of_what_stays_are_tried() -> None:
    graph = secateur.analyze(Shortcut(), PICTURES)
    assert not graph.groups
    (frozen,) = [layer for layer in graph.frozen if layer.name == "b"]
    assert frozen.reason.kind is Kind.DIFFERS


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(F.relu(self.a(x)))


def in_a_lambda(block: Block) -> None:
    block.forward = lambda x: x + block.b(F.relu(block.a(x)))


def decorated(block: Block) -> None:
    block.forward = torch.no_grad()(block.forward)


def bound(block: Block) -> None:
    block.forward = functools.partial(block.forward)


@pytest.mark.parametrize(("change", "shared"), [(in_a_lambda, True), (decorated, True), (bound, False)])
def test_a_function_that_copies_would_share_is_seen(change: Callable[[Block], None], shared: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), Block(), nn.Conv2d(8, 4, 1))
    change(model[2])  # pyright: ignore
    graph = secateur.analyze(model, PICTURES)
    assert bool(graph.groups) != shared
    assert any(layer.reason.kind is Kind.NOT_COPIED for layer in graph.frozen) == shared


class Taken(nn.Module):
    """Takes the width of one tensor for another's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.v, self.out = nn.Conv2d(3, width, 1), nn.Conv2d(3, width, 1), nn.Conv2d(width, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.a(x))
        energy = self.v(x).reshape(len(a), a.shape[1], -1).sum(1).square().mean(-1)
        return self.out(a) * energy.view(-1, 1, 1, 1)


@pytest.mark.parametrize("width", [4, 5, 8])
def test_widths_of_few_channels_are_told_apart(width: int) -> None:
    torch.manual_seed(0)
    assert not secateur.analyze(Taken(width), PICTURES).groups


class Window(nn.Module):
    """A smaller window for narrow tensors: the same operator with another number."""

    def __init__(self, pools: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 4, 1)
        self.pools = pools

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.a(x))
        size = 5 if x.shape[1] >= 8 else 3
        if self.pools:
            return self.b(F.avg_pool2d(x, size, 1, size // 2).square())
        blur = x.new_ones(x.shape[1], 1, size, size)
        return self.b(F.conv2d(x, blur, padding=size // 2, groups=x.shape[1]).square())


@pytest.mark.parametrize("pools", [True, False])
def test_windows_are_compared_too(pools: bool) -> None:
    torch.manual_seed(0)
    assert not secateur.analyze(Window(pools), PICTURES).groups


class ConvDropout(nn.Module):
    """Not a dropout, whatever its name says."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(x))
        return x * (x.sum(1, keepdim=True) / x.shape[1]) if self.training else x


def test_a_name_does_not_keep_a_module_from_training() -> None:
    torch.manual_seed(0)
    graph = secateur.analyze(nn.Sequential(ConvDropout(), nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 1)), PICTURES)
    assert [group.name for group in graph.groups] == ["1"]


class Shuffled(nn.Module):
    """Four groups of four channels: with one channel of each group, or one group, nothing moves."""

    def __init__(self, groups: int | None) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 4, 1)
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        batch, channels, height, width = x.shape
        groups = self.groups or 4
        x = x.view(batch, groups, channels // groups, height, width).transpose(1, 2)
        return self.b(x.reshape(batch, channels, height, width))


@pytest.mark.parametrize("groups", [None, 4])
def test_a_shuffle_that_one_channel_would_not_show(groups: int | None) -> None:
    torch.manual_seed(0)
    model = Shuffled(groups)
    graph = secateur.analyze(model, PICTURES)
    assert [group.size for group in graph.groups] == ([] if groups is None else [4])
    for kept in range(1, 4 if groups else 1):
        assert secateur.verify(model, secateur.Plan.keep(graph, {"a": range(kept)}), PICTURES).agrees


class Factor(nn.Module):
    """A factor that is another one for narrow tensors: the same operator with another number."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 32, 1), nn.Conv2d(32, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.a(x))
        return self.b(x * (1 + (x.shape[1] > 8)))


def test_factors_are_compared_too() -> None:
    torch.manual_seed(0)
    assert not secateur.analyze(Factor(), PICTURES).groups
