"""A small network of residual blocks whose branches can go, and importance that makes some of them."""

from functools import cache

import torch
from small import CLASSES, SIZE
from torch import Tensor, nn

from secateur import ChannelGraph, analyze

WEAK = ("blocks.1", "blocks.2")
"""Blocks whose branches hardly matter."""


class Block(nn.Module):
    def __init__(self, trunk: int, inner: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(trunk, inner, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(inner)
        self.second = nn.Conv2d(inner, trunk, 3, padding=1, bias=False)
        self.last = nn.BatchNorm2d(trunk)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.last(self.second(torch.relu(self.norm(self.first(x))))))


class Blocks(nn.Module):
    def __init__(self, trunk: int = 8, inner: tuple[int, ...] = (12, 8, 16)) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, trunk, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(trunk)
        self.blocks = nn.Sequential(*(Block(trunk, width) for width in inner))
        self.head = nn.Linear(trunk, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(torch.relu(self.norm(self.stem(x)))).mean((2, 3)))


@cache
def graph() -> ChannelGraph:
    return analyze(Blocks().double(), torch.rand(1, 2, SIZE, SIZE, dtype=torch.float64))


def weak(seed: int = 0) -> Blocks:
    """With branches that hardly matter."""
    torch.manual_seed(seed)
    net = Blocks().double()
    with torch.no_grad():
        for name in WEAK:
            net.get_submodule(name).last.weight.mul_(1e-3)  # pyright: ignore
    return net
