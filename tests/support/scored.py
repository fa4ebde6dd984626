"""Small networks with every kind of gate, data for them, and where their gates are, written down by hand."""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateur import ChannelGraph, Pruner, analyze

Batch = tuple[Tensor, Tensor]
NAMES = ["taylor", "fisher", "slim", "pcnn", "apoz", "residual", "l1", "l2", "fpgm"]


class Chain(nn.Module):
    """A convolution with batch norm, and one without that carries its gate itself."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.bare, self.head = nn.Conv2d(6, 5, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        return self.head(F.relu(self.bare(x)).mean((2, 3)))


class Residual(nn.Module):
    """A stem and the end of a block that are added: one group with two gates."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.inner, self.outer = (nn.Conv2d(c, d, 3, padding=1) for c, d in ((3, 6), (6, 4), (4, 6)))
        self.norm0, self.norm1, self.norm2 = (nn.BatchNorm2d(c) for c in (6, 4, 6))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm0(self.stem(x)))
        y = F.relu(self.norm1(self.inner(x)))
        return self.head(F.relu(self.norm2(self.outer(y)) + x).mean((2, 3)))


class Dense(nn.Module):
    """Results joined by concatenation, with a batch norm before every use; the last one has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.second = (nn.Conv2d(c, d, 3, padding=1) for c, d in ((3, 4), (4, 4), (8, 4)))
        self.norm1, self.norm2, self.norm3 = nn.BatchNorm2d(4), nn.BatchNorm2d(8), nn.BatchNorm2d(12, affine=False)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = torch.cat([x, self.first(F.relu(self.norm1(x)))], 1)
        x = torch.cat([x, self.second(F.relu(self.norm2(x)))], 1)
        return self.head(F.relu(self.norm3(x)).mean((2, 3)))


NETWORKS = [Chain, Residual, Dense]
GATES = {
    Chain: {"stem": [("norm", 0)], "bare": [("bare", 0)]},
    Residual: {"stem": [("norm0", 0), ("norm2", 0)], "inner": [("norm1", 0)]},
    Dense: {
        "stem": [("norm1", 0), ("norm2", 0), ("norm3", 0)],
        "first": [("norm2", 4), ("norm3", 4)],
        "second": [("norm3", 8)],
    },
}
"""For every group the places of its gates: a module, and where in it the group begins."""


def make(kind: type[nn.Module], dtype: torch.dtype = torch.float64) -> nn.Module:
    """A network with factors of either sign, one that is zero and one that is tiny beside its shift."""
    torch.manual_seed(0)
    model = kind()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and module.affine:
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
            with torch.no_grad():
                module.weight[:2] = torch.tensor([0, 1e-3])
                module.bias[0] = 0
    return model.to(dtype)


def batches(count: int = 3, dtype: torch.dtype = torch.float64) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(count, 4, 3, 6, 6, generator=generator, dtype=dtype)
    return list(zip(images, torch.randint(3, (count, 4), generator=generator), strict=True))


@cache
def graph_of(kind: type[nn.Module]) -> ChannelGraph:
    """The channel graph of such a network, analysed once."""
    return analyze(make(kind), batches(1)[0][0], probe=False)


def pruner_of(model: nn.Module, **options: Any) -> Pruner:
    """Gates on one of these networks."""
    return Pruner(model, graph=graph_of(type(model)), **options)


def run(pruner: Pruner, data: list[Batch]) -> Tensor:
    """The scores after these batches; nothing is trained."""
    for images, labels in data:
        pruner.model.zero_grad()
        F.cross_entropy(pruner.model(images), labels).backward()
        pruner.observe()
    return pruner.score.end()


def add_up(model: nn.Module, graph: ChannelGraph, values: dict[str, Tensor]) -> Tensor:
    """Eq. 8: for every channel the sum over its places, as written down by hand for the network."""
    places = next(GATES[kind] for kind in NETWORKS if isinstance(model, kind))
    sums = [sum(values[name][at : at + g.size] for name, at in places[g.name]) for g in graph.groups]
    return torch.cat(sums).double()
