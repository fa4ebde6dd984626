"""DeepLabV3+ on MobileNet-v2."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torchvision.models import mobilenet_v2

import secateur
from secateur.errors import InvalidData
from secateur.models.deeplab import Deeplab, trunk
from secateur.models.weights import load_weights_


@pytest.mark.parametrize("size", [(33, 97), (64, 48)])
@pytest.mark.parametrize("stride", [8, 16])
def test_a_score_for_every_pixel(size: tuple[int, int], stride: int) -> None:
    model = Deeplab(num_classes=4, width=0.25, stride=stride)
    assert model(torch.randn(2, 3, *size)).shape == (2, 4, *size)


@pytest.mark.parametrize(("stride", "shape"), [(8, (8, 12)), (16, (4, 6)), (32, (2, 3))])
def test_features_are_as_dense_as_asked_for(stride: int, shape: tuple[int, int]) -> None:
    assert trunk(0.25, stride)(torch.randn(1, 3, 64, 96)).shape[2:] == shape


def test_dilation_computes_what_strides_do_at_more_places() -> None:
    dense, sparse = (trunk(0.5, stride).double().eval() for stride in (8, 32))
    dense.load_state_dict(sparse.state_dict())
    image = torch.randn(1, 3, 64, 64, dtype=torch.float64)
    with torch.no_grad():
        assert torch.equal(dense[:7](image), sparse[:7](image))
        found, wanted = dense(image)[:, :, ::4, ::4], sparse(image)
    assert wanted.std() > 0
    assert float((found - wanted).abs().max() / wanted.abs().max()) < 1e-12


def test_weights_of_torchvision(tmp_path: Path) -> None:
    """With a classifier or without; scores and decoder stay."""
    theirs, model = mobilenet_v2(width_mult=0.25), Deeplab(num_classes=3, width=0.25)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    score = model.score.weight.clone()
    torch.save(theirs.state_dict(), tmp_path / "weights.pth")
    load_weights_(model, tmp_path / "weights.pth")
    image: Tensor = torch.randn(1, 3, 64, 64)
    assert torch.equal(trunk_of(model)(image), theirs.eval().features[:4](image))
    assert torch.equal(model.score.weight, score)
    own = model.state_dict()
    torch.save(own, tmp_path / "own.pth")
    other = Deeplab(num_classes=3, width=0.25)
    load_weights_(other, tmp_path / "own.pth")
    assert all(torch.equal(tensor, own[name]) for name, tensor in other.state_dict().items())
    with pytest.raises(InvalidData):
        load_weights_(Deeplab(width=0.5), tmp_path / "weights.pth")


def trunk_of(model: Deeplab) -> torch.nn.Sequential:
    return model.eval().features[:4]


def test_everything_but_the_scores_can_be_cut() -> None:
    model = Deeplab(num_classes=3, width=0.25).double().eval()
    example = torch.randn(2, 3, 32, 48, dtype=torch.float64)
    graph = secateur.analyze(model, example)
    assert set(graph.final) == {"score.weight", "score.bias"}
    assert not graph.notes
    found = secateur.verify(model, secateur.Plan.random(graph, 0.4), example)
    assert found.difference < 1e-12
