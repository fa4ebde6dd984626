"""The registry of operator rules, and what a rule is given to work with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from secateur.channels.labels import Role, is_alive, with_alive

if TYPE_CHECKING:
    from secateur.channels.trace import Leaf, Watch

Rule = Callable[["Call"], None]
RULES: dict[str, Rule] = {}


class Uniform(Enum):
    """An axis along which all values are equal, by broadcasting or because the tensor was filled."""

    UNIFORM = "uniform"


UNIFORM = Uniform.UNIFORM
Axis = Tensor | Uniform | None
"""What is known of one axis: codes of its channels, UNIFORM, or None for an axis whose size never changes."""


@dataclass(slots=True)
class State:
    """What is known of one tensor."""

    axes: list[Axis]
    weights: bool = False
    """Made of parameters and buffers alone."""
    zero: bool = False
    """Filled with zeros."""
    origin: Leaf | None = None
    """The parameter or buffer that this is, perhaps seen through a view or a cast."""
    made: frozenset[str] = frozenset()
    """The layers that computed these values, by the names under which `Layers.filters` knows them."""
    bare: frozenset[str] = frozenset()
    """Those of them whose removed filters are zeros here, with no batch norm on the way."""


LOOKS = {"t", "transpose", "permute", "view", "_unsafe_view", "reshape"} | {
    "_to_copy",
    "alias",
    "detach",
    "clone",
    "repeat",
}
"""Operators whose result is still the parameter they are given."""
ONLY = "is the only filter of its layer"
PARTS = {"select", "unbind", "split", "unsqueeze", "expand"}
"""Operators whose results are zeros if they are given zeros: parts of them, or the same again and again."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register how the operators of these names carry labels; a name without `::` is aten's.

    Names, not operators: some exist in certain versions of torch only, or come with a package that is not imported yet.
    """

    def register(function: Rule) -> Rule:
        for name in names:
            full = name if "::" in name else f"aten::{name}"
            if full in RULES:
                raise ValueError(f"{full} already has a rule: {RULES[full].__name__}")
            RULES[full] = function
        return function

    return register


@dataclass(frozen=True)
class Operator:
    """What is known of an operator before it is called."""

    func: Any
    name: str
    rule: Rule | None
    arguments: dict[str, tuple[int, Any]]
    """Position and default of every argument by name."""
    written: tuple[str, ...]
    """The arguments it writes to."""
    shares_memory: bool
    """Whether results may be views of arguments."""
    looks_at_values: bool
    """Whether a result's shape, or what Python does next, depends on values."""

    def written_tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        values = []
        for name in self.written:
            position = self.arguments[name][0]
            values.append(args[position] if position < len(args) else kwargs.get(name))
        return tensors_in(values)

    @staticmethod
    def of(func: Any, fallback: Rule) -> Operator:
        """Look the operator up; `fallback` is the rule for operators that torch tags as pointwise."""
        schema = func._schema
        written = tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
        rule = RULES.get(schema.name, fallback if _is_pointwise(func) else None)
        if any(a.kwarg_only and a.name in written for a in schema.arguments):
            rule = None
        arguments = {a.name: (i, a.default_value) for i, a in enumerate(schema.arguments)}
        shares = any(a.alias_info is not None for a in schema.arguments)
        namespace, _, name = schema.name.partition("::")
        tags = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
        looks = namespace != "aten" or any(tag in func.tags for tag in tags)
        return Operator(func, name, rule, arguments, written, shares, looks)


def _is_pointwise(func: Any) -> bool:
    """Whether torch tags the operator as pointwise, or, if it works in place, the one that does not."""
    plain = getattr(torch.ops.aten, func.overloadpacket.__name__.rstrip("_"), None)
    plain = getattr(plain, func._overloadname, None)
    return torch.Tag.pointwise in func.tags or (plain is not None and torch.Tag.pointwise in plain.tags)


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Tensors among operator arguments or results, in order, one level of lists included."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(item for item in value if isinstance(item, Tensor))
    return found


class Call:
    """One operator call that has just run: arguments by name, result, and what is known of the tensors."""

    def __init__(
        self, watch: Watch, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], layout: Any, out: Any
    ) -> None:
        self.watch = watch
        self.table = watch.table
        self.operator = operator
        self.name = operator.name
        self.args = args
        self.kwargs = kwargs
        self.layout = layout
        """Shape and strides of the first tensor argument before the call, which may have changed them."""
        self.out = out
        self.tensors = tensors_in(args) + tensors_in(kwargs.values())
        """Every tensor among the arguments, lists included."""
        self.outputs = tensors_in(out if isinstance(out, (tuple, list)) else (out,))
        states = [state for t in self.tensors if (state := watch.state(t)) is not None]
        self.made = frozenset().union(*(state.made for state in states))
        """The layers that computed the result; as those of the arguments unless the rule knows better."""
        self.bare = frozenset().union(*(state.bare for state in states))

    def __getitem__(self, name: str) -> Any:
        position, default = self.operator.arguments[name]
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)

    def has(self, name: str) -> bool:
        return name in self.operator.arguments

    def axes(self, tensor: Tensor) -> list[Axis]:
        """A copy of what is known of the tensor's axes; an axis of size 1 is always UNIFORM."""
        state = self.watch.state(tensor)
        shape = self.layout[0] if tensor is self.tensors[0] else tensor.shape
        if state is None:
            return [UNIFORM if size == 1 else None for size in shape]
        return [UNIFORM if size == 1 else axis for size, axis in zip(shape, state.axes, strict=True)]

    def is_weights(self, tensor: Tensor) -> bool:
        state = self.watch.state(tensor)
        return state is not None and state.weights

    def trains(self, tensor: Tensor) -> bool:
        """Whether it is a parameter, or made of some."""
        state = self.watch.state(tensor)
        if state is None or not state.weights:
            return False
        return state.origin is None or isinstance(state.origin.tensor, nn.Parameter)

    def is_constant(self, tensor: Tensor) -> bool:
        """Whether it is a number of the code's own."""
        return tensor.dim() == 0 and not tensor.is_meta and self.watch.state(tensor) is None

    def is_zero(self, tensor: Tensor) -> bool:
        state = self.watch.state(tensor)
        return state is not None and state.zero

    def fixed(self, tensor: Tensor) -> str:
        """Words for a tensor whose size never changes: which operator got it, its size, and who made it."""
        state = self.watch.state(tensor)
        filters = self.watch.layers.filters
        layers = sorted({filters[name].site.module for name in state.made}) if state is not None else []
        others = f" and {len(layers) - 1} more" if len(layers) > 1 else ""
        made = f"by {layers[0] or 'the model itself'}{others}" if layers else "by no layer"
        if state is not None and state.weights:
            made = "of parameters and buffers"
        return f"a tensor of fixed size in {self.name}: one of {'x'.join(map(str, tensor.shape))}, made {made}"

    def put(self, tensor: Tensor, axes: list[Axis], zero: bool = False, consumes: bool = False) -> None:
        """Say what is known of a result; codes of an axis of size 1 are the only filter of a layer and stay.

        consumes: the operator has said itself which weights it consumes; else weights that meet data pass it on.
        """
        weights = bool(self.tensors) and all(self.is_weights(t) for t in self.tensors if t.dim() > 0)
        seen = self.watch.state(self.tensors[0]) if weights and self.name in LOOKS else None
        origin = seen.origin if seen is not None else None
        only = "is the only channel of a tensor" if origin is None else self.watch.located(ONLY)
        for index, (size, axis) in enumerate(zip(tensor.shape, axes, strict=True)):
            if isinstance(axis, Tensor) and size == 1:
                self.table.freeze(axis, only)
                axes[index] = UNIFORM
        if not weights and not consumes:
            for met in self.tensors:
                if self.is_weights(met):
                    for axis in self.axes(met):
                        if isinstance(axis, Tensor):
                            self.table.mark(axis, Role.PASSES)
        # What its own filters cannot switch off is no longer theirs.
        alive = any(isinstance(axis, Tensor) and bool(is_alive(axis).all()) for axis in axes) if self.bare else False
        bare = frozenset() if alive else self.bare
        zero = zero or (self.name in PARTS and self.is_zero(self.tensors[0]))
        self.watch.put(tensor, State(axes, weights, zero, origin, self.made, bare))

    def put_all(self, axes: list[Axis]) -> None:
        """The same axes for every result of that many dimensions; indices among them are never zero for sure."""
        for out in self.outputs:
            if out.dim() == len(axes):
                places = self.tensors[0].is_floating_point() and not (out.is_floating_point() or out.is_complex())
                self.put(out, all_alive(axes) if places else list(axes))

    def freeze(self, axis: Axis, reason: str) -> None:
        if isinstance(axis, Tensor):
            self.table.freeze(axis, self.watch.located(reason))

    def freeze_axes(self, tensor: Tensor, reason: str) -> None:
        for axis in self.axes(tensor):
            self.freeze(axis, reason)

    def tie_all(self, carried: list[Tensor]) -> None:
        """These go together; the result will be known by the first, so the others say now that they pass it on."""
        for other in carried[1:]:
            self.table.tie(carried[0], other)
            self.table.mark(other, Role.PASSES)

    def lose(self, axis: Axis, reason: str) -> Axis:
        """The axis goes on with a fixed size: whatever channels it carries stay."""
        self.freeze(axis, reason)
        return None

    def expose(self) -> None:
        """The result depends on all channels of the arguments: what has met no batch norm on its way never will."""
        self.watch.layers.exposed |= self.bare

    def mix(self, axis: Axis, reason: str) -> Axis:
        """An operator sees all channels of this axis at once: freeze them, or carry them as inexact if asked."""
        if not isinstance(axis, Tensor):
            return axis
        self.expose()
        if not self.watch.inexact:
            self.freeze(axis, reason)
            return None
        self.table.admit(axis, self.watch.located(reason))
        return axis


def all_alive(axes: list[Axis], alive: bool = True) -> list[Axis]:
    """The axes after something that sets every element: what is removed is non-zero then, or zero, as told."""
    return [with_alive(axis, alive) if isinstance(axis, Tensor) else axis for axis in axes]


def positive(dim: int, ndim: int) -> int:
    return dim + ndim if dim < 0 else dim
