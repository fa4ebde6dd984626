"""The rows of the table of rules: operators, a snippet that calls them, and the channels it couples or freezes.

A snippet runs between a convolution with eight filters, `first`, and a 1x1 convolution, `last` (see sandwich.py). It
takes the model, for its parameters, and the feature map `x` of shape (2, 8, 6, 6).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from sandwich import rows
from torch import Tensor, nn

from secateur.channels.reasons import Kind

Body = Callable[..., Any]
Group = dict[str, list[list[int]]]
"""By layer or parameter: the filters, or elements, of each channel of a group."""

EIGHT = rows(range(8))
HALVES = rows(range(4), range(4, 8))
PAIRS = rows(range(0, 8, 2), range(1, 8, 2))
MIRRORED = rows(range(4), range(7, 3, -1))

# Why channels are frozen.
MIXES = Kind.MIXES
IN_NORM = Kind.IN_NORM
ADDRESSED = Kind.INDEXED
PARTED = Kind.FIXED_PARTS
NO_RULE = Kind.UNSUPPORTED
MERGED = Kind.MERGED
FIXED = Kind.FIXED_TENSOR
PYTHON = Kind.READ_BY_PYTHON
WOKEN = Kind.NOT_ZERO
UNDEFINED = Kind.UNDEFINED


@dataclass(frozen=True)
class Expected:
    """What the analysis should find."""

    groups: list[Group]
    stays: dict[str, Kind | None] = field(default_factory=dict)
    """Why a layer is frozen; None for any reason."""
    inexact: bool = False
    """Whether channels of `first` can be removed with `inexact=True`."""


FREE = Expected([{"first": EIGHT}])
TIED = Expected([{"first": EIGHT, "side": EIGHT}])
APART = Expected([{"first": EIGHT}, {"side": EIGHT}])


def coupled(*groups: Group) -> Expected:
    return Expected(list(groups))


def frozen(reason: Kind | None, *groups: Group, layer: str = "first") -> Expected:
    """A layer is frozen for this reason, or for any if None; only these groups can be removed."""
    return Expected(list(groups), {layer: reason})


def inexact(reason: Kind) -> Expected:
    return Expected([], {"first": reason}, inexact=True)


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    operators: str
    """Names, separated by spaces; `aten::` may be left out."""
    body: Body
    expected: Expected = FREE
    inner: int = 8
    """Channels that the snippet returns; 0 if there is no `last`."""
    parts: dict[str, Any] = field(default_factory=dict)
    """Layers and parameters of the model that the snippet uses."""
    cost: bool = False
    """Whether to compare the cost with torch's own count."""
    note: str = ""
    """What tells this row from others of the same operator."""
    wrong: str = ""
    """What is wrong with the rule: the row is expected to fail."""

    @property
    def names(self) -> set[str]:
        return {name if "::" in name else f"aten::{name}" for name in self.operators.split()}


def aten(name: str) -> Callable[..., Any]:
    """The operator, looked up when it is called: not every version of torch has all of them."""
    return lambda *args, **options: getattr(torch.ops.aten, name)(*args, **options)


def calling(name: str, *args: Any) -> Body:
    """A snippet that calls the operator on x with these arguments."""
    return lambda m, x: aten(name)(x, *args)


def each(
    names: str, make: Callable[[Callable[..., Any]], Body], expected: Expected = FREE, **options: Any
) -> list[Row]:
    """A row for each of these operators; `make` turns an operator into a snippet."""
    return [Row(name, make(aten(name)), expected, **options) for name in names.split()]


def gated(body: Body) -> Body:
    """x times the result of the snippet: zero stays zero."""
    return lambda m, x: x * body(m, x)


def inferring(body: Body) -> Body:
    """In inference mode, where torch does not decompose composite operators before they are seen."""

    def run(m: nn.Module, x: Tensor) -> Any:
        with torch.inference_mode():
            return body(m, x)

    return run


def picked(body: Body, index: int = 0) -> Body:
    """One of several results."""
    return lambda m, x: body(m, x)[index]


def along_line(body: Body) -> Body:
    """The snippet on x of shape (2, 8, 36)."""
    return lambda m, x: image(body(m, x.flatten(2)))


def in_volume(body: Body) -> Body:
    """The snippet on x of shape (2, 8, 2, 3, 6)."""
    return lambda m, x: image(body(m, x.unflatten(2, (2, 3))))


def channels_last(body: Body) -> Body:
    """The snippet on x of shape (2, 6, 6, 8)."""
    return lambda m, x: body(m, x.movedim(1, -1)).movedim(-1, 1)


def image(x: Tensor) -> Tensor:
    """(N, C, ...) as (N, C, H, 1)."""
    return x.flatten(2)[..., None] if x.dim() > 2 else x[..., None, None]


def side(**others: Any) -> dict[str, Any]:
    """A second convolution with eight filters, and other parts."""
    return {"side": nn.Conv2d(8, 8, 1), **others}
