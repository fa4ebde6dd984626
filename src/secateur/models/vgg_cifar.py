"""VGG-16 for 32x32 images without hidden linear layers, the VGG-16-M of the Gate Decorator paper."""

from torch import Tensor, nn

STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
"""Channels of the convolutions; the image is halved between two stages."""


def scaled(channels: int, width: float) -> int:
    """So many times the channels, at least one."""
    return max(1, round(channels * width))


class CifarVgg(nn.Module):
    """Thirteen 3x3 convolutions with batch norm, the mean over the image, and one linear layer.

    `width` scales the channels of every convolution.

    >>> sum(parameter.numel() for parameter in CifarVgg(num_classes=100, width=0.5).parameters())
    3707972
    """

    def __init__(self, *, num_classes: int = 10, width: float = 1.0, in_channels: int = 3):
        super().__init__()
        self.input_size = (in_channels, 32, 32)
        layers: list[nn.Module] = []
        before = in_channels
        for number, stage in enumerate(STAGES):
            if number:
                layers.append(nn.MaxPool2d(2))
            for full in stage:
                channels = scaled(full, width)
                layers.append(nn.Conv2d(before, channels, 3, padding=1, bias=False))
                layers.append(nn.BatchNorm2d(channels))
                layers.append(nn.ReLU(inplace=True))
                before = channels
        self.features = nn.Sequential(*layers)
        self.fc = nn.Linear(before, num_classes)
        self.initialize_()

    def initialize_(self) -> None:
        """Draw new filters."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.features(x).mean(dim=(2, 3)))

    def adapt(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Weights of torchvision's vgg16_bn in the names of this network; the linear layer stays as it is.

        Its convolutions have biases, which the batch norms after them subtract: here they go into the means.
        """
        if "features.0.bias" not in state:
            return state
        own = {name: tensor for name, tensor in self.state_dict().items() if name.startswith("fc")}
        for name, tensor in state.items():
            _, number, rest = f"{name}..".split(".", 2)
            if not name.startswith("features") or (f"features.{number}.running_mean" not in state and "bias" in rest):
                continue
            own[name] = tensor - state[f"features.{int(number) - 1}.bias"] if "running_mean" in rest else tensor
        return own
