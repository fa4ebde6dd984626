"""Numbers that operators compute with: one that depends on a width is seen where it has no effect on this example."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from oracle import randomize_
from sandwich import IMAGE, Sandwich, sizes
from torch import Tensor, nn

import secateur

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class EqualTokens(nn.Module):
    """Attention over tokens that are all the same, so that no scale of the scores changes their softmax."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.embed, self.attend = nn.Embedding(4, 8), attend
        self.query, self.key, self.value = (nn.Linear(8, n) for n in (6, 6, 7))
        self.last = nn.Linear(7, 3)

    def forward(self, image: Tensor) -> Tensor:
        x = self.embed((image[:, 0, :, 0] > 1e6).long())
        return self.last(self.attend(self.query(x), self.key(x), self.value(x)))


def by_hand(scale: Callable[[Tensor], float]) -> Attend:
    return lambda q, k, v: (q @ k.mT * scale(q)).softmax(-1) @ v


BY_WIDTH: dict[str, Attend] = {
    "by hand": by_hand(lambda q: q.shape[-1] ** -0.5),
    "divided": lambda q, k, v: (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v,
    "of the values": by_hand(lambda q: 1 + q.size(-1)),
    "fused": F.scaled_dot_product_attention,
    "fused, with a scale": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=1 / q.shape[-1]),
}
CONSTANT: dict[str, Attend] = {
    "by hand": by_hand(lambda q: 0.4),
    "of the tokens": by_hand(lambda q: q.shape[1] ** -0.5),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", BY_WIDTH)
def test_a_scale_by_width_keeps_queries_and_keys(name: str, training: bool) -> None:
    model = randomize_(EqualTokens(BY_WIDTH[name])).train(training)
    assert not {"query", "key"} & set(sizes(secateur.analyze(model, IMAGE)))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", CONSTANT)
def test_another_scale_keeps_nothing(name: str, training: bool) -> None:
    model = randomize_(EqualTokens(CONSTANT[name])).train(training)
    assert {"query", "value"} <= set(sizes(secateur.analyze(model, IMAGE)))


@pytest.mark.parametrize(
    "add",
    [
        lambda x: x + 0 * (x - x) * x.shape[1],
        lambda x: x + torch.zeros_like(x).pow(x.shape[1] + 1),
        lambda x: x.clamp(max=100.0 * x.shape[1]),
        lambda x: F.hardtanh(x, -100.0 * x.shape[1], 1e6),
    ],
)
def test_a_number_without_effect_on_the_example(add: Callable[[Tensor], Tensor]) -> None:
    assert not secateur.analyze(randomize_(Sandwich(lambda m, x: add(x))), IMAGE).groups
