"""Networks whose outputs would not show a wrong cut: what led to them is compared."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import secateur

IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class ByHand(nn.Module):
    """A mean over the channels of `a`, by their number; `b` is as free as can be."""

    def __init__(self, last: Callable[[Tensor], Tensor], first: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 5, 1)
        self.first, self.last = first, last
        self.register_buffer("left", torch.linspace(0.9999, 0.9, 10))

    def forward(self, x: Tensor) -> Tensor:
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
    "zeros": (lambda y: F.relu(y - 20),),
    "noughts that are none": (lambda y: y / 0 * 0,),
    "behind a choice per channel": (lambda y: y, winners),
}


@pytest.mark.parametrize("name", BLIND)
def test_a_cut_that_the_outputs_do_not_show_is_found(name: str) -> None:
    torch.manual_seed(0)
    graph = secateur.analyze(ByHand(*BLIND[name]), IMAGES)
    assert [group.name for group in graph.groups] == ["b"]
    (frozen,) = [layer for layer in graph.frozen if layer.name == "a"]
    assert "depends on the number of channels" in frozen.reason


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
            x = x.float()
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
    assert "depends on the number of channels" in frozen.reason
