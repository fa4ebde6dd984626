"""The operators that detectors of torchvision need, in plain torch."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

LIBRARY = torch.library.Library("torchvision", "FRAGMENT")


def declare_if_missing(torchvision_init: str) -> bool:
    """Declare the operators unless torchvision's own compiled ones load; say whether they were missing."""
    try:
        torch.ops.load_library(Path(torchvision_init).with_name("_C.so"))
    except OSError:
        pass
    else:
        return False
    LIBRARY.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    LIBRARY.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    LIBRARY.define(
        "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width,"
        " int sampling_ratio, bool aligned) -> Tensor"
    )
    # Opaque to dispatch modes, as the compiled operators are.
    for name, body in (("nms", nms), ("qnms", nms), ("roi_align", roi_align)):
        LIBRARY.impl(name, body, "CompositeExplicitAutograd")
    torch.library.register_autograd("torchvision::roi_align", _backward, setup_context=_keep, lib=LIBRARY)
    return True


def announce() -> None:
    """Tell torchvision that its operators exist.

    Only after its import: until then it would register kernels for the operators that are not declared here.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("torchvision.") and hasattr(module, "_has_ops"):
            module._has_ops = lambda: True


def nms(dets: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Indices of the boxes (x1, y1, x2, y2) that overlap no kept box of higher score, best first."""
    order = scores.argsort(descending=True, stable=True)
    top_left, bottom_right = dets[order].split(2, dim=1)
    area = (bottom_right - top_left).prod(dim=1)
    kept = torch.ones_like(order, dtype=torch.bool)
    for i in range(len(order)):
        if not kept[i]:
            continue
        later = slice(i + 1, None)
        overlap = torch.minimum(bottom_right[i], bottom_right[later]) - torch.maximum(top_left[i], top_left[later])
        intersection = overlap.clamp(min=0).prod(dim=1)
        kept[later] &= intersection / (area[i] + area[later] - intersection) <= iou_threshold
    return order[kept]


def roi_align(
    input: Tensor,
    rois: Tensor,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    sampling_ratio: int,
    aligned: bool,
) -> Tensor:
    """Each box (image, x1, y1, x2, y2) as a grid of bins, each the mean of bilinear samples.

    A bin holds `sampling_ratio` samples a side, or where that is not positive as many as it has pixels.
    """
    image = rois[:, 0].long()
    x1, y1, x2, y2 = (rois[:, 1:] * spatial_scale - (0.5 if aligned else 0.0)).unbind(dim=1)
    width, height = x2 - x1, y2 - y1
    if not aligned:
        width, height = width.clamp(min=1), height.clamp(min=1)
    if sampling_ratio > 0:
        samples = torch.full((len(rois), 2), sampling_ratio, device=rois.device)
    else:
        samples = torch.stack([height / pooled_height, width / pooled_width], dim=1).ceil().long().clamp(min=0)

    output = input.new_zeros(len(rois), input.shape[1], pooled_height, pooled_width)
    # Boxes of one image with equally many samples go together.
    for key in torch.cat([image[:, None], samples], dim=1).unique(dim=0):
        index, rows, columns = key.tolist()
        if rows == 0 or columns == 0:
            continue
        chosen = ((image == index) & (samples == key[1:]).all(dim=1)).nonzero().flatten()
        y, y_inside = _positions(y1[chosen], height[chosen], pooled_height, rows, input.shape[2])
        x, x_inside = _positions(x1[chosen], width[chosen], pooled_width, columns, input.shape[3])
        grid = torch.stack([x[:, None, :].expand(-1, y.shape[1], -1), y[:, :, None].expand(-1, -1, x.shape[1])], dim=-1)
        sampled = F.grid_sample(
            input[index : index + 1], grid.reshape(1, -1, x.shape[1], 2), padding_mode="border", align_corners=True
        )
        sampled = sampled.view(-1, len(chosen), y.shape[1], x.shape[1]).transpose(0, 1)
        sampled = sampled * (y_inside[:, None, :, None] & x_inside[:, None, None, :])
        bins = sampled.reshape(len(chosen), -1, pooled_height, rows, pooled_width, columns)
        output[chosen] = bins.mean(dim=(3, 5))
    return output


def _keep(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.others = inputs[2:]


def _backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient of the input; boxes have none."""
    input, rois = ctx.saved_tensors
    with torch.enable_grad():
        input = input.detach().requires_grad_()
        (found,) = torch.autograd.grad(roi_align(input, rois, *ctx.others), input, gradient)
    return found, *[None] * 6


def _positions(start: Tensor, length: Tensor, bins: int, samples: int, size: int) -> tuple[Tensor, Tensor]:
    """Where to sample along one side, scaled so that [-1, 1] spans the image, and which places lie inside it."""
    steps = (torch.arange(bins * samples, dtype=start.dtype, device=start.device) + 0.5) / (bins * samples)
    pixels = start[:, None] + length[:, None] * steps
    return pixels / max(size - 1, 1) * 2 - 1, (pixels >= -1) & (pixels <= size)
