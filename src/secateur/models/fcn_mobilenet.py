"""A fully convolutional network without any batch norm, from MobileNet-v2 with its batch norms folded.

It is here for what the paper does with FCN-32s: gates on convolutions. FCN-32s needs VGG-16's weights; those of
MobileNet-v2 are easier to come by, and become weights without batch norm by arithmetic alone.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from secateur.models.deeplab import LOW, is_mobilenet, num_channels, of_trunk, trunk
from secateur.models.vgg_cifar import scaled

HIDDEN = 256
"""Channels of `fc6`, the wide layer before the scores."""
NEAR = 64
"""Channels of the layer before the scores of the finer features."""
REACH = 6
"""Dilation of `fc6`: with features every 8 pixels it sees 104 pixels."""


class FcnMobileNet(nn.Module):
    """Scores of every class for every pixel of colour images: of the features, and of finer ones, upsampled and added.

    stride: 8, 16 or 32 pixels of the image for one of the features. `width` scales the channels of all layers but the
    scores.

    >>> FcnMobileNet(num_classes=4, width=0.25)(torch.zeros(1, 3, 40, 50)).shape
    torch.Size([1, 4, 40, 50])
    """

    def __init__(self, *, num_classes: int = 21, width: float = 1.0, stride: int = 8):
        super().__init__()
        self.input_size = (3, 360, 480)
        self.width = width
        features = trunk(width, stride)
        low, high = num_channels(features[LOW - 1]), num_channels(features[-1])
        self.features = folded(features)
        hidden, near = scaled(HIDDEN, width), scaled(NEAR, width)
        self.fc6 = nn.Conv2d(high, hidden, 3, padding=REACH, dilation=REACH)
        self.near = nn.Conv2d(low, near, 3, padding=1)
        self.score = nn.Conv2d(hidden, num_classes, 1)
        self.score_near = nn.Conv2d(near, num_classes, 1)
        for convolution in (self.fc6, self.near):
            nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
        for scores in (self.score, self.score_near):
            nn.init.zeros_(scores.weight)
        for convolution in (self.fc6, self.near, self.score, self.score_near):
            nn.init.zeros_(convolution.bias)  # pyright: ignore

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[2:]
        low = self.features[:LOW](x)
        x = self.score(F.relu(self.fc6(self.features[LOW:](low))))
        finer = self.score_near(F.relu(self.near(low)))
        x = F.interpolate(x, low.shape[2:], mode="bilinear") + finer
        return F.interpolate(x, size, mode="bilinear")

    def adapt(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Weights of torchvision's mobilenet_v2, whose batch norms are folded; all else stays as it is."""
        if not is_mobilenet(state):
            return state
        with torch.device("meta"):
            features = trunk(self.width, 32)
        theirs = {name.removeprefix("features."): tensor.double() for name, tensor in of_trunk(state).items()}
        features.load_state_dict(theirs, assign=True)
        new = {f"features.{name}": tensor for name, tensor in folded(features).state_dict().items()}
        return self.state_dict() | new


def folded(model: nn.Sequential) -> nn.Sequential:
    """The same function, in evaluation mode, without batch norms: each follows a convolution, which takes it over."""
    for module in list(model.modules()):
        if not isinstance(module, nn.Sequential):
            continue
        for place in range(len(module) - 1, 0, -1):
            norm, convolution = module[place], module[place - 1]
            if isinstance(norm, nn.BatchNorm2d) and isinstance(convolution, nn.Conv2d):
                # Its bias would not train where the convolution had none.
                module[place - 1] = fuse_conv_bn_eval(convolution.eval(), norm.eval()).train().requires_grad_(True)
                del module[place]
    return model
