import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from secateur.errors import InvalidSetting
from secateur.models.resnet_cifar import CifarResNet, resnet20, resnet56, resnet110


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def count_macs(model: nn.Module) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.randn(1, 3, 32, 32))
    return counter.get_total_flops() // 2


@pytest.mark.parametrize(
    ("shortcut", "params", "macs"), [("conv", 855_770, 125_747_840), ("pad", 853_018, 125_485_696)]
)
def test_resnet56_has_the_size_of_the_paper(shortcut, params, macs):
    assert (count_parameters(resnet56(shortcut=shortcut)), count_macs(resnet56(shortcut=shortcut))) == (params, macs)


def test_depth_is_the_number_of_weighted_layers():
    layers = [m for m in resnet110(shortcut="pad").modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len(layers) == 110


@pytest.mark.parametrize("shortcut", ["conv", "pad"])
@pytest.mark.parametrize("width", [0.3, 1.0, 2.0])
def test_any_width_and_number_of_classes(shortcut, width):
    model = resnet20(num_classes=7, width=width, shortcut=shortcut)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 7)
    assert model.fc.in_features == 4 * round(16 * width)


def test_wrong_settings_are_refused():
    for build in (lambda: CifarResNet(21), lambda: resnet20(shortcut="add")):
        with pytest.raises(InvalidSetting):
            build()
