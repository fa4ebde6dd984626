"""Operators that take parts of an axis: splits, slices, indexing.

A part must mean the same in the smaller network. Equal parts are tied position by position, so that an equal split
stays right; unequal ones stay as they are unless an attribute of the running module says where the border is.
"""

from __future__ import annotations

from torch import Tensor

from secateur.channels.labels import is_alive, with_alive
from secateur.channels.reasons import Kind
from secateur.channels.rules.call import UNIFORM, Axis, Call, positive
from secateur.channels.rules.registry import rule
from secateur.channels.shapes import is_mask


@rule(
    "split",
    "split_with_sizes",
    "split_copy",
    "split_with_sizes_copy",
    "unsafe_split",
    "unsafe_split_with_sizes",
    "unsafe_chunk",
)
def split(call: Call) -> None:
    tensor = call["self"]
    dim = positive(call["dim"], tensor.dim())
    axes = call.axes(tensor)
    sizes = [out.shape[dim] for out in call.out]
    parts = split_codes(call, axes[dim], sizes)
    for out, part in zip(call.out, parts, strict=True):
        call.put(out, [*axes[:dim], part, *axes[dim + 1 :]])


def split_codes(call: Call, axis: Axis, sizes: list[int]) -> list[Axis]:
    """The parts of an axis cut at fixed places."""
    if not isinstance(axis, Tensor):
        return [axis] * len(sizes)
    parts = list(axis.split(sizes))
    call.sized(axis)
    if len(set(sizes)) == 1:
        tie_parts(call, axis, sizes[0])
        call.sized_parts(parts, sizes)
    else:
        call.parted(axis, parts, spare=1)  # one is what the others leave
    return [*parts]


def tie_parts(call: Call, codes: Tensor, size: int) -> None:
    """Equal parts lose the same positions, so that an equal split stays right."""
    grouped = codes.reshape(-1, size)
    if grouped.shape[0] > 1:
        call.tie(grouped, grouped[:1])


@rule("slice", "slice_copy")
def slice_(call: Call) -> None:
    tensor, out = call["self"], call.out
    dim = positive(call["dim"], tensor.dim())
    axes = call.axes(tensor)
    axis = axes[dim]
    if isinstance(axis, Tensor):
        length, step = axis.shape[0], call["step"]
        start = min(max(positive(call["start"] or 0, length), 0), length)
        count = out.shape[dim]
        if step == 1:
            axes[dim] = _part(call, axis, start, start + count)
        elif length % step == 0 and start < step and count * step == length:
            pairs = axis.reshape(-1, step)
            call.tie(pairs, pairs[:, :1])
            axes[dim] = axis[start::step]
        else:
            axes[dim] = call.lose(axis, Kind.FIXED_PARTS)
    call.put(out, axes)


def _part(call: Call, codes: Tensor, start: int, end: int) -> Axis:
    length, count = codes.shape[0], end - start
    if count == length:
        return codes
    if count == 0:
        return call.lose(codes, Kind.FIXED_PARTS)
    call.sized(codes)
    if length % count == 0 and start % count == 0:
        call.sized(codes[start:end])
        tie_parts(call, codes, count)
        return codes[start:end]
    for border in {start, end} - {0, length}:
        call.parted(codes, [codes[:border], codes[border:], codes[start:end]], spare=2)
    return codes[start:end]


@rule("select", "select_copy", "unbind", "unbind_copy")
def select(call: Call) -> None:
    tensor = call["self"]
    dim = positive(call["dim"], tensor.dim())
    axes = call.axes(tensor)
    call.freeze(axes[dim], Kind.INDEXED)
    call.put_all(axes[:dim] + axes[dim + 1 :])


@rule("index", "_unsafe_index")
def index(call: Call) -> None:
    """Advanced indexing: indexed axes stay, the others follow in their order."""
    tensor = call["self"]
    axes = call.axes(tensor)
    indexed: list[int] = []
    dim = 0
    for chosen in call["indices"]:
        covered = 1
        if chosen is not None:
            call.freeze_axes(chosen, Kind.INDEXED)
            covered = chosen.dim() if is_mask(chosen) else 1
            for axis in axes[dim : dim + covered]:
                call.freeze(axis, Kind.INDEXED)
            indexed.extend(range(dim, dim + covered))
        dim += covered
    rest = [axis for d, axis in enumerate(axes) if d not in indexed]
    together = indexed == list(range(indexed[0], indexed[-1] + 1)) if indexed else True
    at = indexed[0] if indexed and together else 0
    call.put(call.out, [*rest[:at], *([None] * (call.out.dim() - len(rest))), *rest[at:]])


@rule("index_select")
def index_select(call: Call) -> None:
    axes = call.axes(call["self"])
    dim = positive(call["dim"], len(axes))
    axes[dim] = call.lose(axes[dim], Kind.INDEXED)
    call.freeze_axes(call["index"], Kind.INDEXED)
    call.put(call.out, axes)


@rule("index_put", "index_put_")
def index_put(call: Call) -> None:
    """Rows written by index, as detectors gather what several levels give: the other axes go on."""
    target, values, indices = call["self"], call["values"], call["indices"]
    if indices[0] is not None and is_mask(indices[0]) and indices[0].shape == target.shape and call.is_constant(values):
        _overwrite_where(call, indices[0], bool(values))
        return
    axes = call.axes(target)
    num_indexed = sum(i.dim() if i is not None and is_mask(i) else 1 for i in indices)
    if any(chosen is None for chosen in indices):
        num_indexed = len(axes)
    for chosen in indices:
        if chosen is not None:
            call.freeze_axes(chosen, Kind.INDEXED)
    for dim in range(num_indexed):
        axes[dim] = call.lose(axes[dim], Kind.INDEXED)
    given = call.axes(values)
    offset = len(axes) - len(given)
    for dim in range(num_indexed, len(axes)):
        axes[dim] = _overwritten(call, axes[dim], given[dim - offset] if dim >= offset else UNIFORM)
    for axis in given[: max(0, num_indexed - offset)]:
        call.freeze(axis, Kind.INDEXED)
    call.put(call.out, axes)


def _overwrite_where(call: Call, mask: Tensor, alive: bool) -> None:
    """`x[x < 0.1] = 0`: the mask is coupled with the tensor, and zeros stay zero unless the number is not 0."""
    axes = call.axes(call["self"])
    for dim, (axis, chosen) in enumerate(zip(axes, call.axes(mask), strict=True)):
        if isinstance(axis, Tensor) and isinstance(chosen, Tensor):
            call.tie_all([axis, chosen])
        elif chosen is not UNIFORM:
            call.freeze(chosen, Kind.INDEXED)
            axes[dim] = call.lose(axis, Kind.INDEXED)
        kept = axes[dim]
        if alive and isinstance(kept, Tensor):
            axes[dim] = with_alive(kept, True)
    call.put(call.out, axes, zero=call.is_zero(call["self"]) and not alive)


def _overwritten(call: Call, axis: Axis, given: Axis) -> Axis:
    """An axis of which some rows are replaced by others."""
    if isinstance(axis, Tensor) and isinstance(given, Tensor):
        call.tie_all([axis, given])
        return with_alive(axis, is_alive(axis) | is_alive(given))
    if isinstance(given, Tensor) and axis is UNIFORM and call.is_zero(call["self"]):
        return given
    if isinstance(axis, Tensor) and given is UNIFORM:
        return axis if call.is_zero(call["values"]) else with_alive(axis, True)
    call.meet_fixed(given, call["self"])
    return call.lose(axis, Kind.FIXED_TENSOR)


@rule("gather")
def gather(call: Call) -> None:
    """Reads along one axis where an index says; along the others every channel alone, if it has an index of its own or
    the same as all.
    """
    source, index = call["self"], call["index"]
    axes = call.axes(source)
    dim = positive(call["dim"], len(axes))
    for place, (axis, asked) in enumerate(zip(axes, call.axes(index), strict=True)):
        follows = place != dim and source.shape[place] == index.shape[place]
        if follows and isinstance(axis, Tensor) and isinstance(asked, Tensor):
            call.tie_all([axis, asked])
        elif not (follows and (asked is UNIFORM or (asked is None and not index.stride(place)))):
            call.freeze(asked, Kind.INDEXED)
            axes[place] = call.lose(axis, Kind.INDEXED)
    call.put(call.out, axes)


@rule("scatter", "scatter_", "index_add", "index_add_", "index_fill_", "take")
def scattered(call: Call) -> None:
    """Reads or writes single elements wherever an index says."""
    for tensor in call.tensors:
        call.freeze_axes(tensor, Kind.INDEXED)
    if call.operator.written:
        call.put(call.out, [None] * call.out.dim())


@rule("unfold")
def unfold(call: Call) -> None:
    tensor, dim = call["self"], positive(call["dimension"], call["self"].dim())
    axes = call.axes(tensor)
    axes[dim] = call.lose(axes[dim], Kind.MIXES)
    call.put(call.out, [*axes, None])
