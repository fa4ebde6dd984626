"""Networks of two layers: one that makes channels, and one of many kinds that reads them."""

from typing import Any

import torch
from torch import Tensor, nn

IMAGES = 12


class Net(nn.Module):
    """A convolution, and a layer that reads its channels and gives the output."""

    def __init__(self, layer: nn.Module, size: tuple[int, ...] = (5, 4)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[len(size)](3, 6, 1)
        self.layer, self.size = layer, size
        for parameter in self.parameters():
            nn.init.normal_(parameter)
        self.double()

    def forward(self, images: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.first(images))).flatten(2).mean(2)

    def data(self, count: int = 2) -> list[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(count, IMAGES, 3, *self.size, generator=generator, dtype=torch.float64)
        return list(zip(images, torch.randint(4, (count, IMAGES), generator=generator), strict=True))


class Flat(Net):
    """A linear layer behind a flatten."""

    def forward(self, images: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.first(images)).flatten(1))


class Rows(Net):
    """A linear layer on every position, called with its input by name."""

    def forward(self, images: Tensor) -> Tensor:
        return self.layer(input=torch.tanh(self.first(images)).movedim(1, -1)).mean((1, 2))


REFITTED: dict[str, Any] = {
    "convolution": lambda: Net(nn.Conv2d(6, 4, 1)),
    "line": lambda: Net(nn.Conv1d(6, 4, 1), (20,)),
    "volume": lambda: Net(nn.Conv3d(6, 4, 1), (3, 3, 3)),
    "grouped": lambda: Net(nn.Conv2d(6, 4, 1, groups=2)),
    "transposed": lambda: Net(nn.ConvTranspose2d(6, 4, 2, stride=2)),
    "transposed and grouped": lambda: Net(nn.ConvTranspose2d(6, 4, (2, 1), stride=(2, 1), groups=2)),
    "linear": lambda: Rows(nn.Linear(6, 4)),
}
