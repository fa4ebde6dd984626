"""Which tensors share memory: a write to one changes what is known of the others."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from secateur.channels.labels import is_alive, with_alive
from secateur.channels.reasons import Kind
from secateur.channels.rules.call import UNIFORM, Axis, State

if TYPE_CHECKING:
    from secateur.channels.trace import Watch


class Memory:
    """Families of tensors that are views of one another."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self._families: dict[int, list[weakref.ref[Tensor]]] = {}

    def settle(self, tensor: Tensor, before: State | None) -> None:
        """After a write: freeze all tensors that share the memory if their axes no longer agree."""
        after = self.watch.state(tensor)
        relatives = [t for t in self._relatives(tensor) if t is not tensor]
        if after is None or not relatives:
            return
        if self._spread(tensor, after, relatives):
            return
        filled = any(_is_filled(t, self.watch.state(t)) for t in [tensor, *relatives])
        if before is not None and not filled and self._wake(tensor, before, after, relatives):
            return
        if before is None or filled or not same_axes(before.axes, after.axes):
            self.forget([tensor, *relatives], [after] if before is None else [before, after])

    def _spread(self, tensor: Tensor, after: State, relatives: list[Tensor]) -> bool:
        """A part with all channels was written into zeros, or into other such parts: now the whole has them.

        As in padding by hand, circular padding, and interleaving of pixels.
        """
        carried = [dim for dim, axis in enumerate(after.axes) if isinstance(axis, Tensor)]
        states = [self.watch.state(other) for other in relatives]
        places = [self._places(t, s, tensor, carried) for t, s in zip(relatives, states, strict=True)]
        if not carried or after.weights or None in places:
            return False
        for other, state, dims in zip(relatives, states, places, strict=True):
            assert state is not None
            assert dims is not None
            axes: list[Axis] = [None] * other.dim()
            for dim, place in zip(carried, dims, strict=True):
                axis, known = after.axes[dim], state.axes[place]
                assert isinstance(axis, Tensor)
                if isinstance(known, Tensor):
                    self.watch.table.tie(axis, known)
                    axis = with_alive(axis, is_alive(axis) | is_alive(known))
                axes[place] = axis
            self.watch.put(other, State(axes, made=after.made | state.made, bare=after.bare | state.bare))
        return True

    def _wake(self, part: Tensor, before: State, after: State, relatives: list[Tensor]) -> bool:
        """An operator that works element by element has changed a part: the others have its non-zero elements too.

        As the gates of an LSTM, which are parts of one matrix product.
        """
        carried = [dim for dim, axis in enumerate(after.axes) if isinstance(axis, Tensor)]
        if len(carried) != 1 or after.weights or not same_axes(_labels(before.axes), _labels(after.axes)):
            return False
        (dim,) = carried
        codes, changed = after.axes[dim], list[tuple[Tensor, State]]()
        assert isinstance(codes, Tensor)
        for other in relatives:
            state, shift = self.watch.state(other), _shift(other, part, dim)
            if state is None or state.weights or shift is None:
                return False
            axis = state.axes[dim]
            if [d for d, each in enumerate(state.axes) if isinstance(each, Tensor)] != carried:
                return False
            assert isinstance(axis, Tensor)
            alive = is_alive(axis)
            first, last = max(0, shift), min(axis.numel(), shift + codes.numel())
            if first < last:
                alive = alive.clone()
                alive[first:last] |= is_alive(codes)[first - shift : last - shift]
            axes = [*state.axes[:dim], with_alive(axis, alive), *state.axes[dim + 1 :]]
            bare = frozenset() if bool(alive.all()) else state.bare
            changed.append((other, State(axes, made=after.made | state.made, bare=bare)))
        for other, state in changed:
            self.watch.put(other, state)
        return True

    def _places(self, whole: Tensor, state: State | None, part: Tensor, carried: list[int]) -> list[int] | None:
        """Which axes of the whole tensor these axes of a part are; None if that is not clear.

        An axis is known by its size and its steps in memory; a part may have fewer of them, as `x[:, :, 0]` has.
        """
        if state is None or id(whole) in self.watch.leaves or whole.dtype != part.dtype:
            return None
        steps = list(zip(whole.shape, whole.stride(), strict=True))
        found = []
        for dim in carried:
            step = part.shape[dim], part.stride(dim)
            if whole.dim() == part.dim():
                alike = [dim] if steps[dim] == step else []
            else:
                alike = [place for place, other in enumerate(steps) if other == step]
            if len(alike) != 1:
                return None
            found += alike
        codes = [dim for dim, axis in enumerate(state.axes) if isinstance(axis, Tensor)]
        return found if state.zero or codes == found else None

    def relate(self, tensors: list[Tensor]) -> None:
        """Remember that these tensors may share memory."""
        for tensor in tensors:
            if tensor.layout is not torch.strided:
                continue
            family = self._families.setdefault(tensor.untyped_storage()._cdata, [])
            family[:] = [ref for ref in family if ref() is not None]
            if all(ref() is not tensor for ref in family):
                family.append(weakref.ref(tensor))

    def _relatives(self, tensor: Tensor) -> list[Tensor]:
        if tensor.layout is not torch.strided:
            return []
        family = self._families.get(tensor.untyped_storage()._cdata, [])
        return [t for ref in family if (t := ref()) is not None]

    def forget(self, tensors: list[Tensor], states: list[State]) -> None:
        """A tensor was overwritten in part, or through another tensor: all channels involved stay."""
        reason = self.watch.reason(Kind.UNSUPPORTED, "a write into a part of a tensor")
        for tensor in tensors:
            state = self.watch.state(tensor)
            if state is not None:
                states.append(state)
            if id(tensor) not in self.watch.leaves:
                self.watch.put(tensor, State([None] * tensor.dim()))
        for state in states:
            self.watch.freeze(state, reason)


def _is_filled(tensor: Tensor, state: State | None) -> bool:
    """Whether the values are known to be uniform or zero."""
    if state is None:
        return False
    return state.zero or any(n > 1 and axis is UNIFORM for n, axis in zip(tensor.shape, state.axes, strict=True))


def _labels(axes: list[Axis]) -> list[Axis]:
    return [axis >> 1 if isinstance(axis, Tensor) else axis for axis in axes]


def _shift(whole: Tensor, part: Tensor, dim: int) -> int | None:
    """By how many indices a part begins after another view of the memory, along the only axis in which they differ.

    None where that is not clear.
    """
    if whole.dim() != part.dim() or whole.dtype != part.dtype or part.stride(dim) == 0:
        return None
    others = [d for d in range(part.dim()) if d != dim and part.shape[d] > 1]
    alike = all(whole.shape[d] == part.shape[d] for d in range(part.dim()) if d != dim)
    if not alike or any(whole.stride(d) != part.stride(d) for d in (dim, *others)):
        return None
    step = part.stride(dim)
    shift, rest = divmod(int(part.storage_offset() - whole.storage_offset()), step)
    # No other axis may reach the same memory: its steps are larger than all that is compared, or all of them smaller.
    most = step * max(abs(shift - whole.shape[dim] + 1), abs(shift + part.shape[dim] - 1))
    smaller = sum((part.shape[d] - 1) * part.stride(d) for d in others if part.stride(d) < step)
    larger = all(part.stride(d) > most for d in others if part.stride(d) >= step)
    return shift if rest == 0 and smaller < step and larger else None


def same_axes(left: list[Axis], right: list[Axis]) -> bool:
    if len(left) != len(right):
        return False
    for a, b in zip(left, right, strict=True):
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            if a.shape != b.shape or not torch.equal(a, b):
                return False
        elif a is not b:
            return False
    return True
