"""FCN-32s (Long et al. 2015): VGG-16 without batch norm made fully convolutional, and its scores upsampled 32 times."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateur.models.vgg_cifar import STAGES, scaled

HIDDEN = 4096
"""Channels of the two layers that were linear in VGG-16."""
MARGIN = 100
"""Zeros around the image, so that the smallest image still fills the 7x7 filters."""
OFFSET = 19
"""Where the image begins in the upsampled scores, given that margin."""


class Fcn32s(nn.Module):
    """Scores of every class for every pixel.

    The upsampling is a transposed convolution with fixed, bilinear weights. `width` scales the channels of every
    convolution but the scores.

    >>> Fcn32s(width=1 / 16)(torch.zeros(1, 3, 40, 50)).shape
    torch.Size([1, 21, 40, 50])
    """

    def __init__(self, *, num_classes: int = 21, width: float = 1.0, in_channels: int = 3):
        super().__init__()
        self.input_size = (in_channels, 224, 224)
        layers: list[nn.Module] = []
        before = in_channels
        for stage in STAGES:
            for full in stage:
                channels = scaled(full, width)
                layers += [nn.Conv2d(before, channels, 3, padding=1), nn.ReLU(inplace=True)]
                before = channels
            layers.append(nn.MaxPool2d(2, ceil_mode=True))
        layers[0].padding = (MARGIN, MARGIN)  # pyright: ignore
        hidden = scaled(HIDDEN, width)
        self.features = nn.Sequential(*layers)
        self.fc6 = nn.Conv2d(before, hidden, 7)
        self.fc7 = nn.Conv2d(hidden, hidden, 1)
        self.dropout = nn.Dropout2d()
        self.score = nn.Conv2d(hidden, num_classes, 1)
        self.register_buffer("upsampling", bilinear(64).expand(num_classes, 1, 64, 64).clone())
        self.initialize_()

    def initialize_(self) -> None:
        """Draw new filters; the scores start at zero."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                nn.init.zeros_(module.bias)  # pyright: ignore
        nn.init.zeros_(self.score.weight)

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[2:]
        x = self.features(x)
        x = self.dropout(F.relu(self.fc6(x)))
        x = self.dropout(F.relu(self.fc7(x)))
        x = self.score(x)
        x = F.conv_transpose2d(x, self.upsampling, stride=32, groups=self.score.out_channels)  # pyright: ignore
        return x[:, :, OFFSET : OFFSET + height, OFFSET : OFFSET + width]

    def adapt(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Weights of torchvision's vgg16 in the names of this network; the scores stay as they are."""
        if "classifier.0.weight" not in state:
            return state
        linear = {"classifier.0": (self.fc6, "fc6"), "classifier.3": (self.fc7, "fc7")}
        own = {name: tensor for name, tensor in self.state_dict().items() if name.startswith(("score", "upsampling"))}
        for theirs, (layer, ours) in linear.items():
            weight = state[f"{theirs}.weight"]
            if weight.numel() == layer.weight.numel():
                weight = weight.reshape(layer.weight.shape)
            own |= {f"{ours}.weight": weight, f"{ours}.bias": state[f"{theirs}.bias"]}
        return own | {name: tensor for name, tensor in state.items() if name.startswith("features")}


def bilinear(size: int) -> Tensor:
    """Weights of a square transposed convolution that interpolates between pixels half its size apart.

    >>> bilinear(4)[0].tolist()
    [0.0625, 0.1875, 0.1875, 0.0625]
    """
    half = size // 2
    ramp = 1 - (torch.arange(size) + 0.5 - half).abs() / half
    return ramp[:, None] * ramp
