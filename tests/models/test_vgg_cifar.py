import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import secateur
from secateur.models.vgg_cifar import CifarVgg

# Input channels, output channels and pixels of each convolution, by hand.
CONVOLUTIONS = [
    (3, 64, 32 * 32),
    (64, 64, 32 * 32),
    (64, 128, 16 * 16),
    (128, 128, 16 * 16),
    (128, 256, 8 * 8),
    (256, 256, 8 * 8),
    (256, 256, 8 * 8),
    (256, 512, 4 * 4),
    (512, 512, 4 * 4),
    (512, 512, 4 * 4),
    (512, 512, 2 * 2),
    (512, 512, 2 * 2),
    (512, 512, 2 * 2),
]


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_size():
    weights = sum(9 * before * after for before, after, _ in CONVOLUTIONS)
    batch_norms = 2 * sum(after for _, after, _ in CONVOLUTIONS)
    assert (weights, batch_norms) == (14_710_464, 8_448)
    assert count_parameters(CifarVgg()) == weights + batch_norms + 512 * 10 + 10
    assert count_parameters(CifarVgg(num_classes=100)) == weights + batch_norms + 512 * 100 + 100


def test_multiply_adds():
    macs = sum(9 * before * after * pixels for before, after, pixels in CONVOLUTIONS) + 512 * 10
    assert macs == 313_201_664
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        CifarVgg()(torch.randn(1, 3, 32, 32))
    assert counter.get_total_flops() // 2 == macs


def test_at_half_the_width_it_is_the_narrower_network_of_the_paper():
    full, half = CifarVgg(num_classes=100), CifarVgg(num_classes=100, width=0.5)
    assert round(count_parameters(half) / 1e6, 1) == 3.7
    image = torch.randn(1, 3, 32, 32)
    macs = [secateur.analyze(model, image, probe=False).macs for model in (half, full)]
    assert macs[0] / macs[1] == pytest.approx(0.25, abs=0.002)


@pytest.mark.parametrize("width", [0.01, 0.3, 1.0])
def test_any_width_number_of_classes_and_kind_of_image(width):
    model = CifarVgg(num_classes=7, width=width, in_channels=1)
    assert model(torch.randn(2, 1, 32, 32)).shape == (2, 7)
    assert model.fc.in_features == max(1, round(512 * width))
    assert model.input_size == (1, 32, 32)


def test_every_convolution_is_a_group_of_its_own():
    model, image = CifarVgg(width=0.25), torch.randn(2, 3, 32, 32)
    graph = secateur.analyze(model, image)
    assert [group.size for group in graph.groups] == [after // 4 for _, after, _ in CONVOLUTIONS]
    assert all(group.exact for group in graph.groups)
    assert [frozen.name for frozen in graph.frozen] == ["fc"]
    assert secateur.verify(model, secateur.Plan.random(graph, 0.5), image).agrees
