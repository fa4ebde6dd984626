"""FCN-32s."""

import pytest
import torch
import torch.nn.functional as F

import secateur
from secateur.models.fcn import Fcn32s, bilinear


@pytest.mark.parametrize("size", [(1, 1), (40, 50), (33, 97)])
def test_a_score_for_every_pixel(size):
    assert Fcn32s(num_classes=4, width=1 / 32)(torch.randn(2, 3, *size)).shape == (2, 4, *size)


def test_as_large_as_published():
    """VGG-16's 138,357,544 parameters with 21 classes instead of 1,000."""
    with torch.device("meta"):
        model, half = Fcn32s(), Fcn32s(width=0.5)
    assert sum(p.numel() for p in model.parameters()) == 138_357_544 - 4097 * (1000 - 21)
    assert half.fc6.weight.shape == (2048, 256, 7, 7)


def test_upsampling_is_bilinear_and_does_not_train():
    model = Fcn32s(num_classes=3, width=1 / 32)
    assert "upsampling" not in dict(model.named_parameters())
    scores = torch.randn(1, 3, 6, 5)
    upsampled = F.conv_transpose2d(scores, model.upsampling, stride=32, groups=3)[:, :, 16:-16, 16:-16]
    # Away from the border, where torch repeats the outermost pixels, both interpolate alike.
    other = F.interpolate(scores, scale_factor=32, mode="bilinear")
    assert torch.allclose(upsampled[:, :, 16:-16, 16:-16], other[:, :, 16:-16, 16:-16], atol=1e-5)
    assert torch.allclose(bilinear(64).sum(), torch.tensor(32.0**2))


def test_everything_but_the_scores_can_be_cut():
    model = Fcn32s(num_classes=3, width=1 / 16).eval()
    torch.nn.init.normal_(model.score.weight)
    example = torch.randn(1, 3, 32, 32)
    graph = secateur.analyze(model, example)
    assert len(graph.groups) == 15
    assert set(graph.final) == {"score.weight", "score.bias"}
    secateur.verify(model, secateur.Plan.random(graph, 0.4), example)
