"""Operators that move elements without changing them: executed on the labels themselves.

Where one axis of channels becomes several, one of them goes on carrying the channels and what lies across it is tied.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from secateur.channels.labels import is_alive, with_alive
from secateur.channels.reasons import Kind
from secateur.channels.rules.call import UNIFORM, Axis, Call, positive
from secateur.channels.rules.parts import tie_parts
from secateur.channels.rules.registry import rule


@rule("view", "_unsafe_view", "reshape", "_reshape_alias", "_reshape_copy", "view_copy", "flatten")
def view(call: Call) -> None:
    tensor, out = call["self"], call.out
    if isinstance(out, Tensor) and out.dtype != tensor.dtype:
        call.freeze_axes(tensor, Kind.UNSUPPORTED)
        return
    call.put(out, reshape_axes(call, call.axes(tensor), list(tensor.shape), list(out.shape)))


def reshape_axes(call: Call, axes: list[Axis], before: list[int], after: list[int]) -> list[Axis]:
    """Axes after a reshape, block by block: runs of dimensions with the same number of elements."""
    if prod(before) == 0:
        for axis in axes:
            call.freeze(axis, Kind.UNSUPPORTED)
        return [None] * len(after)
    result: list[Axis] = [None] * len(after)
    i = j = 0
    while i < len(before) or j < len(after):
        start_i, start_j = i, j
        size_i = size_j = 1
        while True:
            if size_i == size_j and (i > start_i or j > start_j):
                break
            if size_i <= size_j and i < len(before):
                size_i *= before[i]
                i += 1
            else:
                size_j *= after[j]
                j += 1
        block = reshape_block(call, axes[start_i:i], before[start_i:i], after[start_j:j])
        result[start_j:j] = block
    return result


def reshape_block(call: Call, axes: list[Axis], before: list[int], after: list[int]) -> list[Axis]:
    carried = [k for k, axis in enumerate(axes) if isinstance(axis, Tensor)]
    if not carried:
        uniform = all(axis is UNIFORM for axis in axes)
        return [UNIFORM if uniform or size == 1 else None for size in after]
    # Rather channels of layers than zeros and what lies beside them, which may be frames.
    widest = max(carried, key=lambda k: (call.has_slices(axes[k]), before[k]))
    for k in carried:
        if k != widest:
            call.freeze(axes[k], Kind.MERGED)
    codes = axes[widest]
    assert isinstance(codes, Tensor)
    full = codes.reshape([-1 if k == widest else 1 for k in range(len(before))]).expand(before).reshape(after)
    return split_axis(call, full)


def split_axis(call: Call, codes: Tensor) -> list[Axis]:
    """The one dimension of this block of codes that will carry the channels; what lies across it is tied."""
    varying = [dim for dim in range(codes.dim()) if codes.shape[dim] > 1 and not _constant(codes, dim)]
    result: list[Axis] = [UNIFORM if size == 1 else None for size in codes.shape]
    if not varying:
        call.freeze(codes, Kind.ONLY)
        return result
    lead = max(varying, key=lambda dim: codes.shape[dim])
    lines = codes.movedim(lead, 0).reshape(codes.shape[lead], -1)
    if len(varying) > 1:
        call.tie(lines, lines[:, :1])
    result[lead] = with_alive(lines[:, 0], is_alive(lines).any(1))
    call.sized(result[lead])
    return result


def _constant(codes: Tensor, dim: int) -> bool:
    return bool((codes == codes.narrow(dim, 0, 1)).all())


@rule("as_strided", "as_strided_")
def as_strided(call: Call) -> None:
    """Known only where it relabels the strides of axes of size 1, as pooling does for channels_last."""
    shape, stride = call.layout
    same = shape == call.out.shape and all(
        a == b for size, a, b in zip(shape, stride, call.out.stride(), strict=True) if size > 1
    )
    if same and call["storage_offset"] in (None, call.tensors[0].storage_offset()):
        call.put(call.out, call.axes(call["self"]))
    else:
        call.freeze_axes(call["self"], Kind.UNSUPPORTED)
        call.put(call.out, [None] * call.out.dim())


@rule("permute", "permute_copy")
def permute(call: Call) -> None:
    axes = call.axes(call["self"])
    call.put(call.out, [axes[positive(dim, len(axes))] for dim in call["dims"]])


@rule("transpose", "transpose_", "swapaxes", "t", "t_", "numpy_T", "mT")
def transpose(call: Call) -> None:
    axes = call.axes(call["self"])
    if len(axes) >= 2:
        a, b = (call["dim0"], call["dim1"]) if call.has("dim0") else (-2, -1)
        axes[a], axes[b] = axes[b], axes[a]
    call.put(call.out, axes)


@rule("unsqueeze", "unsqueeze_")
def unsqueeze(call: Call) -> None:
    axes = call.axes(call["self"])
    axes.insert(positive(call["dim"], len(axes) + 1), UNIFORM)
    call.put(call.out, axes)


@rule("squeeze", "squeeze_")
def squeeze(call: Call) -> None:
    axes, shape = call.axes(call["self"]), call.layout[0]
    dims = range(len(shape))
    if call.has("dim"):
        wanted = call["dim"]
        dims = [positive(dim, len(shape)) for dim in ([wanted] if isinstance(wanted, int) else wanted)]
    for dim in dims:
        call.squeeze(axes[dim])
    gone = {dim for dim in dims if shape[dim] == 1}
    call.put(call.out, [axis for dim, axis in enumerate(axes) if dim not in gone])


@rule("expand", "expand_copy")
def expand(call: Call) -> None:
    tensor, out = call["self"], call.out
    offset = out.dim() - tensor.dim()
    axes = call.axes(tensor)
    call.put(out, [UNIFORM if dim < offset else axes[dim - offset] for dim in range(out.dim())])


@rule("view_as_real", "view_as_real_copy", "view_as_complex", "view_as_complex_copy")
def pairs(call: Call) -> None:
    """Complex numbers seen as two along a last axis, or the other way round."""
    axes = call.axes(call["self"])
    if call.name.startswith("view_as_complex"):
        call.freeze(axes.pop(), Kind.INDEXED)
    else:
        axes.append(None)
    call.put(call.out, axes)


@rule("repeat")
def repeat(call: Call) -> None:
    tensor, out = call["self"], call.out
    offset = out.dim() - tensor.dim()
    axes: list[Axis] = [UNIFORM] * offset + call.axes(tensor)
    for dim, times in enumerate(call["repeats"]):
        axis = axes[dim]
        if isinstance(axis, Tensor):
            axes[dim] = axis.repeat(times)
    call.put(out, axes)


@rule("cat", "concatenate", "_cat")
def cat(call: Call) -> None:
    tensors = [t for t in call["tensors"] if t.dim() == call.out.dim()]
    dim = positive(call["dim"], call.out.dim())
    known = [call.axes(t) for t in tensors]
    axes = [join_axis(call, tensors, [k[d] for k in known]) if d != dim else None for d in range(call.out.dim())]
    parts, sizes = [k[dim] for k in known], [t.shape[dim] for t in tensors]
    zeros = [part is UNIFORM and call.is_zero(t) for part, t in zip(parts, tensors, strict=True)]
    # Zeros beside an image are a state that will have channels; elsewhere they are rows of pixels or frames.
    state = dim == 1 and any(zeros) and not any(isinstance(axis, Tensor) for axis in axes)
    if state or any(isinstance(part, Tensor) for part in parts):
        beside = iter(call.new_zeros([n for n, zero in zip(sizes, zeros, strict=True) if zero]))
        axes[dim] = call.join(
            [
                part if isinstance(part, Tensor) else next(beside) if zero else call.new_fixed(n)
                for part, zero, n in zip(parts, zeros, sizes, strict=True)
            ],
        )
    call.put(call.out, axes)


def join_axis(call: Call, tensors: list[Tensor], met: list[Axis]) -> Axis:
    """An axis along which several tensors are laid side by side: they go together."""
    carried = [axis for axis in met if isinstance(axis, Tensor)]
    fixed = next((tensor for tensor, axis in zip(tensors, met, strict=True) if axis is None), None)
    if fixed is not None:
        for axis in carried:
            call.meet_fixed(axis, fixed)
        return None
    if not carried:
        return UNIFORM if met else None
    call.tie_all(carried)
    filled = [tensor for tensor, axis in zip(tensors, met, strict=True) if axis is UNIFORM]
    if filled:
        call.sized(carried[0], around=True)
    alive = is_alive(torch.stack(carried)).any(0) | any(not call.is_zero(tensor) for tensor in filled)
    return with_alive(carried[0], alive)


@rule("stack")
def stack(call: Call) -> None:
    known = [call.axes(t) for t in call["tensors"]]
    axes = [join_axis(call, call["tensors"], list(met)) for met in zip(*known, strict=True)]
    axes.insert(positive(call["dim"], call.out.dim()), None)
    call.put(call.out, axes)


@rule("flip")
def flip(call: Call) -> None:
    axes = call.axes(call["self"])
    for dim in call["dims"]:
        axis = axes[dim]
        if isinstance(axis, Tensor):
            axes[dim] = axis.flip(0)
    call.put(call.out, axes)


@rule("rot90")
def rotate(call: Call) -> None:
    axes = call.axes(call["self"])
    for dim in call["dims"]:
        axes[dim] = call.lose(axes[dim], Kind.MIXES)
    call.put(call.out, axes)


@rule("roll")
def roll(call: Call) -> None:
    tensor = call["self"]
    axes = call.axes(tensor)
    for dim in call["dims"] or range(tensor.dim()):
        call.freeze(axes[dim], Kind.MIXES)
        axes[dim] = None if tensor.shape[dim] > 1 else UNIFORM
    call.put(call.out, axes)


@rule("constant_pad_nd")
def pad(call: Call) -> None:
    tensor = call["self"]
    axes = call.axes(tensor)
    amounts = call["pad"]
    for k in range(len(amounts) // 2):
        dim = tensor.dim() - 1 - k
        before, after = amounts[2 * k], amounts[2 * k + 1]
        axis = axes[dim]
        if (before, after) == (0, 0):
            continue
        if not isinstance(axis, Tensor):
            axes[dim] = None
        elif before < 0 or after < 0:
            axes[dim] = call.lose(axis, Kind.FIXED_PARTS)
        else:
            counts = [n for n in (before, after) if n]
            edges = call.new_zeros(counts) if call["value"] == 0 else [call.new_fixed(n) for n in counts]
            axes[dim] = call.join([*edges[: before > 0], axis, *edges[before > 0 :]])
    if call["value"] != 0:
        padded = {tensor.dim() - 1 - k for k in range(len(amounts) // 2) if amounts[2 * k] or amounts[2 * k + 1]}
        axes = [with_alive(a, True) if isinstance(a, Tensor) and padded - {dim} else a for dim, a in enumerate(axes)]
    call.put(call.out, axes)


@rule("pixel_shuffle")
def pixel_shuffle(call: Call) -> None:
    """(C r^2, H, W) to (C, H r, W r): the r^2 channels of one output go together."""
    tensor, factor = call["self"], call["upscale_factor"]
    axes = call.axes(tensor)
    codes = axes[-3]
    if isinstance(codes, Tensor):
        lines = codes.reshape(-1, factor * factor)
        call.tie(lines, lines[:, :1])
        axes[-3] = with_alive(lines[:, 0], is_alive(lines).any(1))
    axes[-2:] = [call.lose(axis, Kind.MIXES) for axis in axes[-2:]]
    call.put(call.out, axes)


@rule("pixel_unshuffle")
def pixel_unshuffle(call: Call) -> None:
    axes = call.axes(call["self"])
    codes = axes[-3]
    if isinstance(codes, Tensor):
        axes[-3] = codes.repeat_interleave(call["downscale_factor"] ** 2)
    axes[-2:] = [call.lose(axis, Kind.MIXES) for axis in axes[-2:]]
    call.put(call.out, axes)


@rule("channel_shuffle", "native_channel_shuffle")
def channel_shuffle(call: Call) -> None:
    tensor, groups = call["self"], call["groups"]
    axes = call.axes(tensor)
    codes = axes[1]
    if isinstance(codes, Tensor):
        tie_parts(call, codes, codes.shape[0] // groups)
        axes[1] = codes.reshape(groups, -1).T.reshape(-1)
    call.put(call.out, axes)


@rule("im2col")
def im2col(call: Call) -> None:
    """(N, C, H, W) to (N, C k^2, L): each channel is repeated for every place of the kernel."""
    tensor = call["self"]
    axes = call.axes(tensor)
    for axis in axes[-2:]:
        call.freeze(axis, Kind.MIXES)
    codes = axes[-3]
    if isinstance(codes, Tensor):
        codes = codes.repeat_interleave(prod(call["kernel_size"]))
    call.put(call.out, [*axes[:-3], codes, None])


@rule("diagonal")
def diagonal(call: Call) -> None:
    axes = call.axes(call["self"])
    dims = {positive(call[name], len(axes)) for name in ("dim1", "dim2")}
    for dim in dims:
        call.freeze(axes[dim], Kind.MIXES)
    call.put(call.out, [*(axis for dim, axis in enumerate(axes) if dim not in dims), None])


@rule("tril", "triu", "tril_", "triu_")
def triangle(call: Call) -> None:
    axes = call.axes(call["self"])
    call.put(call.out, [*axes[:-2], *(call.lose(axis, Kind.MIXES) for axis in axes[-2:])])
