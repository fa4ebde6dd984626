"""DeepLabV3+ (Chen et al. 2018) on MobileNet-v2: dilated features, a pyramid of contexts, and a small decoder."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateur.extras import import_extra
from secateur.models.vgg_cifar import scaled

LOW = 4
"""Blocks of MobileNet-v2 up to a quarter of the image's size."""
BLOCKS = 18
"""All but the convolution before its classifier."""


class Deeplab(nn.Module):
    """Scores of every class for every pixel of colour images.

    stride: 8 or 16 pixels of the image for one of the features: later strides become dilation. `width` scales the
    channels of all layers but the scores.

    >>> Deeplab(num_classes=4, width=0.25).eval()(torch.zeros(1, 3, 40, 50)).shape
    torch.Size([1, 4, 40, 50])
    """

    def __init__(self, *, num_classes: int = 21, width: float = 1.0, stride: int = 16):
        super().__init__()
        self.input_size = (3, 360, 480)
        self.features = trunk(width, stride)
        low, high = num_channels(self.features[LOW - 1]), num_channels(self.features[-1])
        hidden, narrow = scaled(128, width), scaled(48, width)
        rates = [rate * 16 // stride for rate in (6, 12, 18)]
        self.contexts = nn.ModuleList([layer(high, hidden), *(layer(high, hidden, 3, rate) for rate in rates)])
        # Without batch norm, which could not train on the one mean of one image.
        self.whole = nn.Sequential(nn.Conv2d(high, hidden, 1), nn.ReLU(inplace=True))
        self.project = layer((len(self.contexts) + 1) * hidden, hidden)
        self.detail = layer(low, narrow)
        self.decoder = nn.Sequential(layer(hidden + narrow, hidden, 3), layer(hidden, hidden, 3))
        self.score = nn.Conv2d(hidden, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[2:]
        low = self.features[:LOW](x)
        x = self.features[LOW:](low)
        whole = self.whole(x.mean((2, 3), keepdim=True)).expand(-1, -1, *x.shape[2:])
        x = self.project(torch.cat([*(context(x) for context in self.contexts), whole], 1))
        x = F.interpolate(x, low.shape[2:], mode="bilinear")
        x = self.score(self.decoder(torch.cat([x, self.detail(low)], 1)))
        return F.interpolate(x, size, mode="bilinear")

    def adapt(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Weights of torchvision's mobilenet_v2 for the features; all else stays as it is."""
        return self.state_dict() | of_trunk(state) if is_mobilenet(state) else state


def layer(before: int, channels: int, kernel: int = 1, dilation: int = 1) -> nn.Sequential:
    """A convolution that keeps the size, batch norm, and ReLU."""
    padding = dilation * (kernel // 2)
    convolution = nn.Conv2d(before, channels, kernel, padding=padding, dilation=dilation, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(channels), nn.ReLU(inplace=True))


def trunk(width: float, stride: int) -> nn.Sequential:
    """torchvision's features of MobileNet-v2, in whose later blocks dilation takes the place of stride."""
    mobilenet: Any = import_extra("torchvision.models", "vision").mobilenet_v2(weights=None, width_mult=width)
    features = mobilenet.features[:BLOCKS]
    reached = dilation = 1
    for block in features:
        spatial = [
            module for module in block.modules() if isinstance(module, nn.Conv2d) and module.kernel_size != (1, 1)
        ]
        for convolution in spatial:
            # The layer whose stride goes still sees its neighbours; those after it have to look further.
            convolution.dilation = (dilation, dilation)
            convolution.padding = (dilation, dilation)
            if convolution.stride == (1, 1):
                continue
            if reached < stride:
                reached *= 2
            else:
                convolution.stride, dilation = (1, 1), 2 * dilation
    return features


def num_channels(block: nn.Module) -> int:
    """How many channels come out of a block."""
    return [module for module in block.modules() if isinstance(module, nn.Conv2d)][-1].out_channels


def is_mobilenet(state: dict[str, Tensor]) -> bool:
    """Whether these are weights of torchvision's mobilenet_v2, with or without its classifier."""
    return "features.0.1.running_mean" in state and not any(name.startswith("score.") for name in state)


def of_trunk(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those of its weights that the features have."""
    found = [name.split(".") for name in state]
    return {".".join(n): state[".".join(n)] for n in found if n[0] == "features" and int(n[1]) < BLOCKS}
