"""What the code of a forward pass compares sizes with, and the widths at which a comparison comes out otherwise.

Labels do not see `if x.shape == y.shape` or `if x.shape[1] >= 64`: the code goes one way in the whole network, and at
other widths perhaps another. So the sizes that tensors report are integers that remember how they were computed, and
note what they are compared with. The probe then tries the widths at which each comparison flips.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import combinations, islice, product
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from secateur.channels.amounts import Amounts
from secateur.channels.bookkeeping import sizes_of
from secateur.channels.groups import ChannelGraph, ChannelGroup

Form = Any
"""How a number is computed: itself, `(axis,)` for a size, or an operator's name and the forms of its operands."""
MOST = 500
"""Comparisons that are noted, of which code may make any number."""
LONGEST = 50
"""Sizes and operators in one number; longer ones are forgotten."""
PAIRS = 4096
"""Pairs of widths that are tried for a comparison, in numbers alone."""


class Followed:
    """What a number has that is computed from sizes, and notes its comparisons."""

    plain: ClassVar[type]
    form: Form
    length: int
    noted: dict[Form, None]

    def __new__(cls, *args: Any) -> Any:
        """A plain number, for code that makes one of the type of another."""
        return cls.plain(*args)

    def __reduce__(self) -> tuple[type, tuple[Any]]:
        return self.plain, (self.plain(self),)

    def __bool__(self) -> bool:
        return self != 0


class Width(Followed, int):
    """A size, or an integer computed from sizes."""

    plain = int


class Ratio(Followed, float):
    """A floating-point number computed from sizes."""

    plain = float


OPERATORS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "neg", "pos", "abs", "invert")},
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "floordiv", "mod")},
    **{name: getattr(operator, f"__{name}__") for name in ("lshift", "rshift", "and", "or", "xor")},
    "pow": pow,
    "round": round,
    "floor": math.floor,
    "ceil": math.ceil,
    "trunc": math.trunc,
}
"""What numbers are computed and compared with, by the name of the method."""


def _watching(value: Any, form: Form, length: int, noted: dict[Form, None]) -> Any:
    """The same number, to be followed; other values as they are."""
    if type(value) not in (int, float):
        return value
    number: Any = int.__new__(Width, value) if type(value) is int else float.__new__(Ratio, value)
    number.form, number.length, number.noted = form, length, noted
    return number


def _plain(number: float) -> float:
    return int(number) if isinstance(number, int) else float(number)


def _following(kind: type[Width | Ratio], name: str, method_name: str) -> Callable[..., Any]:
    """The operator that notes a comparison, and follows the result of anything else."""
    plain, swapped, function = getattr(kind, method_name), method_name == f"__r{name}__", OPERATORS[name]

    def method(self: Width | Ratio, *others: Any) -> Any:
        # A floating-point number of another type, as of NumPy, decides itself what comes out.
        if not all(isinstance(other, int) or type(other) in (float, Ratio) for other in others):
            return plain(self, *others)
        numbers = (*others, self) if swapped else (self, *others)
        value = function(*map(_plain, numbers))
        # One that an earlier analysis has left somewhere is a plain number to this one.
        ours = [isinstance(n, (Width, Ratio)) and n.noted is self.noted for n in numbers]
        length = 1 + sum(n.length for n, own in zip(numbers, ours, strict=True) if own)
        form = (name, *(n.form if own else _plain(n) for n, own in zip(numbers, ours, strict=True)))
        if isinstance(value, bool) and len(self.noted) < MOST:
            self.noted[form] = None
        return value if length > LONGEST else _watching(value, form, length, self.noted)

    return method


def _dividing(self: Width | Ratio, other: Any) -> Any:
    return self // other, self % other


def _divided(self: Width | Ratio, other: Any) -> Any:
    return other // self, other % self


for _kind in (Width, Ratio):
    for _name in OPERATORS:
        for _method in (f"__{_name}__", f"__r{_name}__"):
            if _method in vars(_kind.plain):
                setattr(_kind, _method, _following(_kind, _name, _method))
    _kind.__divmod__, _kind.__rdivmod__ = _dividing, _divided  # pyright: ignore


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
        self._noted: dict[Form, None] = {}
        self._codes: dict[int, Tensor] = {}

    @contextmanager
    def noting(self, axes_of: Callable[[Tensor], Sequence[Any]]) -> Iterator[None]:
        """Let tensors report sizes that note what they are compared with.

        axes_of: the codes of a tensor's axes, something else for an axis without; empty for an unknown tensor.
        """
        plain_shape: Any = Tensor.shape
        plain_size: Any = Tensor.size
        plain_numel: Any = Tensor.numel

        def shape(tensor: Tensor) -> torch.Size:
            sizes, axes = plain_shape.__get__(tensor), axes_of(tensor)
            if len(axes) != len(sizes) or not any(isinstance(codes, Tensor) for codes in axes):
                return sizes
            return torch.Size([self._watched(*pair) for pair in zip(sizes, axes, strict=True)])

        def size(tensor: Tensor, dim: Any = None) -> Any:
            if dim is None:
                return shape(tensor)
            found, axes = plain_size(tensor, dim), axes_of(tensor)
            return self._watched(found, axes[dim]) if isinstance(dim, int) and len(axes) == tensor.dim() else found

        def numel(tensor: Tensor) -> int:
            return math.prod(shape(tensor)) if axes_of(tensor) else plain_numel(tensor)

        replaced = {"shape": property(shape), "size": size, "numel": numel, "nelement": numel}
        own = {name: vars(Tensor)[name] for name in replaced if name in vars(Tensor)}
        for name, value in replaced.items():
            setattr(Tensor, name, value)
        try:
            yield
        finally:
            for name in replaced:
                if name in own:
                    setattr(Tensor, name, own[name])
                else:
                    delattr(Tensor, name)

    def _watched(self, size: Any, codes: Any) -> Any:
        if not isinstance(codes, Tensor):
            return size
        self._codes[id(codes)] = codes
        return _watching(size, (id(codes),), 1, self._noted)

    def flips(self, graph: ChannelGraph, groups: Sequence[ChannelGroup]) -> list[Amounts]:
        """How much to cut of these groups for each comparison, where it can come out otherwise."""
        names = {group.name for group in groups}
        whole = {number: group.size for number, group in enumerate(graph.groups)}
        least = {number: group.at_least for number, group in enumerate(graph.groups) if group.name in names}
        axes: dict[int, Axis] = {}

        def resolved(form: Form) -> Form:
            if not isinstance(form, tuple):
                return form
            if form[0] in OPERATORS:
                return form[0], *map(resolved, form[1:])
            if form[0] not in axes:
                axes[form[0]] = _axis(self._codes[form[0]], graph)
            return axes[form[0]]

        asked = dict.fromkeys(map(resolved, self._noted))
        found = [kept for comparison in asked for kept in _flips(comparison, whole, least)]
        return [
            {group.name: group.size - kept.get(number, group.size) for number, group in enumerate(graph.groups)}
            for kept in found
        ]


@contextmanager
def layers_noting(model: nn.Module) -> Iterator[None]:
    """While tensors do, let torch's own layers keep such sizes too, as in `conv.out_channels`."""
    kept: list[tuple[dict[str, Any], str, int, Any]] = []
    for module in model.modules():
        sizes: dict[str, Any] = {}
        with suppress(AttributeError, LookupError):  # of a class that derives from a layer, but keeps other tensors
            sizes = sizes_of(module)
        for name, size in sizes.items():
            before = vars(module).get(name)
            if isinstance(size, Width) and type(before) is int and before == int(size):
                kept.append((vars(module), name, before, size))
                vars(module)[name] = size
    try:
        yield
    finally:
        for attributes, name, before, size in kept:
            if attributes.get(name) is size:
                attributes[name] = before


def _axis(codes: Tensor, graph: ChannelGraph) -> Axis:
    channels = graph.channels_at([codes])
    numbers, counts = graph.group_of[channels[channels >= 0]].unique(return_counts=True)
    parts = tuple((g, n // graph.groups[g].size) for g, n in zip(numbers.tolist(), counts.tolist(), strict=True))
    return Axis(codes.numel() - sum(each * graph.groups[g].size for g, each in parts), parts)


def _groups_in(form: Form) -> set[int]:
    if isinstance(form, Axis):
        return {group for group, _ in form.parts}
    return set[int]().union(*map(_groups_in, form[1:])) if isinstance(form, tuple) else set()


def _value(form: Form, kept: Mapping[int, int]) -> Any:
    if isinstance(form, Axis):
        return form.size(kept)
    if isinstance(form, tuple):
        return OPERATORS[form[0]](*(_value(operand, kept) for operand in form[1:]))
    return form


def _flips(comparison: Form, whole: Mapping[int, int], least: Mapping[int, int]) -> list[dict[int, int]]:
    """As many channels as may stay where the comparison comes out otherwise: by cutting one group, or else two."""
    before = _value(comparison, whole)

    def flips(kept: Mapping[int, int]) -> bool:
        with suppress(ArithmeticError, TypeError, ValueError):  # a division by zero, or the root of a negative number
            return _value(comparison, {**whole, **kept}) != before
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
