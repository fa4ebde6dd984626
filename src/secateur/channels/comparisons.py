"""What the code of a forward pass compares sizes with, and the widths at which a comparison comes out otherwise.

Labels do not see `if x.shape == y.shape` or `if x.shape[1] >= 64`: the code goes one way in the whole network, and at
other widths perhaps another. So the sizes that tensors report are integers that remember how they were computed, and
note what they are compared with. The probe then tries the widths at which each comparison flips.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations, islice, product
from typing import Any

import torch
from torch import Tensor

from secateur.channels.amounts import Amounts
from secateur.channels.groups import ChannelGraph, ChannelGroup

Form = Any
"""How a number is computed: itself, `(axis,)` for a size, or an operator's name and two forms."""
MOST = 500
"""Comparisons that are noted, of which code may make any number."""
LONGEST = 50
"""Sizes and operators in one number; longer ones are forgotten."""
PAIRS = 4096
"""Pairs of widths that are tried for a comparison, in numbers alone."""


class Width(int):
    """A size, or a number computed from sizes, that notes its comparisons."""

    form: Form
    length: int
    noted: list[tuple[str, Form, Form]]

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)

    def __bool__(self) -> bool:
        return self != 0

    __hash__ = int.__hash__


def _width(value: int, form: Form, length: int, noted: list[tuple[str, Form, Form]]) -> Width:
    width = Width(value)
    width.form, width.length, width.noted = form, length, noted
    return width


def _form(number: int) -> Form:
    return number.form if isinstance(number, Width) else int(number)


def _noting(name: str) -> Callable[[Width, Any], Any]:
    plain = getattr(int, f"__{name}__")

    def method(self: Width, other: Any) -> Any:
        if isinstance(other, int) and len(self.noted) < MOST:
            self.noted.append((name, self.form, _form(other)))
        return plain(self, other)

    return method


def _computing(name: str, method_name: str) -> Callable[[Width, Any], Any]:
    plain, swapped = getattr(int, method_name), method_name.startswith("__r")

    def method(self: Width, other: Any) -> Any:
        value = plain(self, other)
        length = self.length + (other.length if isinstance(other, Width) else 0) + 1
        if not isinstance(value, int) or length > LONGEST:
            return value
        forms = (_form(other), self.form) if swapped else (self.form, _form(other))
        return _width(value, (name, *forms), length, self.noted)

    return method


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Width, f"__{_name}__", _noting(_name))
for _name in ("add", "sub", "mul", "floordiv", "mod"):
    for _method in (f"__{_name}__", f"__r{_name}__"):
        setattr(Width, _method, _computing(_name, _method))


@dataclass(frozen=True)
class Axis:
    """The size of an axis: what stays, and for each group how much goes with one of its channels."""

    stays: int
    parts: tuple[tuple[int, int], ...]

    def size(self, kept: Mapping[int, int]) -> int:
        return self.stays + sum(each * kept[group] for group, each in self.parts)


class Comparisons:
    """All comparisons of one analysis."""

    def __init__(self) -> None:
        self._noted: list[tuple[str, Form, Form]] = []
        self._codes: list[Tensor] = []

    @contextmanager
    def noting(self, axes_of: Callable[[Tensor], Sequence[Any]]) -> Iterator[None]:
        """Let tensors report sizes that note what they are compared with.

        axes_of: the codes of a tensor's axes, something else for an axis without; empty for an unknown tensor.
        """
        plain_shape: Any = Tensor.shape
        plain_size: Any = Tensor.size

        def shape(tensor: Tensor) -> torch.Size:
            sizes, axes = plain_shape.__get__(tensor), axes_of(tensor)
            if len(axes) != len(sizes) or not any(isinstance(codes, Tensor) for codes in axes):
                return sizes
            return torch.Size([self._watched(*pair) for pair in zip(sizes, axes, strict=True)])

        def size(tensor: Tensor, dim: Any = None) -> Any:
            if isinstance(dim, int):
                return shape(tensor)[dim]
            return shape(tensor) if dim is None else plain_size(tensor, dim)

        own = {name: vars(Tensor)[name] for name in ("shape", "size") if name in vars(Tensor)}
        Tensor.shape, Tensor.size = property(shape), size  # pyright: ignore
        try:
            yield
        finally:
            for name in ("shape", "size"):
                if name in own:
                    setattr(Tensor, name, own[name])
                else:
                    delattr(Tensor, name)

    def _watched(self, size: int, codes: Any) -> int:
        if not isinstance(codes, Tensor):
            return size
        self._codes.append(codes)
        return _width(size, (len(self._codes) - 1,), 1, self._noted)

    def flips(self, graph: ChannelGraph, groups: Sequence[ChannelGroup]) -> list[Amounts]:
        """How much to cut of these groups for each comparison, where it can come out otherwise."""
        names = {group.name for group in groups}
        whole = {number: group.size for number, group in enumerate(graph.groups)}
        least = {number: group.at_least for number, group in enumerate(graph.groups) if group.name in names}
        axes: dict[int, Axis] = {}

        def resolved(form: Form) -> Form:
            if not isinstance(form, tuple):
                return form
            if len(form) == 3:
                return form[0], resolved(form[1]), resolved(form[2])
            if form[0] not in axes:
                axes[form[0]] = _axis(self._codes[form[0]], graph)
            return axes[form[0]]

        asked = dict.fromkeys((name, resolved(left), resolved(right)) for name, left, right in self._noted)
        found = [kept for comparison in asked for kept in _flips(comparison, whole, least)]
        return [
            {group.name: group.size - kept.get(number, group.size) for number, group in enumerate(graph.groups)}
            for kept in found
        ]


def _axis(codes: Tensor, graph: ChannelGraph) -> Axis:
    channels = graph.channels_at([codes])
    numbers, counts = graph.group_of[channels[channels >= 0]].unique(return_counts=True)
    parts = ((g, n // graph.groups[g].size) for g, n in zip(numbers.tolist(), counts.tolist(), strict=True))
    return Axis(int((channels < 0).sum()), tuple(parts))


def _groups_in(form: Form) -> set[int]:
    if isinstance(form, Axis):
        return {group for group, _ in form.parts}
    return set[int]().union(*map(_groups_in, form[1:])) if isinstance(form, tuple) else set()


def _value(form: Form, kept: Mapping[int, int]) -> Any:
    if isinstance(form, Axis):
        return form.size(kept)
    if isinstance(form, tuple):
        return getattr(operator, form[0])(_value(form[1], kept), _value(form[2], kept))
    return form


def _flips(comparison: Form, whole: Mapping[int, int], least: Mapping[int, int]) -> list[dict[int, int]]:
    """As many channels as may stay where the comparison comes out otherwise: by cutting one group, or else two."""
    before = _value(comparison, whole)

    def flips(kept: Mapping[int, int]) -> bool:
        try:
            return _value(comparison, {**whole, **kept}) != before
        except ArithmeticError:
            return False

    groups = sorted(_groups_in(comparison) & least.keys())
    options = {g: range(whole[g] - 1, least[g] - 1, -1) for g in groups}
    alone = [kept for g in groups if (kept := next(filter(flips, ({g: k} for k in options[g])), None))]
    if alone:
        return alone
    pairs = (
        islice(({a: k, b: n} for k, n in product(options[a], options[b])), PAIRS) for a, b in combinations(groups, 2)
    )
    return [kept for some in pairs if (kept := next(filter(flips, some), None))]
