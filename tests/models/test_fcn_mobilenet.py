"""A fully convolutional network without batch norm."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torchvision.models import mobilenet_v2

import secateur
from secateur.errors import InvalidData
from secateur.models.deeplab import trunk
from secateur.models.fcn_mobilenet import FcnMobileNet, folded
from secateur.models.weights import load_weights_


def trained(width: float) -> nn.Module:
    """torchvision's network with statistics and weights as if it was trained."""
    torch.manual_seed(0)
    model = mobilenet_v2(width_mult=width, num_classes=5)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 2)
            nn.init.normal_(module.bias)
            nn.init.normal_(module.running_mean)  # pyright: ignore
            nn.init.uniform_(module.running_var, 0.5, 2)  # pyright: ignore
    return model.eval()


@pytest.mark.parametrize("size", [(33, 97), (64, 48)])
@pytest.mark.parametrize("stride", [8, 16, 32])
def test_a_score_for_every_pixel(size: tuple[int, int], stride: int) -> None:
    model = FcnMobileNet(num_classes=4, width=0.25, stride=stride)
    assert model(torch.randn(2, 3, *size)).shape == (2, 4, *size)
    assert not any(isinstance(module, nn.modules.batchnorm._NormBase) for module in model.modules())


def test_folding_is_exact() -> None:
    theirs = trained(0.25).double()
    features = trunk(0.25, 32).double().eval()
    features.load_state_dict({k: v for k, v in theirs.features.state_dict().items() if not k.startswith("18.")})
    image = torch.randn(2, 3, 64, 48, dtype=torch.float64)
    wanted = features(image)
    assert torch.allclose(folded(features)(image), wanted, rtol=1e-12, atol=1e-12)


def test_weights_of_torchvision_are_folded(tmp_path: Path) -> None:
    theirs, model = trained(0.25), FcnMobileNet(num_classes=3, width=0.25, stride=32)
    torch.save(theirs.state_dict(), tmp_path / "weights.pth")
    before, random = model.fc6.weight.clone(), torch.get_rng_state()
    load_weights_(model, tmp_path / "weights.pth")
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(model.fc6.weight, before)
    image = torch.randn(2, 3, 64, 48)
    with torch.no_grad():
        wanted = theirs.features[:18](image)  # pyright: ignore
        found = model.features(image)
    assert float((found - wanted).abs().max() / wanted.abs().max()) < 1e-4
    torch.save(model.state_dict(), tmp_path / "own.pth")
    load_weights_(FcnMobileNet(num_classes=3, width=0.25), tmp_path / "own.pth")
    with pytest.raises(InvalidData):
        load_weights_(FcnMobileNet(width=0.5), tmp_path / "weights.pth")


def test_scores_begin_at_zero_and_everything_learns() -> None:
    model = FcnMobileNet(num_classes=3, width=0.25)
    assert not model(torch.randn(1, 3, 32, 32)).any()
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_everything_but_the_scores_can_be_cut() -> None:
    model = FcnMobileNet(num_classes=3, width=0.25).double().eval()
    for scores in (model.score, model.score_near):
        nn.init.normal_(scores.weight)
    example = torch.randn(2, 3, 32, 48, dtype=torch.float64)
    graph = secateur.analyze(model, example)
    assert set(graph.final) == {f"{name}.{kind}" for name in ("score", "score_near") for kind in ("weight", "bias")}
    assert not graph.notes
    found = secateur.verify(model, secateur.Plan.random(graph, 0.4), example)
    assert found.difference < 1e-12
