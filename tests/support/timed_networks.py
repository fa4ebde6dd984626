"""Small networks, and invented times of their layers."""

import random
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

from secateur import analyze
from secateur.channels.example import Example
from secateur.models.lookup import find_model
from secateur.pruning.latency import LatencyTable, LayerTable
from secateur.pruning.measure import _watch

EXAMPLE = torch.randn(1, 3, 12, 12)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(32)
        self.blocks = nn.ModuleList(self.block() for _ in range(3))
        self.fc = nn.Linear(32, 10)

    def block(self) -> nn.Sequential:
        first, second = (nn.Conv2d(32, 32, 3, padding=1, bias=False) for _ in range(2))
        return nn.Sequential(first, nn.BatchNorm2d(32), nn.ReLU(), second, nn.BatchNorm2d(32))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        for block in self.blocks:
            x = torch.relu(x + block(x))
        return self.fc(x.mean((2, 3)))


class Concatenated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 16, 3, padding=1)
        self.c, self.d = nn.Conv2d(48, 32, 3, padding=1), nn.Conv2d(80, 40, 1)
        self.depthwise = nn.Conv2d(40, 40, 3, padding=1, groups=40)
        self.fc = nn.Linear(40, 10)

    def forward(self, x: Tensor) -> Tensor:
        a = torch.relu(self.a(x))
        b = torch.cat([a, torch.relu(self.b(a))], 1)
        c = torch.cat([b, torch.relu(self.c(b))], 1)
        return self.fc(torch.relu(self.depthwise(torch.relu(self.d(c)))).mean((2, 3)))


def chain() -> nn.Module:
    widths = (3, 24, 40, 32, 48)
    layers = [
        layer for a, b in pairwise(widths) for layer in (nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())
    ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10))


def invented(model: nn.Module, example: Tensor, seed: int, stair: int) -> LatencyTable:
    """Times that rise with MACs and with memory, in stairs, as on hardware."""
    generator = random.Random(seed)
    layers = []
    for name, module, _, size in _watch(model, Example.of(example)):
        outputs, inputs = module.weight.shape[:2]
        grouped = getattr(module, "groups", 1) > 1
        area, pixels = module.weight[0, 0].numel(), size / outputs
        grids = [tuple(sorted({max(1, round(n * share / 8)) for share in range(1, 9)})) for n in (inputs, outputs)]
        grids[0] = (inputs,) if grouped else grids[0]
        factor = generator.uniform(0.7, 1.5)

        def took(a: float, b: float, area: int = area, pixels: float = pixels, factor: float = factor) -> float:
            a, b = (-(-n // stair) * stair for n in (a, b))
            return factor * (a * b * area * pixels / 1e6 + (a + b) * pixels / 5e4) + 0.01

        table = tuple(tuple(took(a, b) for b in grids[1]) for a in grids[0])
        layers.append(LayerTable(f"{name}.weight", (None if grouped else 1, 0), grids[0], grids[1], table))
    return LatencyTable("invented", tuple(layers))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "residual": Residual,
    "concatenated": Concatenated,
    "chain": chain,
    "resnet20": lambda: find_model("resnet20"),
}
GRAPHS = {name: analyze(build(), EXAMPLE, probe=False) for name, build in NETWORKS.items()}
