"""What labels cannot see, the probe must: sizes that only Python code knows of, and code that only training runs."""

import collections
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import assert_exact, masked, outputs, randomize_
from sandwich import IMAGE, Sandwich, examine, kinds, parameter, reasons, sizes
from torch import Tensor, nn

import secateur
from secateur import Plan
from secateur.channels.amounts import equal_widths, unequal_amounts
from secateur.channels.groups import ChannelGroup
from secateur.channels.reasons import Kind, Reason


class Attention(nn.Module):
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


@pytest.mark.parametrize(
    ("model", "stay"),
    [
        (Attention(), {"stem", "value"}),
        (Pair(ratio), {"a", "b"}),
        (Pair(ratio, wide=16), {"a", "b"}),
        (Pair(joined_if_alike, wide=16), {"a"}),
    ],
    ids=["attention", "ratio", "ratio of other widths", "joined if alike"],
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


def test_chance_in_training_is_no_difference() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        for _ in range(8):
            if not (m.training and random.random() < 0.5):
                x = x + 0.1 * m.mid(x).tanh()
        x = F.dropout(x, 0.3, m.training) + 0.1 * F.dropout2d(x, 0.5, m.training)
        x = F.rrelu(x, training=m.training)
        if not m.training:
            return x
        drawn = (
            torch.bernoulli(x.clamp(0, 1)) + x * torch.bernoulli(torch.full_like(x, 0.8)) + x * torch.bernoulli(x, 0.3)
        )
        return drawn + x * torch.rand_like(x) + x * torch.empty_like(x).uniform_(0.5, 1.5)

    model = randomize_(Sandwich(body, mid=nn.Conv2d(8, 8, 1)))
    random.seed(1)
    state, drawn = random.getstate(), torch.random.get_rng_state()
    graph = secateur.analyze(model, IMAGE)
    result = secateur.verify(model, Plan.random(graph, 0.4), IMAGE)
    assert result.modes == ("eval", "train")
    assert sizes(graph)
    assert random.getstate() == state
    assert torch.equal(torch.random.get_rng_state(), drawn)


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


def picked_early(m: Any, x: Tensor) -> Tensor:
    best = x.sum((1, 2, 3)).topk(1).indices
    return x / x.shape[1] * m.offset[best].sum()


@pytest.mark.parametrize(
    "body",
    [picked_early, lambda m, x: x / x.shape[1] * m.offset[(x.sum((1, 2, 3)) > 0).nonzero()].sum()],
    ids=["topk", "nonzero"],
)
def test_a_choice_that_falls_alike_excuses_nothing(body: Callable[..., Tensor]) -> None:
    model = randomize_(Sandwich(body, offset=parameter(2)))
    plan = Plan.random(secateur.analyze(model, IMAGE, probe=False), 0.4)
    with pytest.raises(secateur.NotEquivalent):
        secateur.verify(model, plan, IMAGE)
    assert "first" not in sizes(secateur.analyze(model, IMAGE))


@pytest.mark.parametrize("value", [-1e9, torch.finfo(torch.float64).min, float("-inf")])
def test_large_constants_hide_nothing(value: float) -> None:
    hidden = torch.zeros(2, 5, 6, 6, dtype=torch.bool)
    hidden[:, 0, 0] = True

    class Masked(Sandwich):
        def forward(self, image: Tensor) -> Tensor:
            return super().forward(image).masked_fill(hidden[: len(image)].repeat(len(image) // 2, 1, 1, 1), value)

    wrong, right = (randomize_(Masked(body)) for body in (lambda m, x: x / x.shape[1], lambda m, x: x / 8))
    plan = Plan.random(secateur.analyze(wrong, IMAGE, probe=False), 0.4)
    with pytest.raises(secateur.NotEquivalent):
        secateur.verify(wrong, plan, IMAGE)
    assert "first" not in sizes(secateur.analyze(wrong, IMAGE))
    assert secateur.verify(right, Plan.random(secateur.analyze(right, IMAGE), 0.4), IMAGE).agrees


def test_an_example_of_zeros() -> None:
    layers = nn.Conv2d(3, 8, 3, bias=False), nn.Conv2d(8, 2, 1, bias=False)

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = layers

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x).relu()
            return self.last(x / x.shape[1])

    zeros = torch.zeros(1, 3, 6, 6, dtype=torch.float64)
    model = randomize_(Bare())
    assert not secateur.analyze(model, zeros).groups
    with pytest.raises(secateur.NotEquivalent, match="or only zeros"):
        secateur.verify(model, Plan.random(secateur.analyze(model, zeros, probe=False), 0.4), zeros)


@pytest.mark.parametrize(
    "wrap",
    [lambda x: {"f": x}.values(), lambda x: collections.deque([x]), lambda x: map(torch.relu, [x]), iter],
    ids=["values", "deque", "map", "iterator"],
)
def test_outputs_in_any_container_stay(wrap: Callable[[Tensor], Any]) -> None:
    model = randomize_(Sandwich(lambda m, x: (m.mid(x), wrap(x)), inner=0, mid=nn.Conv2d(8, 2, 1)))
    assert kinds(secateur.analyze(model, IMAGE))["first"] is Kind.OUTPUT


def test_weights_computed_in_one_module_are_told_apart() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        x = F.conv2d(F.conv2d(x, m.w * 0.5).relu(), m.v * 0.5)
        return x + m.mid(x)

    model = randomize_(Sandwich(body, w=parameter(8, 8, 1, 1), v=parameter(8, 8, 1, 1), mid=nn.Conv2d(8, 8, 1)))
    graph = secateur.analyze(model, IMAGE)
    computed = Reason(Kind.COMPUTED_WEIGHT)
    assert graph.ungated == {"w": computed, "v": computed}


def test_a_train_that_returns_nothing() -> None:
    class Frozen(Sandwich):
        def train(self, mode: bool = True) -> Any:
            super().train(mode)
            self.norm.eval()

    assert sizes(secateur.analyze(randomize_(Frozen(lambda m, x: x)), IMAGE)) == {"first": 8}


class Batch(dict[str, Tensor]):
    """Reached by attribute, as some libraries have it."""

    __getattr__ = dict.__getitem__


def test_an_example_in_a_dict_of_its_own_kind() -> None:
    class Takes(Sandwich):
        def forward(self, batch: Any) -> Any:
            return super().forward(batch.image)

    assert sizes(secateur.analyze(randomize_(Takes(lambda m, x: x)), (Batch(image=IMAGE),))) == {"first": 8}


def test_a_tensor_kept_from_another_analysis_is_a_stranger() -> None:
    kept: dict[Any, Tensor] = {}

    def body(m: Any, x: Tensor) -> Tensor:
        return x + kept.setdefault(x.shape[1:], torch.zeros_like(x[:1]))

    secateur.analyze(randomize_(Sandwich(body, more=nn.Conv2d(64, 64, 3))), IMAGE)
    model = randomize_(Sandwich(body))
    graph = secateur.analyze(model, IMAGE)
    assert outputs(masked(model, Plan.random(graph, 0.4)), (IMAGE,), "eval")


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
