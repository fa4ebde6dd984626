"""Operators that take parts of an axis: splits, slices, indexing.

A part must mean the same in the smaller network. Equal parts are tied position by position, so that an equal split
stays right; unequal ones stay as they are unless a size attribute of the running module tells where the cut is
(`Watch.note_size`), so that the attribute can follow.
"""

from __future__ import annotations

from torch import Tensor

from secateur.channels.labels import is_alive, with_alive
from secateur.channels.rules.registry import UNIFORM, Axis, Call, positive, rule
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
    parts: list[Axis] = list(axis.split(sizes))
    call.watch.note_size(axis, axis.shape[0])
    if len(set(sizes)) == 1:
        tie_parts(call, axis, sizes[0])
        call.watch.note_size(parts[0], sizes[0])
        call.watch.note_sizes(parts, sizes)
    else:
        listed = call.watch.note_sizes(parts, sizes)
        named = [listed | call.watch.note_size(part, size) for part, size in zip(parts, sizes, strict=True)]
        reason = "is split into parts of fixed, unequal size"
        if not all(named):
            call.freeze(axis, reason)
        call.watch.borders.append((axis, call.watch.located(reason), named, 1))  # one is what the others leave
    return parts


def tie_parts(call: Call, codes: Tensor, size: int) -> None:
    """Equal parts lose the same positions, so that an equal split stays right."""
    grouped = codes.reshape(-1, size)
    if grouped.shape[0] > 1:
        call.table.tie(grouped, grouped[:1])


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
            call.table.tie(pairs, pairs[:, :1])
            axes[dim] = axis[start::step]
        else:
            axes[dim] = call.lose(axis, "is sliced at fixed positions")
    call.put(out, axes)


def _part(call: Call, codes: Tensor, start: int, end: int) -> Axis:
    length, count = codes.shape[0], end - start
    if count == length:
        return codes
    reason = "is sliced at fixed positions"
    if count == 0:
        return call.lose(codes, reason)
    note = call.watch.note_size
    note(codes, length)
    if length % count == 0 and start % count == 0:
        note(codes[start:end], count)
        tie_parts(call, codes, count)
        return codes[start:end]
    for border in {start, end} - {0, length}:
        named = note(codes[:border], border) or note(codes[border:], length - border) or note(codes[start:end], count)
        if not named:
            return call.lose(codes, reason)
        call.watch.borders.append((codes, call.watch.located(reason), [named], 0))
    return codes[start:end]


@rule("select", "select_copy", "unbind", "unbind_copy")
def select(call: Call) -> None:
    tensor = call["self"]
    dim = positive(call["dim"], tensor.dim())
    axes = call.axes(tensor)
    call.freeze(axes[dim], "is picked by its number")
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
            call.freeze_axes(chosen, "is used as an index")
            covered = chosen.dim() if is_mask(chosen) else 1
            for axis in axes[dim : dim + covered]:
                call.freeze(axis, "is picked by its number")
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
    axes[dim] = call.lose(axes[dim], "is picked by its number")
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
            call.freeze_axes(chosen, "is used as an index")
    for dim in range(num_indexed):
        axes[dim] = call.lose(axes[dim], "is written by its number")
    given = call.axes(values)
    offset = len(axes) - len(given)
    for dim in range(num_indexed, len(axes)):
        axes[dim] = _overwritten(call, axes[dim], given[dim - offset] if dim >= offset else UNIFORM)
    for axis in given[: max(0, num_indexed - offset)]:
        call.freeze(axis, "is written by its number")
    call.put(call.out, axes)


def _overwrite_where(call: Call, mask: Tensor, alive: bool) -> None:
    """`x[x < 0.1] = 0`: the mask goes with what is overwritten, and zeros stay unless the number is another."""
    axes = call.axes(call["self"])
    for dim, (axis, chosen) in enumerate(zip(axes, call.axes(mask), strict=True)):
        if isinstance(axis, Tensor) and isinstance(chosen, Tensor):
            call.tie_all([axis, chosen])
        elif chosen is not UNIFORM:
            call.freeze(chosen, "is used as an index")
            axes[dim] = call.lose(axis, "is written by its number")
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
    call.freeze(given, "is written into a tensor of fixed size")
    return call.lose(axis, "is overwritten by a tensor of fixed size")


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
            call.freeze(asked, "is used as an index")
            axes[place] = call.lose(axis, "is read element by element")
    call.put(call.out, axes)


@rule("scatter", "scatter_", "index_add", "index_add_", "index_fill_", "take")
def scattered(call: Call) -> None:
    """Reads or writes single elements wherever an index says."""
    for tensor in call.tensors:
        call.freeze_axes(tensor, "is read or written element by element")
    if call.operator.written:
        call.put(call.out, [None] * call.out.dim())


@rule("unfold")
def unfold(call: Call) -> None:
    tensor, dim = call["self"], positive(call["dimension"], call["self"].dim())
    axes = call.axes(tensor)
    axes[dim] = call.lose(axes[dim], "is unfolded along its own axis")
    call.put(call.out, [*axes, None])
