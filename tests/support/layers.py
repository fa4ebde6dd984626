"""A network with a layer of every common kind, for the tests of cutting and comparing."""

import torch
from torch import nn

PICTURES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.PReLU(8),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.ConvTranspose2d(8, 6, 2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(24, 10),
        nn.Linear(10, 2),
    )
