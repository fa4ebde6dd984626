"""ResNets for 32x32 images (He et al. 2015, section 4.2): three stages of 16, 32 and 64 channels."""

import re
from functools import partial
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from secateur.errors import InvalidSetting
from secateur.models.vgg_cifar import scaled

Shortcut = Literal["conv", "pad"]


class PadShortcut(nn.Module):
    """Halves the image by slicing and pads the new channels with zeros; has no parameters."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        added = out_channels - in_channels
        self.before, self.after = added // 2, added - added // 2

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.before, self.after))


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut around them."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, shortcut: Shortcut):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        if stride == 1:
            self.shortcut = nn.Identity()
        elif shortcut == "conv":
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
            )
        else:
            self.shortcut = PadShortcut(in_channels, out_channels)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class CifarResNet(nn.Module):
    """A ResNet of depth 6n + 2 for CIFAR.

    `width` scales the channels of every stage. `shortcut` connects stages of different size: "conv" is a 1x1
    convolution with batch norm, "pad" slicing and zero-padding without parameters.

    >>> sum(parameter.numel() for parameter in resnet56().parameters())
    855770
    """

    def __init__(
        self,
        depth: int,
        *,
        num_classes: int = 10,
        width: float = 1.0,
        shortcut: Shortcut = "conv",
        in_channels: int = 3,
    ):
        super().__init__()
        self.input_size = (in_channels, 32, 32)
        if depth < 8 or (depth - 2) % 6:
            raise InvalidSetting("depth is out of range", got=depth, wanted="6n + 2: 8, 14, 20, ...")
        if shortcut not in ("conv", "pad"):
            raise InvalidSetting("there is no such shortcut", got=repr(shortcut), wanted="'conv' or 'pad'")
        channels = scaled(16, width)
        self.conv1 = nn.Conv2d(in_channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        num_blocks = (depth - 2) // 6
        self.stage1 = _stage(channels, channels, num_blocks, shortcut)
        self.stage2 = _stage(channels, 2 * channels, num_blocks, shortcut)
        self.stage3 = _stage(2 * channels, 4 * channels, num_blocks, shortcut)
        self.fc = nn.Linear(4 * channels, num_classes)
        self.initialize_()

    def initialize_(self) -> None:
        """Draw new filters."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.stage3(self.stage2(self.stage1(x)))
        return self.fc(x.mean(dim=(2, 3)))

    def adapt(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Weights of the Gate Decorator paper's authors in the names of this network."""
        return {re.sub("^layer", "stage", re.sub("^linear", "fc", name)): tensor for name, tensor in state.items()}


def _stage(in_channels: int, out_channels: int, num_blocks: int, shortcut: Shortcut) -> nn.Sequential:
    stride = 1 if in_channels == out_channels else 2
    first = Block(in_channels, out_channels, stride, shortcut)
    return nn.Sequential(first, *(Block(out_channels, out_channels, 1, shortcut) for _ in range(1, num_blocks)))


resnet14 = partial(CifarResNet, 14)
resnet20 = partial(CifarResNet, 20)
resnet32 = partial(CifarResNet, 32)
resnet44 = partial(CifarResNet, 44)
resnet56 = partial(CifarResNet, 56)
resnet110 = partial(CifarResNet, 110)
