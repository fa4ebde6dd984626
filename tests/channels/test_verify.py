"""Masked against shrunk: a wrong cut is found wherever it hides, and rounding is no difference."""

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layers import PICTURES
from oracle import randomize_
from sandwich import IMAGE, Sandwich, parameter, sizes
from torch import Tensor, nn

import secateur
from secateur import Plan
from secateur.channels.gaps import gaps_between, gaps_of_sums
from secateur.channels.reasons import Kind


class ByHand(nn.Module):
    """A mean over the channels of `a`, by their number; `b` is as free as can be."""

    def __init__(self, last: Callable[[Tensor], Any], first: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 5, 1)
        self.first, self.last = first, last
        self.register_buffer("left", torch.linspace(0.9999, 0.9, 10))

    def forward(self, x: Tensor) -> Any:
        x = self.first(F.relu(self.a(x * (1 - self.left[0]).sqrt())))
        x = x * (x.sum(1, keepdim=True) / x.shape[1]).tanh()
        return self.last(self.c(F.relu(self.b(x))))


def winners(x: Tensor) -> Tensor:
    """The largest of every channel, and zeros elsewhere: what is chosen has as many channels as there are."""
    return x * (x >= x.flatten(2).topk(8, -1).values[..., -1:, None])


BLIND = {
    "classes": (lambda y: y.argmax(1),),
    "a mask": (lambda y: y.mean((2, 3)) > 0,),
    "the best two": (lambda y: y.mean((2, 3)).topk(2).indices,),
    "classes and a constant": (lambda y: (y.argmax(1), torch.ones(2)),),
    "scores that leave no doubt": (lambda y: (1e6 * y.mean((2, 3))).softmax(1),),
    "zeros": (lambda y: F.relu(y - 20),),
    "noughts that are none": (lambda y: y / 0 * 0,),
    "what rounding leaves": (lambda y: y - y * 3 / 3,),
    "behind a choice per channel": (lambda y: y, winners),
}


@pytest.mark.parametrize("name", BLIND)
def test_a_cut_that_the_outputs_do_not_show_is_found(name: str) -> None:
    torch.manual_seed(0)
    graph = secateur.analyze(ByHand(*BLIND[name]), PICTURES)
    assert [group.name for group in graph.groups] == ["b"]
    (frozen,) = [layer for layer in graph.frozen if layer.name == "a"]
    assert frozen.reason.kind is Kind.DIFFERS


@pytest.mark.parametrize("name", ["classes", "a mask", "the best two"])
def test_verify_looks_behind_outputs_that_say_little(name: str) -> None:
    torch.manual_seed(0)
    model = ByHand(*BLIND[name])
    graph = secateur.analyze(model, PICTURES, probe=False)
    plan = secateur.Plan.keep(graph, {"a": [0, 1, 2, 3, 4, 5, 6]})
    with pytest.raises(secateur.NotEquivalent, match="because of group 'a'"):
        secateur.verify(model, plan, PICTURES)
    right = secateur.Plan.keep(graph, {"b": [0, 1, 2]})
    assert secateur.verify(model, right, PICTURES).chosen


class MaskedAttention(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.stem, self.q, self.k = nn.Conv2d(3, 12, 3, padding=1), nn.Conv2d(12, 8, 1), nn.Conv2d(12, 8, 1)
        self.v, self.head = nn.Conv2d(12, 10, 1), nn.Conv2d(10, 4, 1)
        self.register_buffer("mask", torch.full((64, 64), value).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(F.relu(self.stem(x))).flatten(2).mT for layer in (self.q, self.k, self.v))
        weights = (q @ k.mT / math.sqrt(q.shape[-1]) + self.mask).softmax(-1)
        return self.head((weights @ v).mT.reshape(x.shape[0], -1, 8, 8))


@pytest.mark.parametrize("value", [0.0, -100.0, -1e9, torch.finfo(torch.float32).min, -math.inf])
def test_a_mask_in_a_buffer_does_not_drown_the_rest(value: float) -> None:
    torch.manual_seed(0)
    graph = secateur.analyze(MaskedAttention(value), PICTURES)
    assert {group.name for group in graph.groups} == {"stem", "v"}, "the scale is computed from the width"


class Auxiliary(nn.Module):
    """Has a second head in training, which runs in single precision only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1)
        self.second, self.head = nn.Conv2d(8, 5, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> list[Tensor]:
        x = F.relu(self.a(x))
        outputs = [self.head(F.relu(self.b(x))).mean((2, 3))]
        if self.training:
            assert x.dtype == torch.float32
            outputs.append(self.second(x * x.sum(1, keepdim=True) / x.shape[1]).mean((2, 3)))
        return outputs


def test_training_is_compared_in_single_precision_where_it_must() -> None:
    torch.manual_seed(0)
    model = Auxiliary()
    assert [group.name for group in secateur.analyze(model, PICTURES).groups] == ["b"]
    graph = secateur.analyze(model, PICTURES, probe=False)
    with pytest.raises(secateur.NotEquivalent, match="group 'a'"):
        secateur.verify(model, secateur.Plan.keep(graph, {"a": [0, 1, 2]}), PICTURES)
    found = secateur.verify(model, secateur.Plan.keep(graph, {"b": [0, 1, 2]}), PICTURES)
    assert found.modes == ("eval", "train")


class Scaled(nn.Module):
    """What a layer scale of next to nothing hides."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.stem, self.inner, self.head = nn.Conv2d(3, 8, 1), ByHand(lambda y: y), nn.Conv2d(8, 4, 1)
        self.inner.a, self.inner.c = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
        self.gamma = nn.Parameter(torch.full((8, 1, 1), scale))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(x + self.gamma * self.inner(x))


@pytest.mark.parametrize("scale", [1.0, 1e-5, 1e-9, 0.0])
def test_a_tiny_scale_hides_nothing(scale: float) -> None:
    torch.manual_seed(0)
    graph = secateur.analyze(Scaled(scale), PICTURES)
    assert {layer.name for layer in graph.frozen} == {"inner.a", "head"}


@pytest.mark.parametrize("seed", range(5))
def test_outputs_that_add_up_to_nothing_are_no_difference(seed: int) -> None:
    """As of a last layer that started at zero and has learnt from a softmax: only rounding is left of their sum."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 128, 1), nn.ReLU(), nn.Conv2d(128, 10, 1, bias=False)).double()
    model[2].weight.data -= model[2].weight.mean(0)
    pixel = torch.randn(1, 3, 1, 1).double()
    graph = secateur.analyze(model, pixel)
    assert graph.num_channels == 128
    assert secateur.verify(model, secateur.Plan.random(graph, 0.5, seed), pixel).difference < 1e-14


@pytest.mark.parametrize("last", [lambda y: y - y * 3 / 3, lambda y: 1 - y.softmax(1).sum(1)])
def test_what_rounding_leaves_is_no_difference(last: Callable[[Tensor], Any]) -> None:
    """As of what cancels: it is another after every cut, and after none."""
    torch.manual_seed(0)
    model = Last(last)
    graph = secateur.analyze(model, PICTURES)
    assert graph.num_channels == 160
    for seed in range(3):
        assert secateur.verify(model, secateur.Plan.random(graph, 0.4, seed), PICTURES).difference < 1e-12


class Last(nn.Sequential):
    def __init__(self, last: Callable[[Tensor], Any]) -> None:
        super().__init__(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 96, 3), nn.ReLU(), nn.Conv2d(96, 5, 3))
        self.last = last

    def forward(self, input: Tensor) -> Any:
        return self.last(super().forward(input))


def test_images_without_content_are_no_difference() -> None:
    """Batch norms divide by a variance of next to nothing when they train on them."""
    torch.manual_seed(0)
    layers = [[nn.Conv2d(i, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()] for i in (3, *[64] * 5)]
    model = nn.Sequential(*(layer for some in layers for layer in some), nn.Conv2d(64, 5, 1))
    graph = secateur.analyze(model, PICTURES)
    for image in (torch.zeros(2, 3, 8, 8), 1e-10 * PICTURES):
        secateur.verify(model, secateur.Plan.random(graph, 0.6), image)


class Halved(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        a, b, c = self
        return c(F.relu(b(F.relu(a(input)).bfloat16())).float())


def test_code_that_asks_for_half_precision_is_compared_in_double() -> None:
    torch.manual_seed(0)
    model = Halved(nn.Conv2d(3, 64, 3), nn.Conv2d(64, 64, 3).bfloat16(), nn.Conv2d(64, 5, 3))
    graph = secateur.analyze(model, PICTURES)
    assert graph.num_channels == 128
    assert secateur.verify(model, secateur.Plan.random(graph, 0.4), PICTURES).precision == torch.float64


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)
        self.turn = nn.Parameter(torch.randn(4, 1, 1, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        return (self.b(F.relu(self.a(x))) * self.turn).abs()


def test_complex_parameters_stay_complex_in_a_comparison() -> None:
    model = Complex()
    graph = secateur.analyze(model, PICTURES)
    assert [group.name for group in graph.groups] == ["a"]
    assert secateur.verify(model, secateur.Plan.random(graph, 0.5), PICTURES).precision == torch.float64


class Paired(nn.Module):
    """Two layers that must have an even number of channels together, one of which cannot be narrow."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 8, 1), nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        a, b = F.relu(self.a(x)), F.relu(self.b(x))
        x = torch.cat([a, b * (1 + (b.shape[1] > 4))], 1)
        assert x.shape[1] % 2 == 0
        return self.c(x)


def test_what_works_in_company_is_tried_alone_when_the_company_stays() -> None:
    torch.manual_seed(0)
    assert not secateur.analyze(Paired(), PICTURES).groups
    model = Paired()
    graph = secateur.analyze(model, PICTURES, probe=False)
    with pytest.raises(secateur.NotEquivalent) as caught:
        secateur.verify(model, secateur.Plan.keep(graph, {"a": range(3)}), PICTURES)
    assert caught.value.got.startswith("AssertionError")
    assert "test_verify.py" in caught.value.got
    with pytest.raises(secateur.InvalidModel) as caught:
        secateur.verify(model, secateur.Plan.keep(graph, {"a": range(4)}), PICTURES[:, :2])


class Twice(nn.Module):
    """Does another product where it is narrow, of which its outputs say nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 5)
        self.more = nn.Parameter(torch.eye(5) * 1.1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.a(x))
        y = self.b(x)
        return ((y @ self.more if x.shape[1] < 15 else y) > 0).to(y.dtype)


def test_products_that_only_the_shrunk_network_does_count() -> None:
    torch.manual_seed(0)
    model, example = Twice(), torch.randn(8, 6)
    assert not secateur.analyze(model, example).groups
    graph = secateur.analyze(model, example, probe=False)
    with pytest.raises(secateur.NotEquivalent) as caught:
        secateur.verify(model, secateur.Plan.keep(graph, {"a": [3]}), example)
    assert (caught.value.got, caught.value.wanted) == (3, 2)


def test_complex_weights_of_zeros_hide_nothing() -> None:
    class Filtered(nn.Module):
        """A sum over frequencies of all channels, by their number; as long as the filter is zero, nobody sees it."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)
            self.filter = nn.Parameter(torch.zeros(8, 8, 5, dtype=torch.cfloat))

        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(self.a(x))
            seen = torch.fft.irfft2(torch.fft.rfft2(x) * self.filter, s=x.shape[2:])
            return self.b(x) + seen.sum(1, keepdim=True) / x.shape[1]

    assert "a" not in {group.name for group in secateur.analyze(Filtered(), PICTURES).groups}


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
    with pytest.raises(secateur.NotEquivalent, match="no outputs to compare"):
        secateur.verify(model, Plan.random(secateur.analyze(model, zeros, probe=False), 0.4), zeros)


def test_verify_reports_and_catches_a_wrong_graph(model: nn.Sequential, plan: Plan) -> None:
    result = secateur.verify(model, plan, PICTURES)
    assert result.difference < 1e-12
    assert result.modes == ("eval", "train")
    assert result.outputs == 12

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 8, 1)
            self.second = nn.Conv2d(8, 2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            return self.second(x * x.shape[1])

    liar = Sum()
    graph = secateur.analyze(liar, PICTURES, probe=False)
    with pytest.raises(secateur.NotEquivalent, match="because of group 'first'"):
        secateur.verify(liar, Plan.random(graph, 0.5), PICTURES)


def test_inexact_groups_are_marked_and_measured() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.GroupNorm(2, 8), nn.Conv2d(8, 2, 1))
    graph = secateur.analyze(model, PICTURES, inexact=True)
    assert [(g.size, g.exact) for g in graph.groups] == [(4, False)]
    assert "~" in str(graph)
    plan = Plan.random(graph, 0.5)
    result = secateur.verify(model, plan, PICTURES)
    assert not result.exact
    assert result.difference > 1e-6
    assert secateur.shrink(model, plan)[1].num_channels == 4


class Picky(nn.Module):
    """Returns the few best of many nearly equal values, as a detector does."""

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 1)
        self.second = nn.Conv2d(8, 2, 1)
        self.threshold = threshold

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.second(self.first(x).relu()).flatten()
        scores = scores[scores > self.threshold]
        values, indices = scores.round(decimals=14).sort(descending=True)
        return values[:50], indices[:50]


@pytest.mark.parametrize("threshold", [-100.0, 100.0])
def test_what_is_picked_by_value_is_compared_before_the_choice(threshold: float) -> None:
    model = Picky(threshold)
    image = PICTURES[:, :, :1, :1].expand(-1, -1, 8, 8)
    graph = secateur.analyze(model, image)
    assert [g.name for g in graph.groups] == ["first"]
    result = secateur.verify(model, Plan.random(graph, 0.5), image)
    assert result.outputs > 0
    assert result.difference < 1e-12


def test_a_model_that_insists_on_single_precision_is_compared_in_it() -> None:
    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 8, 1)
            self.kernel = torch.ones(4, 8, 1, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.conv2d(self.first(x.float()).float().sum(1, keepdim=True), self.kernel[:, :1])

    model = Single()
    graph = secateur.analyze(model, PICTURES)
    assert [g.size for g in graph.groups] == [8]
    assert secateur.verify(model, Plan.random(graph, 0.5), PICTURES).precision == torch.float32


def test_an_example_without_outputs_verifies_what_leads_there_if_anything() -> None:
    class Silent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 8, 1, bias=False)
            self.second = nn.Conv2d(8, 2, 1, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x))[:0]

    model = Silent()
    plan = Plan.random(secateur.analyze(model, PICTURES), 0.5)
    assert secateur.verify(model, plan, PICTURES).chosen
    with pytest.raises(secateur.NotEquivalent, match="gives no outputs to compare"):
        secateur.verify(model, plan, torch.zeros_like(PICTURES))


@pytest.mark.parametrize("width", [2, 6])
def test_einsum_does_without_a_product_where_one_channel_is_left(width: int) -> None:
    class Likeness(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queries, self.keys = nn.Conv2d(3, width, 1), nn.Conv2d(3, width, 1)
            self.values, self.last = nn.Conv1d(64, 6, 1), nn.Conv1d(6, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            likeness = torch.einsum("ncx,ncy->nxy", self.queries(x).flatten(2), self.keys(x).flatten(2))
            return self.last(torch.einsum("ncx,nxy->ncy", self.values(likeness.tanh()), likeness))

    model = Likeness()
    graph = secateur.analyze(model, torch.randn(2, 3, 8, 8))
    assert {group.name: group.size for group in graph.groups}["queries"] == width
    plan = Plan.keep(graph, {"queries": [1]})
    assert secateur.verify(model, plan, torch.randn(2, 3, 8, 8)).difference < 1e-12


def test_a_linear_layer_adds_its_bias_by_another_operator_where_one_channel_is_left() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.then, self.last = nn.Conv2d(3, 6, 3), nn.Linear(6, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.then(self.first(x).relu().permute(0, 2, 3, 1)).relu().mean((1, 2)))

    model, images = Last(), torch.randn(4, 3, 8, 8)
    graph = secateur.analyze(model, images)
    assert secateur.verify(model, Plan.keep(graph, {"first": [3]}), images).difference < 1e-12


def test_a_bias_may_wake_removed_channels_that_a_norm_puts_to_sleep() -> None:
    """The layer mixes columns of every channel by itself."""
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Linear(8, 8), nn.BatchNorm2d(8), nn.Conv2d(8, 2, 1))
    images = torch.randn(2, 3, 8, 8)
    graph = secateur.analyze(model, images)
    assert [group.name for group in graph.groups] == ["0"]
    assert secateur.verify(model, Plan.keep(graph, {"0": [1, 5, 6]}), images).difference < 1e-12


def test_what_is_added_to_a_product_may_be_far_larger_than_that() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 36, 200), nn.Linear(200, 4))
    model[3].weight.data *= 1e-9
    image = torch.randn(1, 3, 8, 8)
    plan = Plan.random(secateur.analyze(model, image), 0.3, seed=0)
    assert secateur.verify(model, plan, image).difference < 1e-12


def test_what_is_added_to_a_product_may_be_infinite_or_of_no_weight() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queries, self.keys = nn.Conv2d(3, 6, 1), nn.Conv2d(3, 6, 1)
            self.values, self.last = nn.Conv2d(3, 6, 1), nn.Conv1d(6, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            queries, keys, values = (layer(x).flatten(2) for layer in (self.queries, self.keys, self.values))
            later = x.new_full((64, 64), -torch.inf).triu(1).expand(len(x), -1, -1)
            likeness = torch.baddbmm(later, queries.mT, keys).softmax(2)
            nothing = torch.full_like(likeness, torch.nan)
            return self.last(values @ torch.baddbmm(nothing, likeness, likeness, beta=0))

    model, images = Attention(), torch.randn(2, 3, 8, 8)
    graph = secateur.analyze(model, images)
    assert [group.size for group in graph.groups] == [6, 6]
    assert secateur.verify(model, Plan.random(graph, 0.5), images).difference < 1e-12


def test_gaps_of_sums_are_those_of_each_tensor() -> None:
    """Also of what is infinite or no number, and where rounding moves as far."""
    generator = torch.Generator().manual_seed(0)
    ours = [torch.randn(2, generator=generator, dtype=torch.float64) for _ in range(40)]
    theirs = [t + 1e-9 * torch.randn(2, generator=generator, dtype=torch.float64) for t in ours]
    theirs[3], theirs[4] = ours[3].clone(), ours[4].clone()
    for place, (a, b) in enumerate(((math.nan, 1.0), (1.0, math.nan), (math.nan, math.nan), (math.inf, 1.0))):
        ours[10 + place][0], theirs[10 + place][0] = a, b
    ours[20][:] = theirs[20][:] = 0.0
    theirs[20][1] = 1.0
    nudged = [[t + 1e-9 * torch.rand(2, generator=generator, dtype=torch.float64) for t in ours[:n]] for n in (40, 25)]
    for others in ([], nudged, [[]]):
        expected = gaps_between(ours, theirs, nudged=others)
        assert expected
        assert len(expected) < 40
        assert gaps_of_sums(ours, theirs, others) == expected
    assert gaps_of_sums([], [], []) == []
