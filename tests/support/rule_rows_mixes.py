"""Rows for operators that look at many elements at once: each along space, and along the channels."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from rule_rows import (
    ADDRESSED,
    EIGHT,
    FIXED,
    IN_NORM,
    MIXES,
    PAIRS,
    TIED,
    WOKEN,
    Body,
    Expected,
    Row,
    along_line,
    aten,
    calling,
    channels_last,
    coupled,
    each,
    frozen,
    gated,
    image,
    in_volume,
    inexact,
    inferring,
    picked,
    side,
)
from sandwich import parameter
from torch import Tensor, nn

IN_FORMER_TORCH = "normalized_shape_ndim" in str(torch.ops.aten._fused_rms_norm.default._schema)
TAKES_A_NUMBER = "torch 2.8 takes a number of axes instead of a shape" if IN_FORMER_TORCH else ""
BATCH_NORMS: dict[str, tuple[Any, ...]] = {
    "native_batch_norm": (False, 0.1, 1e-5),
    "cudnn_batch_norm": (False, 0.1, 1e-5),
    "miopen_batch_norm": (False, 0.1, 1e-5),
    "_native_batch_norm_legit": (False, 0.1, 1e-5),
    "_native_batch_norm_legit_no_training": (0.1, 1e-5),
    "_batch_norm_with_update": (0.1, 1e-5),
    "_batch_norm_no_update": (0.1, 1e-5),
}


def _batch_norm(name: str, *args: Any, weight: bool = True) -> Body:
    def body(m: Any, x: Tensor) -> Tensor:
        affine = (m.bn.weight, m.bn.bias) if weight else (None, None)
        return aten(name)(x, *affine, m.bn.running_mean, m.bn.running_var, *args)[0]

    return body


def _bn(**others: Any) -> dict[str, Any]:
    return {"bn": nn.BatchNorm2d(8), **others}


def _shifted(op: Callable[..., Any]) -> Body:
    """A batch norm without weight and bias, which subtracts the same number from every channel."""
    return lambda m, x: op(x, None, None, x.new_full(x.shape[1:2], 0.5), x.new_ones(x.shape[1:2]), 0.1, 1e-5)[0]


STATISTICS = {"bn.running_mean": EIGHT, "bn.running_var": EIGHT}
NORMED = coupled({"first": EIGHT, "bn": EIGHT, **STATISTICS})

NORMS = [
    *(Row(n, _batch_norm(n, *args), NORMED, parts=_bn()) for n, args in BATCH_NORMS.items()),
    *(Row(n, _batch_norm(n, True, 0.1, 1e-5), NORMED, parts=_bn(), note="training")
      for n in ("native_batch_norm", "cudnn_batch_norm", "_native_batch_norm_legit")),
    Row("native_batch_norm", lambda m, x: m.bn(m.side(x.sigmoid() * x).sigmoid()),
        coupled({"first": EIGHT}, {"side": EIGHT, "bn": EIGHT, **STATISTICS}),
        parts=_bn(**side()), note="zero again"),
    Row("native_batch_norm", _batch_norm("native_batch_norm", False, 0.1, 1e-5, weight=False),
        coupled({"first": EIGHT, **STATISTICS}), parts={"bn": nn.BatchNorm2d(8, affine=False)},
        note="no affine"),
    Row("native_batch_norm", lambda m, x: F.batch_norm(x, torch.arange(8.0).double(), torch.ones(8).double()),
        frozen(FIXED), note="constants"),
    *each("_native_batch_norm_legit_no_training", _shifted, frozen(WOKEN), note="mean"),
    *each("_batch_norm_no_update", _shifted, frozen(WOKEN), note="mean"),
    Row("native_layer_norm", lambda m, x: F.layer_norm(x, x.shape[2:])),
    Row("native_layer_norm", lambda m, x: F.layer_norm(x, (6, 6), None, m.shift), frozen(WOKEN),
        parts={"shift": parameter(6, 6)}, note="bias without weight"),
    Row("native_layer_norm", lambda m, x: m.ln(x), frozen(WOKEN), parts={"ln": nn.LayerNorm([6, 6])}, note="bias"),
    Row("native_layer_norm", channels_last(lambda m, x: m.ln(x)), inexact(MIXES), parts={"ln": nn.LayerNorm(8)},
        note="channels"),
    Row("rms_norm", inferring(lambda m, x: F.rms_norm(x, x.shape[2:]))),
    Row("rms_norm", inferring(channels_last(lambda m, x: m.rms(x))), inexact(MIXES), parts={"rms": nn.RMSNorm(8)},
        note="channels"),
    Row("_fused_rms_norm", inferring(lambda m, x: aten("_fused_rms_norm")(x, x.shape[2:], None, 1e-5)[0]),
        wrong=TAKES_A_NUMBER),
    Row("_fused_rms_norm", inferring(channels_last(lambda m, x: aten("_fused_rms_norm")(
        x, [x.shape[-1]], m.scale, 1e-5)[0])), inexact(MIXES), parts={"scale": parameter(8)}, note="channels",
        wrong=TAKES_A_NUMBER),
    Row("native_group_norm", lambda m, x: F.group_norm(x, x.shape[1])),
    Row("native_group_norm", lambda m, x: m.gn(x), coupled({"first": EIGHT, "gn": EIGHT}),
        parts={"gn": nn.GroupNorm(8, 8)}, note="each alone"),
    Row("native_group_norm", lambda m, x: m.gn(x), coupled({"first": PAIRS, "gn": PAIRS}),
        parts={"gn": nn.GroupNorm(4, 8)}, note="groups"),
    Row("native_group_norm", lambda m, x: m.gn(x), inexact(MIXES), parts={"gn": nn.GroupNorm(1, 8)},
        note="channels"),
]  # fmt: skip

ALONG = "_safe_softmax cumprod cumprod_ logcumsumexp"
SOFTMAX = "_softmax _log_softmax"
CUMSUM = "cumsum cumsum_"

ALONGS = [
    *each(ALONG, lambda op: lambda m, x: op(x, 2), frozen(WOKEN)),
    *each(SOFTMAX, lambda op: lambda m, x: op(x, 2, False), frozen(WOKEN)),
    *each(CUMSUM, lambda op: lambda m, x: op(x, 2)),
    *each(f"{ALONG} {CUMSUM}", lambda op: lambda m, x: x * op(x.clone(), 2), note="gate"),
    *each(SOFTMAX, lambda op: lambda m, x: x * op(x, 2, False), note="gate"),
    *each(f"{ALONG} {CUMSUM}", lambda op: lambda m, x: x * op(x.clone(), 1), inexact(MIXES), note="channels"),
    *each(SOFTMAX, lambda op: lambda m, x: x * op(x, 1, False), inexact(MIXES), note="channels"),
]

KEEPING = "mean amax amin prod median mode var std var_mean std_mean max min aminmax"
WAKING = "logsumexp argmax argmin all any"
INEXACT = ("mean", "var", "std", "var_mean", "std_mean")


def _reduced(name: str, dim: int) -> Body:
    """Along one axis, which stays with size 1; of two results the first."""

    def body(m: Any, x: Tensor) -> Tensor:
        found = getattr(torch, name)(x, dim=dim, keepdim=True)
        return (found if isinstance(found, Tensor) else found[0]).double()

    return body


REDUCTIONS = [
    *(Row(name, _reduced(name, 2)) for name in KEEPING.split()),
    *(Row(name, _reduced(name, 2), frozen(WOKEN)) for name in WAKING.split()),
    *(Row(name, gated(_reduced(name, 2)), note="gate") for name in f"{KEEPING} {WAKING}".split()),
    *(Row(name, gated(_reduced(name, 1)), inexact(MIXES) if name in INEXACT else frozen(MIXES), note="channels")
      for name in f"{KEEPING} {WAKING}".split()),
    *each("mean prod max min median any all", lambda op: lambda m, x: x * op(x), frozen(MIXES), note="everything"),
    *each("max min", lambda op: inferring(lambda m, x: op(x, m.side(x))), TIED, parts=side(), note="two"),
    Row("median", gated(picked(lambda m, x: x.median(2, keepdim=True), 1)), note="places"),
    Row("topk", gated(lambda m, x: x.topk(6, 2)[0])),
    Row("topk", lambda m, x: x.topk(6, 2)[0], frozen(WOKEN), note="alone"),
    *each("sort cummax cummin", lambda op: lambda m, x: x * op(x, 2)[0]),
    *each("sort cummax cummin", lambda op: lambda m, x: op(x, 2)[0], frozen(WOKEN), note="alone"),
    *each("sort cummax cummin", lambda op: lambda m, x: x * op(x, 1)[0], frozen(MIXES), note="channels"),
    Row("topk", lambda m, x: x.topk(8, 1)[0], frozen(MIXES), note="channels"),
    Row("kthvalue", gated(lambda m, x: x.kthvalue(2, 2, keepdim=True)[0])),
    Row("kthvalue", gated(lambda m, x: x.kthvalue(2, 2)[0][:, :, None]), frozen(MIXES), note="axis lost"),
    Row("kthvalue", gated(lambda m, x: x.kthvalue(2, 1, keepdim=True)[0]), frozen(MIXES), note="channels"),
]  # fmt: skip

PLANE: dict[str, tuple[Any, ...]] = {
    "avg_pool2d": (2,), "_adaptive_avg_pool2d": ((2, 3),), "mkldnn_max_pool2d": ((2, 2),),
    "upsample_nearest2d": ((7, 9),), "_upsample_nearest_exact2d": ((7, 9),), "upsample_bilinear2d": ((7, 9), False),
    "upsample_bicubic2d": ((7, 9), False), "_upsample_bilinear2d_aa": ((4, 4), False),
    "_upsample_bicubic2d_aa": ((4, 4), False), "reflection_pad2d": ((1, 2, 0, 1),),
    "replication_pad2d": ((1, 2, 0, 1),), "max_pool2d": (2,), "adaptive_avg_pool2d": ((2, 3),),
    "max_pool2d_with_indices": (2,), "adaptive_max_pool2d": ((2, 3),),
}  # fmt: skip
LINE: dict[str, tuple[Any, ...]] = {
    "avg_pool1d": (2,), "max_pool1d": (2,), "max_pool1d_with_indices": (2,), "adaptive_avg_pool1d": (3,),
    "adaptive_max_pool1d": (3,), "upsample_nearest1d": ((40,),), "_upsample_nearest_exact1d": ((40,),),
    "upsample_linear1d": ((40,), False), "reflection_pad1d": ((1, 2),), "replication_pad1d": ((1, 2),),
}  # fmt: skip
VOLUME: dict[str, tuple[Any, ...]] = {
    "avg_pool3d": (2,), "max_pool3d": (2,), "max_pool3d_with_indices": (2,), "_adaptive_avg_pool3d": ((1, 2, 3),),
    "adaptive_avg_pool3d": ((1, 2, 3),), "adaptive_max_pool3d": ((1, 2, 3),), "upsample_nearest3d": ((3, 4, 7),),
    "_upsample_nearest_exact3d": ((3, 4, 7),), "upsample_trilinear3d": ((3, 4, 7), False),
    "reflection_pad3d": ((1, 2, 0, 1, 1, 0),), "replication_pad3d": ((1, 2, 0, 1, 1, 0),),
}  # fmt: skip
PAIRED = ("with_indices", "adaptive_max_pool", "fractional")
COMPOSITE = ("max_pool1d", "max_pool2d", "max_pool3d", "max_pool1d_with_indices", "adaptive_avg_pool1d",
             "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d", "avg_pool1d")  # fmt: skip


def _spatial(name: str, *args: Any) -> Body:
    body = calling(name, *args)
    body = picked(body) if any(word in name for word in PAIRED) else body
    return inferring(body) if name in COMPOSITE else body


GRID = torch.linspace(-1, 1, 2 * 4 * 4 * 2).double().view(2, 4, 4, 2)
GRID_3D = torch.linspace(-1, 1, 2 * 8 * 3).double().view(2, 2, 2, 2, 3)
REGIONS = torch.tensor([[0.0, 1, 1, 4, 4], [1, 0, 0, 5, 5]]).double()

SPACE = [
    *(Row(n, _spatial(n, *args)) for n, args in PLANE.items()),
    *(Row(n, along_line(_spatial(n, *args))) for n, args in LINE.items()),
    *(Row(n, in_volume(_spatial(n, *args))) for n, args in VOLUME.items()),
    Row("max_pool2d_with_indices", gated(lambda m, x: F.max_pool2d(x, 3, 1, 1, return_indices=True)[1]),
        note="indices"),
    Row("max_pool2d_with_indices", lambda m, x: F.max_pool2d(x, 2, return_indices=True)[1].double(), frozen(WOKEN),
        note="indices alone"),
    Row("avg_pool2d", channels_last(lambda m, x: F.avg_pool2d(x, 3, 1, 1)), frozen(MIXES), note="channels"),
    Row("grid_sampler_2d", lambda m, x: F.grid_sample(x, GRID, align_corners=False)),
    Row("grid_sampler_2d", lambda m, x: F.grid_sample(x, m.flow(x).tanh().movedim(1, -1), align_corners=False),
        Expected([{"first": EIGHT}], {"flow": ADDRESSED}), parts={"flow": nn.Conv2d(8, 2, 1)}, note="flow"),
    Row("grid_sampler_3d", in_volume(lambda m, x: F.grid_sample(x, GRID_3D, align_corners=False))),
    Row("cudnn_grid_sampler", lambda m, x: aten("cudnn_grid_sampler")(x, GRID)),
    Row("fractional_max_pool2d", lambda m, x: F.fractional_max_pool2d(
        x, 2, (3, 3), _random_samples=x.new_full((2, x.shape[1], 2), 0.5))),
    Row("fractional_max_pool3d", in_volume(lambda m, x: F.fractional_max_pool3d(
        x, (1, 2, 2), (1, 1, 2), _random_samples=x.new_full((2, x.shape[1], 3), 0.5)))),
    Row("max_unpool2d", lambda m, x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), (2, 2))),
    Row("max_unpool2d", lambda m, x: F.max_unpool2d(
        m.side(F.avg_pool2d(x, 2)), F.max_pool2d(x, 2, return_indices=True)[1], (2, 2)), TIED, parts=side(),
        note="another's indices"),
    Row("max_unpool3d", in_volume(lambda m, x: F.max_unpool3d(
        *F.max_pool3d(x, (1, 3, 3), return_indices=True), (1, 3, 3)))),
    Row("_fft_r2c", lambda m, x: torch.fft.rfft2(x).abs()),
    Row("_fft_c2c", lambda m, x: torch.fft.fft2(x.to(torch.complex128)).abs()),
    Row("_fft_c2r", lambda m, x: torch.fft.irfft2(torch.fft.rfft2(x), s=(6, 6))),
    Row("_fft_r2c", lambda m, x: torch.fft.fft(x, dim=1).abs(), frozen(MIXES), note="channels"),
    Row("_fft_c2c", lambda m, x: torch.fft.fft(x.to(torch.complex128), dim=1).abs(), frozen(MIXES), note="channels"),
    Row("_fft_c2r", lambda m, x: torch.fft.irfft(torch.complex(x, x), dim=1), frozen(MIXES), inner=14,
        note="channels"),
    Row("torchvision::roi_align", lambda m, x: torch.ops.torchvision.roi_align(x, REGIONS, 1.0, 2, 2, 1, True)),
    Row("torchvision::nms", lambda m, x: x * torch.ops.torchvision.nms(
        x.mean((0, 2, 3))[:, None] + torch.arange(4.0), x.mean((0, 2, 3)), 0.5).sum(), frozen(ADDRESSED)),
]  # fmt: skip

ATTENTION: dict[str, tuple[Any, ...]] = {
    "_scaled_dot_product_flash_attention": (),
    "_scaled_dot_product_efficient_attention": (None, False),
    "_scaled_dot_product_cudnn_attention": (None, False),
    "_scaled_dot_product_fused_attention_overrideable": (),
}


def _attention(attend: Body) -> Body:
    """One head; the channels of the values run along."""

    def body(m: Any, x: Tensor) -> Tensor:
        query, key, value = (layer(x).flatten(2).mT[:, None].contiguous() for layer in (m.query, m.key, m.value))
        return attend(query, key, value)[:, 0].mT.unflatten(2, (6, 6))

    return body


COMPARES = Expected([{"first": EIGHT}, {"value": EIGHT}], {"query": MIXES, "key": MIXES})


def _three() -> dict[str, nn.Module]:
    return {part: nn.Conv2d(8, 8, 1) for part in ("query", "key", "value")}


CPU = "_scaled_dot_product_flash_attention_for_cpu"
ATTENTIONS = [
    # On a CPU the operator wants values as wide as queries; torch's function has another way for those that are not.
    Row(CPU, _attention(F.scaled_dot_product_attention), COMPARES, parts=_three()),
    *(Row(name, _attention(lambda *given, name=name, args=args: aten(name)(*given, *args)[0]), COMPARES, parts=_three())
      for name, args in ATTENTION.items()),
    Row(CPU, lambda m, x: image(F.scaled_dot_product_attention(
        m.tokens.expand(2, 1, 8, 36), m.tokens.expand(2, 1, 8, 36), x.flatten(2)[:, None])[:, 0]), frozen(MIXES),
        parts={"tokens": parameter(1, 1, 8, 36)}, note="channels as tokens"),
    Row(CPU, lambda m, x: F.scaled_dot_product_attention(
        *(m.tokens.expand(2, 8, 6, 5) for _ in range(3)), attn_mask=x).movedim(1, 3), frozen(None), inner=6,
        parts={"tokens": parameter(1, 1, 6, 5)}, note="mask"),
]  # fmt: skip


def _directions(*shape: int) -> dict[str, Any]:
    return {"v": parameter(8, 8, *shape), "g": parameter(8, 1, *shape)}


OUTER = Expected([{"g": EIGHT}], {"first": IN_NORM}, inexact=True)
WEIGHTS = [
    Row("_weight_norm_interface", lambda m, x: F.conv2d(x, torch._weight_norm(m.v, m.g, 0)), OUTER,
        parts=_directions(1, 1)),
    Row("_weight_norm_interface", lambda m, x: F.conv_transpose2d(x, torch._weight_norm(m.v, m.g, 0)),
        parts=_directions(1, 1), note="transposed"),
    Row("_weight_norm_interface", channels_last(lambda m, x: F.linear(x, torch._weight_norm(m.v, m.g.mT, 1))),
        parts=_directions(), note="last axis"),
    Row("_weight_norm_interface", lambda m, x: F.conv2d(x, torch._weight_norm(m.v, m.g.new_ones(8, 1, 1, 1), 0)),
        frozen(IN_NORM), parts=_directions(1, 1), note="constants"),
    Row("renorm", lambda m, x: F.conv2d(x, m.v.renorm(2, 0, 1.0)), Expected(
        [{"v": EIGHT}], {"first": IN_NORM}, inexact=True), parts=_directions(1, 1)),
    Row("renorm", lambda m, x: F.conv_transpose2d(x, m.v.renorm(2, 0, 1.0)), parts=_directions(1, 1),
        note="transposed"),
    Row("renorm", lambda m, x: x.renorm(2, 1, 1.0), note="data"),
    Row("renorm", lambda m, x: x.renorm(2, 0, 1.0), inexact(MIXES), note="channels"),
]  # fmt: skip

ROWS = [*WEIGHTS, *NORMS, *ALONGS, *REDUCTIONS, *SPACE, *ATTENTIONS]
