"""Networks in which a wrong cut would not show, if outputs were all that is compared, or copies all that is run."""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import secateur
from secateur.channels.reasons import Kind

IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


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
    graph = secateur.analyze(ByHand(*BLIND[name]), IMAGES)
    assert [group.name for group in graph.groups] == ["b"]
    (frozen,) = [layer for layer in graph.frozen if layer.name == "a"]
    assert frozen.reason.kind is Kind.DIFFERS


@pytest.mark.parametrize("name", ["classes", "a mask", "the best two"])
def test_verify_looks_behind_outputs_that_say_little(name: str) -> None:
    torch.manual_seed(0)
    model = ByHand(*BLIND[name])
    graph = secateur.analyze(model, IMAGES, probe=False)
    plan = secateur.Plan.keep(graph, {"a": [0, 1, 2, 3, 4, 5, 6]})
    with pytest.raises(secateur.NotEquivalent, match="because of group 'a'"):
        secateur.verify(model, plan, IMAGES)
    right = secateur.Plan.keep(graph, {"b": [0, 1, 2]})
    assert secateur.verify(model, right, IMAGES).chosen


class Attention(nn.Module):
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
    graph = secateur.analyze(Attention(value), IMAGES)
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
    assert [group.name for group in secateur.analyze(model, IMAGES).groups] == ["b"]
    graph = secateur.analyze(model, IMAGES, probe=False)
    with pytest.raises(secateur.NotEquivalent, match="group 'a'"):
        secateur.verify(model, secateur.Plan.keep(graph, {"a": [0, 1, 2]}), IMAGES)
    found = secateur.verify(model, secateur.Plan.keep(graph, {"b": [0, 1, 2]}), IMAGES)
    assert found.modes == ("eval", "train")


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
    graph = secateur.analyze(Shortcut(), IMAGES)
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
    graph = secateur.analyze(model, IMAGES)
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
    assert not secateur.analyze(Taken(width), IMAGES).groups


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
    assert not secateur.analyze(Window(pools), IMAGES).groups


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
    graph = secateur.analyze(nn.Sequential(ConvDropout(), nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 1)), IMAGES)
    assert [group.name for group in graph.groups] == ["1"]


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
    graph = secateur.analyze(Scaled(scale), IMAGES)
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
    graph = secateur.analyze(model, IMAGES)
    assert graph.num_channels == 160
    for seed in range(3):
        assert secateur.verify(model, secateur.Plan.random(graph, 0.4, seed), IMAGES).difference < 1e-12


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
    graph = secateur.analyze(model, IMAGES)
    for image in (torch.zeros(2, 3, 8, 8), 1e-10 * IMAGES):
        secateur.verify(model, secateur.Plan.random(graph, 0.6), image)


class Halved(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        a, b, c = self
        return c(F.relu(b(F.relu(a(input)).bfloat16())).float())


def test_code_that_asks_for_half_precision_is_compared_in_double() -> None:
    torch.manual_seed(0)
    model = Halved(nn.Conv2d(3, 64, 3), nn.Conv2d(64, 64, 3).bfloat16(), nn.Conv2d(64, 5, 3))
    graph = secateur.analyze(model, IMAGES)
    assert graph.num_channels == 128
    assert secateur.verify(model, secateur.Plan.random(graph, 0.4), IMAGES).precision == torch.float64


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)
        self.turn = nn.Parameter(torch.randn(4, 1, 1, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        return (self.b(F.relu(self.a(x))) * self.turn).abs()


def test_complex_parameters_stay_complex_in_a_comparison() -> None:
    model = Complex()
    graph = secateur.analyze(model, IMAGES)
    assert [group.name for group in graph.groups] == ["a"]
    assert secateur.verify(model, secateur.Plan.random(graph, 0.5), IMAGES).precision == torch.float64


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
    graph = secateur.analyze(model, IMAGES)
    assert [group.size for group in graph.groups] == ([] if groups is None else [4])
    for kept in range(1, 4 if groups else 1):
        assert secateur.verify(model, secateur.Plan.keep(graph, {"a": range(kept)}), IMAGES).agrees


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
    assert not secateur.analyze(Factor(), IMAGES).groups


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
    assert not secateur.analyze(Paired(), IMAGES).groups
    model = Paired()
    graph = secateur.analyze(model, IMAGES, probe=False)
    with pytest.raises(
        secateur.NotEquivalent, match=r"shrunk network does not run on this example: AssertionError.* at test_blind"
    ):
        secateur.verify(model, secateur.Plan.keep(graph, {"a": range(3)}), IMAGES)
    with pytest.raises(secateur.InvalidExample, match=r"the model does not run on this example: RuntimeError"):
        secateur.verify(model, secateur.Plan.keep(graph, {"a": range(4)}), IMAGES[:, :2])


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
    with pytest.raises(secateur.NotEquivalent, match="the shrunk network does 3 products, the masked one 2"):
        secateur.verify(model, secateur.Plan.keep(graph, {"a": [3]}), example)


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

    assert "a" not in {group.name for group in secateur.analyze(Filtered(), IMAGES).groups}
