"""Operators that look at many elements at once.

Along space they treat each channel alone and only carry labels. Along an axis of channels they see all of them:
removing one is then not the same as zeroing it.
"""

from __future__ import annotations

from itertools import chain
from math import prod

from torch import Tensor

from secateur.channels.labels import Role, any_alive, is_alive, with_alive
from secateur.channels.reasons import Kind
from secateur.channels.rules.call import UNIFORM, Axis, Call, all_alive, positive
from secateur.channels.rules.contractions import reduced, reduced_dims
from secateur.channels.rules.registry import rule

WITHOUT_BATCH = ("_native_batch_norm_legit_no_training", "_batch_norm_no_update")
"""Batch norms that use running statistics."""


@rule("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_native_batch_norm_legit")
@rule("_native_batch_norm_legit_no_training", "_batch_norm_with_update", "_batch_norm_no_update")
def batch_norm(call: Call) -> None:
    """Each channel alone. With weight and bias at zero its output is zero, whatever comes in."""
    data = call["input"]
    axes = call.axes(data)
    codes = axes[1]
    per_channel = [t for t in call.tensors if t is not data and t.dim() == 1]
    affine = [call[name] for name in ("weight", "bias")]
    batch_statistics = bool(call["training"]) if call.has("training") else call.name not in WITHOUT_BATCH
    if isinstance(codes, Tensor):
        for tensor in per_channel:
            axis = call.axes(tensor)[0]
            if isinstance(axis, Tensor):
                call.tie(codes, axis)
            elif axis is None:
                call.meet_fixed(codes, tensor)
        mean = None if batch_statistics else call["running_mean"]
        axes[1] = _scaled(call, _shifted(call, codes, mean), *affine)
    else:
        axes[1] = None
        for tensor in per_channel:
            call.freeze_axes(tensor, Kind.FIXED_TENSOR)
    for dim, axis in enumerate(axes):
        if dim != 1:
            if isinstance(axis, Tensor):
                call.use_batch()
            seen = call.mix(axis) if batch_statistics else axis
            axes[dim] = with_alive(seen, True) if isinstance(seen, Tensor) and not call.is_weights(data) else seen
    call.normalise(codes, *affine)
    call.put(call.outputs[0], axes)


def _scaled(call: Call, codes: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Codes after a per-channel weight and bias: a weight that is zero makes zeros, a bias that is not undoes that."""
    weight_axis = UNIFORM if weight is None else call.axes(weight)[0]
    if isinstance(weight_axis, Tensor) and any_alive(codes):
        codes = with_alive(codes, is_alive(codes) & is_alive(weight_axis))
    return _shifted(call, codes, bias)


def _shifted(call: Call, codes: Tensor, bias: Tensor | None) -> Tensor:
    """Codes after something per channel has been added or taken away."""
    if bias is None or call.is_zero(bias):
        return codes
    axis = call.axes(bias)[0]
    if not isinstance(axis, Tensor):
        return with_alive(codes, True)
    return with_alive(codes, is_alive(codes) | is_alive(axis)) if any_alive(axis) else codes


@rule("native_layer_norm", "_fused_rms_norm", "rms_norm")
def layer_norm(call: Call) -> None:
    data = call["input"]
    axes = call.axes(data)
    width = len(call["normalized_shape"])
    affine = [t for t in call.tensors if t is not data]
    call.sized_parts(axes[-width:], call["normalized_shape"])
    for offset in range(-width, 0):
        axis = axes[offset]
        if not isinstance(axis, Tensor):
            for tensor in affine:
                call.meet_fixed(call.axes(tensor)[offset], data)
            axes[offset] = None
            continue
        seen = call.mix(axis)
        for tensor in affine:
            other = call.axes(tensor)[offset]
            if isinstance(other, Tensor):
                call.tie(axis, other)
        axes[offset] = with_alive(axis, not affine) if isinstance(seen, Tensor) else None
    for dim in range(data.dim() - width):
        axis = axes[dim]
        if isinstance(axis, Tensor) and call.has("bias") and call["bias"] is not None:
            axes[dim] = with_alive(axis, True)
    call.put(call.outputs[0], axes)


@rule("native_group_norm")
def group_norm(call: Call) -> None:
    """Groups of channels are normalised together, and go together; asked for, one position of every group does."""
    data, groups = call["input"], call["group"]
    axes = call.axes(data)
    codes = axes[1]
    affine = [t for t in (call["weight"], call["bias"]) if t is not None]
    if isinstance(codes, Tensor):
        for tensor in affine:
            other = call.axes(tensor)[0]
            if isinstance(other, Tensor):
                call.tie(codes, other)
        lines = codes.reshape(groups, -1)
        each = lines.shape[1]
        whole = groups > 1 and (groups >= each or not call.inexact)
        # A number of groups that is written down, not kept, would be wrong for fewer.
        if whole and (call.counts("num_groups", lines[:, 0]) or each == 1):
            call.tie(lines, lines[:, :1])
            codes = with_alive(codes, is_alive(lines).any(1, keepdim=True).expand_as(lines).reshape(-1))
            axes[1] = _scaled(call, codes, call["weight"], call["bias"])
        elif call.mix(codes) is not None:
            call.tie(lines, lines[:1])
            axes[1] = _scaled(call, with_alive(codes, True), call["weight"], call["bias"])
        else:
            axes[1] = None
    else:
        axes[1] = None
        for tensor in affine:
            call.freeze_axes(tensor, Kind.FIXED_TENSOR)
    call.normalise(codes, call["weight"], call["bias"])
    for dim in (0, *range(2, data.dim())):
        axis = axes[dim]
        if dim > 1:
            axes[dim] = call.lose(axis, Kind.MIXES)
        elif isinstance(axis, Tensor):
            axes[dim] = with_alive(axis, True)
    call.put(call.outputs[0], axes)


@rule("_softmax", "_log_softmax", "_safe_softmax", "cumsum", "cumsum_", "cumprod", "cumprod_", "logcumsumexp")
def along(call: Call) -> None:
    """Same shape, seen along one axis; elsewhere each index alone, with zeros that may become something else."""
    tensor = call["self"]
    axes = call.axes(tensor)
    dim = positive(call["dim"], tensor.dim())
    seen = call.mix(axes[dim])
    axes[dim] = seen if isinstance(seen, Tensor) else None
    call.put(call.out, axes if call.name.startswith("cumsum") else all_alive(axes))


@rule("mean", "amax", "amin", "max", "min", "prod", "median", "mode", "aminmax")
@rule("var", "std", "var_mean", "std_mean", "logsumexp", "argmax", "argmin", "any", "all")
def reduction(call: Call) -> None:
    """Along space every channel alone; along channels the result depends on all."""
    if len(call.tensors) > 1:
        from secateur.channels.rules.ties import pointwise

        return pointwise(call)
    dims, axes, name = reduced_dims(call), call.axes(call.tensors[0]), call.name
    for dim in dims:
        seen = call.mix(axes[dim])
        if isinstance(seen, Tensor) and name not in ("mean", "var", "std", "var_mean", "std_mean"):
            call.freeze(seen, Kind.MIXES)
    if name in ("logsumexp", "argmax", "argmin", "all"):
        axes = all_alive(axes)
    call.put_all(reduced(call, axes, dims))


@rule("max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool1d", "avg_pool2d", "avg_pool3d")
@rule("max_pool1d", "max_pool2d", "max_pool3d", "max_pool1d_with_indices", "mkldnn_max_pool2d")
@rule("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d")
@rule("adaptive_avg_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d")
@rule("fractional_max_pool2d", "fractional_max_pool3d")
@rule("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d")
@rule("_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d")
@rule("upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")
@rule("reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "replication_pad1d", "replication_pad2d")
@rule("replication_pad3d", "grid_sampler_2d", "grid_sampler_3d", "cudnn_grid_sampler")
def spatial(call: Call) -> None:
    """Pooling, resizing, padding, sampling: every channel alone, zero stays zero."""
    tensor = call.tensors[0]
    for other in call.tensors[1:]:
        call.freeze_axes(other, Kind.INDEXED)
    axes = call.axes(tensor)
    # cudnn_grid_sampler has no number in its name: it samples over all axes but batch and channels.
    num_spatial = next((int(c) for c in reversed(call.name) if c.isdigit()), tensor.dim() - 2)
    for dim in range(tensor.dim() - num_spatial, tensor.dim()):
        axes[dim] = call.lose(axes[dim], Kind.MIXES)
    call.put_all(axes)


@rule("_fft_r2c", "_fft_c2r", "_fft_c2c")
def fourier(call: Call) -> None:
    """A linear map along some axes; along the others every channel alone, zero stays zero."""
    tensor = call["self"]
    axes = call.axes(tensor)
    for dim in call["dim"]:
        at = positive(dim, tensor.dim())
        axes[at] = call.lose(axes[at], Kind.MIXES)
    call.put(call.out, axes)


@rule("max_unpool2d", "max_unpool3d")
def unpool(call: Call) -> None:
    """Values go back to where pooling found the largest: every channel with its own indices, zero stays zero."""
    values, indices = call.tensors
    num_spatial = int(call.name[-2])
    axes: list[Axis] = []
    for dim, met in enumerate(zip(call.axes(values), call.axes(indices), strict=True)):
        if dim >= values.dim() - num_spatial:
            for axis in met:
                call.freeze(axis, Kind.MIXES)
            axes.append(None)
        elif isinstance(met[0], Tensor) and isinstance(met[1], Tensor):
            call.tie_all([met[0], met[1]])
            axes.append(met[0])
        else:
            for axis, other in zip(met, (indices, values), strict=True):
                call.meet_fixed(axis, other)
            axes.append(None)
    call.put(call.out, axes)


@rule("topk", "sort", "cummax", "cummin", "kthvalue")
def ordered(call: Call) -> None:
    tensor = call["self"]
    dim = positive(call["dim"] if call.has("dim") else -1, tensor.dim())
    axes = call.axes(tensor)
    axes[dim] = call.lose(axes[dim], Kind.MIXES)
    if all(out.dim() == tensor.dim() for out in call.outputs):
        call.put_all(all_alive(axes))
    else:
        for axis in axes:
            call.freeze(axis, Kind.MIXES)


@rule("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention")
@rule("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention")
@rule("_scaled_dot_product_fused_attention_overrideable")
def attention(call: Call) -> None:
    """Queries and keys meet along their last axis, scaled by its size; values only run along."""
    query, key, value = call["query"], call["key"], call["value"]
    query_axes, key_axes, value_axes = call.axes(query), call.axes(key), call.axes(value)
    for axes in (query_axes, key_axes):
        for axis in axes:
            call.freeze(axis, Kind.MIXES, "attention")
    others = [call.axes(tensor) for tensor in call.tensors if all(tensor is not t for t in (query, key, value))]
    for axis in (*value_axes[:-1], *chain.from_iterable(others)):
        call.freeze(axis, Kind.MIXES, "attention")
    batch = prod(query.shape[:-2])
    pairs = query.shape[-2] * key.shape[-2]
    call.count_macs(batch * pairs, [(None, query.shape[-1])])
    call.count_macs(batch * pairs, [(value_axes[-1], value.shape[-1])])
    last: Axis = value_axes[-1]
    call.put(call.outputs[0], [*([None] * (value.dim() - 1)), last if call.outputs[0].shape[-1] > 1 else UNIFORM])


@rule("torchvision::roi_align", "torchvision::roi_pool")
def region(call: Call) -> None:
    """(N, C, H, W) and K regions to (K, C, h, w): every channel alone."""
    data, regions = call.tensors[:2]
    axes = call.axes(data)
    for axis in (axes[0], *axes[2:], *call.axes(regions)):
        call.freeze(axis, Kind.INDEXED)
    call.put_all([None, axes[1], None, None])


@rule("torchvision::nms")
def suppression(call: Call) -> None:
    for tensor in call.tensors:
        call.freeze_axes(tensor, Kind.INDEXED)


@rule("_weight_norm_interface", "renorm")
def weight_norm(call: Call) -> None:
    """Every slice along one axis is scaled by its norm, which combines the other axes."""
    limited = call.name == "renorm"
    weight = call["self"] if limited else call["v"]
    dim = positive(call["dim"], weight.dim())
    axes = call.axes(weight)
    kept = axes[dim]
    kind = Kind.IN_NORM if call.is_weights(weight) else Kind.MIXES
    for place, axis in enumerate(axes):
        if place != dim:
            call.mix(axis, "renorm" if limited else "weight norm", kind)
    if not limited:
        lengths = call.axes(call["g"])[dim]
        if isinstance(kept, Tensor) and isinstance(lengths, Tensor):
            # A direction of zeros has no norm: a channel is gone where the length alone is zero.
            call.tie(lengths, kept)
            call.mark(kept, Role.CONSUMES)
            axes[dim] = lengths
        else:
            call.meet_fixed(kept)
            call.meet_fixed(lengths)
            axes[dim] = UNIFORM if weight.shape[dim] == 1 else None
    call.put(call.outputs[0], axes)
