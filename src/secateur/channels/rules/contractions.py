"""Operators that sum products over an axis: convolutions and matrix products."""

from __future__ import annotations

from math import prod

from torch import Tensor

from secateur.channels.labels import Role, any_alive, is_alive, with_alive
from secateur.channels.reasons import Kind
from secateur.channels.rules.call import UNIFORM, Axis, Call, positive
from secateur.channels.rules.registry import rule


def contract(call: Call, left: Tensor, left_axis: Axis, right: Tensor, right_axis: Axis) -> None:
    """Two axes are multiplied and summed: a channel can go if one side is zero for it."""
    call.expose()
    if isinstance(left_axis, Tensor) and isinstance(right_axis, Tensor):
        call.tie(left_axis, right_axis)
        left_weights, right_weights = call.is_weights(left), call.is_weights(right)
        if left_weights and right_weights:
            call.mark(left_axis, Role.PASSES)
            call.mark(right_axis, Role.PASSES)
            call.consume(left_axis[is_alive(right_axis)])
        elif right_weights:
            call.consume(left_axis)
            call.mark(right_axis, Role.CONSUMES)
        elif left_weights:
            call.consume(right_axis)
            call.mark(left_axis, Role.CONSUMES)
        else:
            call.consume(left_axis[is_alive(right_axis)])
        return
    for tensor, axis, other, other_axis in ((left, left_axis, right, right_axis), (right, right_axis, left, left_axis)):
        if isinstance(axis, Tensor):
            if other_axis is UNIFORM and not call.is_weights(tensor):
                call.consume(axis)
            elif call.is_weights(other) and not call.is_weights(tensor):
                call.freeze(axis, Kind.COMPUTED_WEIGHT)
            else:
                call.meet_fixed(axis, other)


def summed_axis(call: Call, tensor: Tensor, dim: int) -> Axis:
    """The axis that is summed over; if it is of zeros that the code has made, their number may follow a cut."""
    axis = call.axes(tensor)[dim]
    if axis is UNIFORM and tensor.shape[dim] > 1 and call.is_zero(tensor):
        (axis,) = call.new_zeros([tensor.shape[dim]], beside=False)
    return axis


def add_bias(call: Call, axis: Axis, bias: Tensor | None) -> Axis:
    """The output axis after a bias of one value per index."""
    if bias is None:
        return axis
    bias_axis = call.axes(bias)[-1] if bias.dim() else UNIFORM
    if isinstance(axis, Tensor) and isinstance(bias_axis, Tensor):
        call.tie(axis, bias_axis)
        call.mark(bias_axis, Role.PRODUCES if call.is_weights(bias) else Role.PASSES)
        return with_alive(axis, is_alive(axis) | is_alive(bias_axis)) if any_alive(bias_axis) else axis
    if bias_axis is not UNIFORM or not isinstance(axis, Tensor):
        call.meet_fixed(axis, bias)
        call.meet_fixed(bias_axis)
        return None
    return with_alive(axis, True)


def rows(axis: Axis, bias: Tensor | None) -> Axis:
    """An axis that runs along untouched: a bias makes its removed elements non-zero."""
    return with_alive(axis, True) if isinstance(axis, Tensor) and bias is not None else axis


@rule("convolution", "_convolution")
def convolution(call: Call) -> None:
    data, weight, bias = call["input"], call["weight"], call["bias"]
    transposed, groups = call["transposed"], call["groups"]
    data_axes, weight_axes = call.axes(data), call.axes(weight)
    data_axes[1] = summed_axis(call, data, 1)
    for axis in weight_axes[2:]:
        call.freeze(axis, Kind.INDEXED, "a kernel")
    pointwise = all(size == 1 for size in weight.shape[2:]) and data.shape[2:] == call.out.shape[2:]
    space = data_axes[2:] if pointwise else [_smear(call, data_axes, dim) for dim in range(2, data.dim())]
    if groups == 1:
        inner, outer = (weight_axes[0], weight_axes[1]) if transposed else (weight_axes[1], weight_axes[0])
        source, num_in = data_axes[1], data.shape[1]
        contract(call, data, source, weight, inner)
    else:
        source, num_in, outer = _grouped(call, data_axes[1], weight_axes)
    call.produce(weight, 1 if transposed else 0, outer)
    by_group = groups > 1 and source is None
    plain = not transposed or groups == 1 or (by_group and weight.shape[1] == 1 == num_in)
    filters = weight_axes[1 if transposed and groups == 1 else 0] if plain else outer
    call.made_by(weight, filters, bias, along=plain, carries=by_group)
    grid = zip(space, (data if transposed else call.out).shape[2:], strict=True)
    channels = [(source, num_in), (outer, call.out.shape[1])]
    call.count_macs(prod(weight.shape[2:]), [(data_axes[0], data.shape[0]), *channels, *grid])
    axes = [rows(data_axes[0], bias), add_bias(call, outer, bias), *(rows(axis, bias) for axis in space)]
    call.put(call.out, axes, consumes=True)


def _smear(call: Call, axes: list[Axis], dim: int) -> Axis:
    """An axis of space that a kernel moves along."""
    seen = call.mix(axes[dim])
    if isinstance(seen, Tensor) and call.out.shape[dim] == seen.numel():
        return seen
    return call.lose(seen, Kind.MIXES)


def _grouped(call: Call, source: Axis, weight_axes: list[Axis]) -> tuple[Axis, int, Axis]:
    """A grouped convolution: remove whole groups, or one position in every group, whichever gives more channels.

    Gives the axis that each filter reads, its size, and the axis of the filters.
    """
    data, weight, groups, transposed = call["input"], call["weight"], call["groups"], call["transposed"]
    in_each, out_each = data.shape[1] // groups, call.out.shape[1] // groups
    if in_each == 1 or groups >= max(in_each, out_each):
        call.freeze(weight_axes[1], Kind.INDEXED, "the groups of a convolution, which are removed whole")
        return None, in_each, _by_group(call, source, weight_axes[0], out_each)
    inner, outer = (weight_axes[0], weight_axes[1]) if transposed else (weight_axes[1], weight_axes[0])
    if isinstance(source, Tensor):
        source = _fold(call, source, groups)
    if isinstance(inner, Tensor) and transposed:
        inner = _fold(call, inner, groups)
    contract(call, data, source, weight, inner)
    if isinstance(outer, Tensor):
        outer = (outer if transposed else _fold(call, outer, groups)).repeat(groups)
    return source, in_each, outer


def _by_group(call: Call, source: Axis, lead: Axis, out_each: int) -> Axis:
    """The filters of a convolution whose groups are removed whole, inputs and outputs together."""
    if lead is UNIFORM and isinstance(source, Tensor) and source.numel() == call["groups"]:
        # One kernel for every channel, as a blur has it.
        if not call.counts("groups", source):
            call.sized(source)
        return source.repeat_interleave(out_each)
    if not isinstance(lead, Tensor) or not isinstance(source, Tensor):
        call.meet_fixed(lead, call["input"])
        call.meet_fixed(source, call["weight"])
        return None
    groups = call["groups"]
    lead = lead.reshape(groups, -1)
    heads = lead[:, :1]
    call.tie(lead, heads)
    call.tie(source.reshape(groups, -1), heads)
    if call.is_weights(call["weight"]):
        call.mark(lead, Role.PRODUCES)
    if not call.counts("groups", heads[:, 0]):
        call.sized(heads[:, 0])
    return with_alive(heads, is_alive(lead).any(1, keepdim=True)).expand(groups, out_each).reshape(-1)


def _fold(call: Call, codes: Tensor, groups: int) -> Tensor:
    """Tie the same position of every group, and return the codes of one group."""
    grouped = codes.reshape(groups, -1)
    call.tie(grouped, grouped[:1])
    return with_alive(grouped[0], is_alive(grouped).any(0))


def matrix_product(call: Call, left: Tensor, right: Tensor, bias: Tensor | None = None) -> None:
    """(..., n, k) x (..., k, m) with equal batch axes, or a vector in place of either matrix."""
    left_axes, right_axes = call.axes(left), call.axes(right)
    left_axes[-1] = summed_axis(call, left, -1)
    contract(call, left, left_axes[-1], right, summed_axis(call, right, -2 if right.dim() > 1 else -1))
    call.drop_filters()
    for tensor, dim in ((left, -2), (right, -1)):
        if tensor.dim() > 1:
            call.produce(tensor, dim, call.axes(tensor)[dim])
            call.made_by(tensor, call.axes(tensor)[dim], bias)
    axes = [_tie_batch(call, (left, a), (right, b)) for a, b in zip(left_axes[:-2], right_axes[:-2], strict=False)]
    batch = list(zip(axes, left.shape[:-2], strict=False))
    ends: list[tuple[Axis, int]] = []
    if left.dim() > 1:
        ends.append((rows(left_axes[-2], bias), left.shape[-2]))
    if right.dim() > 1:
        ends.append((right_axes[-1], right.shape[-1]))
    axes += [axis for axis, _ in ends]
    call.count_macs(1, [*batch, (left_axes[-1], left.shape[-1]), *ends])
    if bias is not None and bias.dim() < 2:
        axes[-1] = add_bias(call, axes[-1], bias)
    elif bias is not None:
        call.freeze_axes(bias, Kind.UNSUPPORTED)
        axes = [call.lose(axis, Kind.UNSUPPORTED) for axis in axes]
    call.put(call.out, axes, consumes=True)


def _tie_batch(call: Call, *met: tuple[Tensor, Axis]) -> Axis:
    (left, left_axis), (right, right_axis) = met
    if isinstance(left_axis, Tensor) and isinstance(right_axis, Tensor):
        call.tie(left_axis, right_axis)
        return with_alive(left_axis, is_alive(left_axis) & is_alive(right_axis))
    call.meet_fixed(left_axis, right)
    call.meet_fixed(right_axis, left)
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
    call.freeze(row_axis, Kind.INDEXED)
    call.freeze_axes(indices, Kind.INDEXED)
    call.mark(column_axis, Role.PRODUCES)
    call.made_by(weight, column_axis, None, along=False)
    call.put(call.out, [*([None] * indices.dim()), column_axis], consumes=True)


@rule("sum", "linalg_vector_norm", "norm")
def total(call: Call) -> None:
    """A sum or a norm: zeros do not count, so a removed channel may be left out."""
    tensor = call.tensors[0]
    axes = call.axes(tensor)
    dims = reduced_dims(call)
    order = next((call[name] for name in ("ord", "p") if call.has(name)), 2)
    counts_zeros = order is not None and not float(order) > 0
    for dim in dims:
        axis = axes[dim]
        if isinstance(axis, Tensor):
            if counts_zeros:
                call.mix(axis)
            else:
                call.consume(axis)
                if call.is_weights(tensor):
                    call.freeze(axis, Kind.COMPUTED_WEIGHT)
    call.put(call.out, reduced(call, axes, dims))


def reduced_dims(call: Call) -> list[int]:
    """Along which axes of the first argument a reduction goes: all if it names none."""
    ndim, dims = call.tensors[0].dim(), call["dim"] if call.has("dim") else None
    if dims is None or dims == []:
        return list(range(ndim))
    return [positive(dim, ndim) for dim in ([dims] if isinstance(dims, int) else dims)]


def reduced(call: Call, axes: list[Axis], dims: list[int]) -> list[Axis]:
    """The axes after a reduction."""
    if call.has("keepdim") and call["keepdim"]:
        return [UNIFORM if dim in dims else axis for dim, axis in enumerate(axes)]
    return [axis for dim, axis in enumerate(axes) if dim not in dims]
