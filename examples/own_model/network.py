"""Your own network: it knows nothing of Secateur."""

import torch
from torch import Tensor, nn


class Attention(nn.Module):
    """Squeeze-and-excitation: scales each channel by a function of the means of all channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(channels, max(4, channels // 4), 1)
        self.excite = nn.Conv2d(max(4, channels // 4), channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.excite(self.squeeze(x.mean((2, 3), keepdim=True)).relu()).sigmoid()


class Block(nn.Module):
    """Two convolutions, attention, and a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.attention = Attention(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(self.conv1(x)).relu()
        return (x + self.attention(self.norm2(self.conv2(y)))).relu()


class ShapeNet(nn.Module):
    """Classifies the shape in an image of 16x16 pixels."""

    def __init__(self, num_classes: int = 3, width: float = 1.0) -> None:
        super().__init__()
        narrow, wide = round(16 * width), round(32 * width)
        self.stem = nn.Sequential(
            nn.Conv2d(1, narrow, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(narrow), nn.ReLU()
        )
        self.block1 = Block(narrow)
        self.down = nn.Sequential(
            nn.Conv2d(narrow, wide, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(wide), nn.ReLU()
        )
        self.block2 = Block(wide)
        self.head = nn.Linear(2 * wide, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block2(self.down(self.block1(self.stem(x))))
        return self.head(torch.cat([x.mean((2, 3)), x.amax((2, 3))], 1))
