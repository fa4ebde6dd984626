"""Operators that sum products over an axis: convolutions and matrix products."""

from __future__ import annotations

from math import prod

from torch import Tensor

from secateur.channels.labels import Role, any_alive, is_alive, with_alive
from secateur.channels.rules.registry import UNIFORM, Axis, Call, positive, rule


def contract(call: Call, left: Tensor, left_axis: Axis, right: Tensor, right_axis: Axis) -> None:
    """Two axes are multiplied and summed: a channel can go if one side is zero for it."""
    if isinstance(left_axis, Tensor) and isinstance(right_axis, Tensor):
        call.table.tie(left_axis, right_axis)
        left_weights, right_weights = call.is_weights(left), call.is_weights(right)
        if left_weights and right_weights:
            call.table.mark(left_axis, Role.PASSES)
            call.table.mark(right_axis, Role.PASSES)
        elif right_weights:
            consume(call, left_axis)
            call.table.mark(right_axis, Role.CONSUMES)
        elif left_weights:
            consume(call, right_axis)
            call.table.mark(left_axis, Role.CONSUMES)
        else:
            consume(call, left_axis[is_alive(right_axis)])
        return
    for axis, other in ((left_axis, right_axis), (right_axis, left_axis)):
        if isinstance(axis, Tensor):
            if other is UNIFORM:
                consume(call, axis)
            else:
                call.freeze(axis, "is multiplied with a tensor of fixed size")


def consume(call: Call, codes: Tensor) -> None:
    """These elements are summed up; the ones that are not zero without their channel must stay."""
    if any_alive(codes):
        alive = codes[is_alive(codes)]
        call.freeze(alive, f"does not stay zero{call.watch.woken_by(alive[0])} on the way to its consumer")


def add_bias(call: Call, axis: Axis, bias: Tensor | None) -> Axis:
    """The output axis after a bias of one value per index."""
    if bias is None or bias.dim() == 0:
        return axis
    bias_axis = call.axes(bias)[-1]
    if isinstance(axis, Tensor) and isinstance(bias_axis, Tensor):
        call.table.tie(axis, bias_axis)
        call.table.mark(bias_axis, Role.PRODUCES if call.is_weights(bias) else Role.PASSES)
        return with_alive(axis, is_alive(axis) | is_alive(bias_axis)) if any_alive(bias_axis) else axis
    if bias_axis is not UNIFORM or not isinstance(axis, Tensor):
        call.freeze(axis, "is shifted by a bias of fixed size")
        call.freeze(bias_axis, "shifts channels of fixed number")
        return None
    return with_alive(axis, True)


def rows(axis: Axis, bias: Tensor | None) -> Axis:
    """An axis that runs along untouched: a bias makes its removed elements non-zero."""
    return with_alive(axis, True) if isinstance(axis, Tensor) and bias is not None else axis


@rule("convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution", "convolution_overrideable")
def convolution(call: Call) -> None:
    data, weight = call["input"] if call.has("input") else call["self"], call["weight"]
    bias = call["bias"] if call.has("bias") else None
    transposed = bool(call["transposed"]) if call.has("transposed") else False
    groups = call["groups"]
    data_axes, weight_axes = call.axes(data), call.axes(weight)
    offset = data.dim() - weight.dim() + 2
    channel_dim = offset - 1
    for axis in weight_axes[2:]:
        call.freeze(axis, "is the extent of a kernel")
    pointwise = all(size == 1 for size in weight.shape[2:]) and data.shape[offset:] == call.out.shape[offset:]
    spatial = [
        axis if pointwise else call.mix(axis, "passes a convolution over the channel axis")
        for axis in data_axes[offset:]
    ]
    if not pointwise:
        spatial = [
            axis
            if call.out.shape[offset + i] == data.shape[offset + i]
            else call.lose(axis, "passes a convolution that changes its size")
            for i, axis in enumerate(spatial)
        ]
    source = data_axes[channel_dim]
    if groups == 1:
        inner, outer = (weight_axes[0], weight_axes[1]) if transposed else (weight_axes[1], weight_axes[0])
        contract(call, data, source, weight, inner)
        call.watch.count(
            call, _volume(call, weight, transposed), source, data.shape[channel_dim], outer, call.out.shape[channel_dim]
        )
    else:
        outer = _grouped(call, source, data, weight, weight_axes, groups, transposed)
    if isinstance(outer, Tensor) and call.is_weights(weight):
        call.table.mark(outer, Role.PRODUCES)
    batch: list[Axis] = [rows(axis, bias) for axis in data_axes[:channel_dim]]
    call.put(call.out, [*batch, add_bias(call, outer, bias), *[rows(axis, bias) for axis in spatial]])


def _volume(call: Call, weight: Tensor, transposed: bool) -> int:
    """Multiplications per pair of input and output channel."""
    data = call["input"] if call.has("input") else call["self"]
    grid = data if transposed else call.out
    channels = weight.dim() - 2
    return (
        prod(weight.shape[2:])
        * prod(grid.shape[grid.dim() - channels :])
        * (data.shape[0] if data.dim() == weight.dim() else 1)
    )


def _grouped(
    call: Call, source: Axis, data: Tensor, weight: Tensor, weight_axes: list[Axis], groups: int, transposed: bool
) -> Axis:
    """A grouped convolution: remove whole groups, or one position in every group, whichever gives more channels."""
    channel_dim = data.dim() - weight.dim() + 1
    num_in, num_out = data.shape[channel_dim], call.out.shape[channel_dim]
    in_each, out_each = num_in // groups, num_out // groups
    by_group = in_each == 1 or groups >= max(in_each, out_each)
    volume = _volume(call, weight, transposed)
    if by_group:
        lead = weight_axes[0]
        call.freeze(weight_axes[1], "is a position inside the groups of a convolution, which are removed whole")
        if not isinstance(lead, Tensor) or not isinstance(source, Tensor):
            call.freeze(lead, "is part of a grouped convolution over channels that stay")
            call.freeze(source, "is part of a grouped convolution with weights of fixed size")
            call.watch.count(call, volume, None, in_each, None, num_out)
            return None
        lead = lead.reshape(groups, -1)
        heads = lead[:, :1]
        call.table.tie(lead, heads)
        call.table.tie(source.reshape(groups, -1), heads)
        if call.is_weights(weight):
            call.table.mark(lead, Role.PRODUCES)
        call.watch.note_size(heads[:, 0], groups)
        outer = with_alive(heads, _any_alive(lead)).expand(groups, out_each).reshape(-1)
        call.watch.count(call, volume, None, in_each, outer, num_out)
        return outer
    inner, outer = (weight_axes[0], weight_axes[1]) if transposed else (weight_axes[1], weight_axes[0])
    if isinstance(source, Tensor):
        source = _fold(call, source, groups)
    if transposed and isinstance(inner, Tensor):
        inner = _fold(call, inner, groups)
    contract(call, data, source, weight, inner)
    if isinstance(outer, Tensor):
        outer = outer.repeat(groups) if transposed else _fold(call, outer, groups).repeat(groups)
    call.watch.count(call, volume, source, in_each, outer, num_out)
    return outer


def _fold(call: Call, codes: Tensor, groups: int) -> Tensor:
    """Tie the same position of every group; one group's worth of codes."""
    grouped = codes.reshape(groups, -1)
    call.table.tie(grouped, grouped[:1])
    return with_alive(grouped[0], is_alive(grouped).any(0))


def _any_alive(codes: Tensor) -> Tensor:
    return is_alive(codes).any(1, keepdim=True)


def matrix_product(call: Call, left: Tensor, right: Tensor, bias: Tensor | None = None) -> None:
    """(..., n, k) x (..., k, m) with equal batch axes, or a vector in place of either matrix."""
    left_axes, right_axes = call.axes(left), call.axes(right)
    contract(call, left, left_axes[-1], right, right_axes[-2] if right.dim() > 1 else right_axes[-1])
    for axis, tensor in (
        (left_axes[-2] if left.dim() > 1 else None, left),
        (right_axes[-1] if right.dim() > 1 else None, right),
    ):
        if isinstance(axis, Tensor) and call.is_weights(tensor):
            call.table.mark(axis, Role.PRODUCES)
    axes: list[Axis] = []
    for dim in range(max(left.dim(), right.dim()) - 2):
        axes.append(_tie_batch(call, left_axes[dim], right_axes[dim]))
    batch = prod(left.shape[:-2])
    if left.dim() > 1:
        axes.append(rows(left_axes[-2], bias))
    if right.dim() > 1:
        axes.append(right_axes[-1])
    bias_dims = 0 if bias is None else bias.dim()
    if bias_dims == 1:
        axes[-1] = add_bias(call, axes[-1], bias)
    elif bias_dims > 1:
        for axis in axes:
            call.freeze(axis, "is added to a matrix product")
        call.freeze_axes(bias, "is added to a matrix product")  # pyright: ignore[reportArgumentType]
        axes = [None] * call.out.dim()
    num_rows = left.shape[-2] if left.dim() > 1 else 1
    num_columns = right.shape[-1] if right.dim() > 1 else 1
    row_axis = left_axes[-2] if left.dim() > 1 else None
    column_axis = right_axes[-1] if right.dim() > 1 else None
    call.watch.count(call, batch, left_axes[-1], left.shape[-1], column_axis, num_columns, row_axis, num_rows)
    call.put(call.out, axes)


def _tie_batch(call: Call, left: Axis, right: Axis) -> Axis:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        call.table.tie(left, right)
        return with_alive(left, is_alive(left) & is_alive(right))
    call.freeze(left, "meets a tensor of fixed size in a matrix product")
    call.freeze(right, "meets a tensor of fixed size in a matrix product")
    return None


@rule("mm", "bmm", "mv", "dot")
def mm(call: Call) -> None:
    left, right = call.tensors
    matrix_product(call, left, right)


@rule("addmm", "baddbmm", "addmv")
def addmm(call: Call) -> None:
    bias, left, right = call.tensors[:3]
    if call.name == "baddbmm" and call["beta"] == 0:
        bias = None
    matrix_product(call, left, right, bias)


@rule("embedding")
def embedding(call: Call) -> None:
    """Rows of a table by index: the row axis stays, the columns are produced."""
    weight, indices = call["weight"], call["indices"]
    row_axis, column_axis = call.axes(weight)
    call.freeze(row_axis, "is looked up by index")
    call.freeze_axes(indices, "is used as an index")
    if isinstance(column_axis, Tensor):
        call.table.mark(column_axis, Role.PRODUCES)
    call.put(call.out, [*([None] * indices.dim()), column_axis])


@rule("sum", "linalg_vector_norm", "norm")
def total(call: Call) -> None:
    """A sum or a norm: zeros do not count, so a removed channel may be left out."""
    tensor = call.tensors[0]
    axes = call.axes(tensor)
    dims = call["dim"] if call.has("dim") else None
    dims = (
        range(tensor.dim())
        if dims is None or dims == []
        else [positive(d, tensor.dim()) for d in ([dims] if isinstance(dims, int) else dims)]
    )
    order = next((call[name] for name in ("ord", "p") if call.has(name)), 2)
    counts_zeros = order is not None and not float(order) > 0
    for dim in dims:
        axis = axes[dim]
        if isinstance(axis, Tensor):
            if counts_zeros:
                call.mix(axis, "passes a norm that counts zeros")
            else:
                consume(call, axis)
                if call.is_weights(tensor):
                    call.freeze(axis, "is summed over inside the weights")
    keep = bool(call["keepdim"]) if call.has("keepdim") else False
    call.put(call.out, reduced(axes, dims, keep))


def reduced(axes: list[Axis], dims: range | list[int], keep: bool) -> list[Axis]:
    """The axes after a reduction."""
    if keep:
        return [UNIFORM if dim in dims else axis for dim, axis in enumerate(axes)]
    return [axis for dim, axis in enumerate(axes) if dim not in dims]
