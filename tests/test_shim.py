"""The stand-ins for torchvision's compiled operators compute what those do."""

import importlib

import pytest
import torch

torchvision = pytest.importorskip("torchvision")


def random_boxes(num_boxes: int, width: float, height: float) -> torch.Tensor:
    corners = torch.rand(num_boxes, 2, 2, dtype=torch.double) * torch.tensor([width, height])
    return torch.cat([corners.amin(dim=1), corners.amax(dim=1)], dim=1)


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("sampling_ratio", [2, 3, 0, -1])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_roi_align_equals_the_reference_of_torchvision(aligned, sampling_ratio, scale):
    torch.manual_seed(0)
    # Torchvision ships a version in Python, compiled on use; inside the image it is what the compiled operator does.
    reference = importlib.import_module("torchvision.ops.roi_align")._roi_align.__wrapped__
    features = torch.randn(2, 5, 13, 17, dtype=torch.double)
    image = torch.randint(0, 2, (30, 1)).double()
    rois = torch.cat([image, random_boxes(30, 16 / scale, 12 / scale)], dim=1)
    arguments = (features, rois, scale, 7, 5, sampling_ratio, aligned)
    torch.testing.assert_close(torch.ops.torchvision.roi_align(*arguments), reference(*arguments))


def test_roi_align_is_zero_outside_the_image():
    rois = torch.tensor([[0.0, -9.0, 0.0, -5.0, 4.0], [0.0, 0.0, 0.0, 4.0, 4.0]])
    outside, inside = torchvision.ops.roi_align(torch.ones(1, 2, 6, 6), rois, (2, 2))
    assert outside.eq(0).all()
    assert inside.eq(1).all()


def test_nms_keeps_what_overlaps_no_better_box():
    torch.manual_seed(0)
    boxes, scores = random_boxes(80, 20, 20), torch.rand(80)
    kept: list[int] = []
    for i in scores.argsort(descending=True).tolist():
        if not kept or torchvision.ops.box_iou(boxes[i, None], boxes[kept]).max() <= 0.4:
            kept.append(i)
    assert len(kept) < len(boxes)
    assert torchvision.ops.nms(boxes, scores, 0.4).tolist() == kept


def test_nms_of_no_boxes():
    assert torchvision.ops.nms(torch.zeros(0, 4), torch.zeros(0), 0.5).tolist() == []


def test_a_detector_runs():
    torch.manual_seed(0)
    model = torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn(
        weights=None, weights_backbone=None, min_size=128, box_score_thresh=0.0
    )
    with torch.no_grad():
        (found,) = model.eval()([torch.rand(3, 128, 128)])
    assert found["boxes"].shape == (100, 4)
