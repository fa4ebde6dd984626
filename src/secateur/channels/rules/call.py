"""What a rule is given to work with: one operator call, and all that a rule can do about it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from secateur.channels.attributes import Border
from secateur.channels.labels import Role, any_alive, is_alive, with_alive
from secateur.channels.reasons import Kind, Reason

if TYPE_CHECKING:
    from secateur.channels.rules.registry import Operator
    from secateur.channels.trace import Leaf, Watch


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


LOOKS = {
    "t",
    "transpose",
    "permute",
    "view",
    "_unsafe_view",
    "reshape",
    "_to_copy",
    "alias",
    "detach",
    "clone",
    "repeat",
}
"""Operators whose result is still the parameter they are given."""
PARTS = {"select", "unbind", "split", "unsqueeze", "expand"}
"""Operators whose results are zeros if they are given zeros: parts of them, or the same repeated."""


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
    """One operator call that has just run. A rule reads it and acts through these methods alone.

    Read the call: `call["self"]`, `has`, `name`, `tensors`, `out`, `outputs`, `layout`, `inexact`.
    What is known of its arguments: `axes`, `is_weights`, `is_zero`, `is_constant`, `trains`, `has_slices`, `has_zeros`.
    What is known of its results: `put`, `put_all`; codes for new elements: `new_zeros`, `new_fixed`, `join`.
    Couple channels: `tie`, `tie_all`, and say what they do: `mark`, `produce`, `consume`.
    Keep channels: `freeze`, `freeze_axes`, `lose`, `meet_fixed`, `mix`, `expose`, `wake`, `squeeze`.
    Sizes that the code states: `sized`, `sized_parts`, `parted`, `counts`.
    Layers: `made_by`, `drop_filters`, `normalise`, `count_macs`, `use_batch`.
    """

    def __init__(
        self, watch: Watch, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], layout: Any, out: Any
    ) -> None:
        self._watch = watch
        self._table = watch.table
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
        self._made = frozenset().union(*(state.made for state in states))
        self._bare = frozenset().union(*(state.bare for state in states))

    # What the call was, and what is known of its tensors.

    def __getitem__(self, name: str) -> Any:
        position, default = self.operator.arguments[name]
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)

    def has(self, name: str) -> bool:
        return name in self.operator.arguments

    @property
    def inexact(self) -> bool:
        """Whether channels may be cut where removing is not zeroing."""
        return self._watch.inexact

    def axes(self, tensor: Tensor) -> list[Axis]:
        """A copy of what is known of the tensor's axes; an axis of size 1 is always UNIFORM."""
        state = self._watch.state(tensor)
        shape = self.layout[0] if tensor is self.tensors[0] else tensor.shape
        if state is None:
            return [UNIFORM if size == 1 else None for size in shape]
        return [UNIFORM if size == 1 else axis for size, axis in zip(shape, state.axes, strict=True)]

    def is_weights(self, tensor: Tensor) -> bool:
        """Whether it is made of parameters and buffers alone."""
        state = self._watch.state(tensor)
        return state is not None and state.weights

    def trains(self, tensor: Tensor) -> bool:
        """Whether it is a parameter, or made of some."""
        state = self._watch.state(tensor)
        if state is None or not state.weights:
            return False
        return state.origin is None or isinstance(state.origin.tensor, nn.Parameter)

    def is_constant(self, tensor: Tensor) -> bool:
        """Whether it is a single number that the code states."""
        return tensor.dim() == 0 and not tensor.is_meta and self._watch.state(tensor) is None

    def is_zero(self, tensor: Tensor) -> bool:
        state = self._watch.state(tensor)
        return state is not None and state.zero

    def has_slices(self, axis: Axis) -> bool:
        """Whether the axis has channels of a parameter or buffer."""
        return isinstance(axis, Tensor) and self._table.has_slices(axis)

    def has_zeros(self, codes: Tensor) -> bool:
        """Whether zeros that the code has put next to channels are among these."""
        return bool(self._table.zeros_among(codes))

    # Results.

    def put(self, tensor: Tensor, axes: list[Axis], zero: bool = False, consumes: bool = False) -> None:
        """Say what is known of a result; codes of an axis of size 1 are an only channel and stay.

        consumes: the rule has said itself which weights consume; else weights that meet data pass it on.
        """
        weights = bool(self.tensors) and all(self.is_weights(t) for t in self.tensors if t.dim() > 0)
        seen = self._watch.state(self.tensors[0]) if weights and self.name in LOOKS else None
        for index, (size, axis) in enumerate(zip(tensor.shape, axes, strict=True)):
            if isinstance(axis, Tensor) and size == 1:
                self.freeze(axis, Kind.ONLY)
                axes[index] = UNIFORM
        if not weights and not consumes:
            for met in self.tensors:
                if self.is_weights(met):
                    for axis in self.axes(met):
                        self.mark(axis, Role.PASSES)
        # What its own filters cannot switch off is no longer theirs.
        alive = any(isinstance(axis, Tensor) and bool(is_alive(axis).all()) for axis in axes) if self._bare else False
        bare = frozenset() if alive else self._bare
        zero = zero or (self.name in PARTS and self.is_zero(self.tensors[0]))
        origin = seen.origin if seen is not None else None
        self._watch.put(tensor, State(axes, weights, zero, origin, self._made, bare))

    def put_all(self, axes: list[Axis]) -> None:
        """The same axes for every result of that many dimensions; indices among them are never zero for sure."""
        for out in self.outputs:
            if out.dim() == len(axes):
                places = self.tensors[0].is_floating_point() and not (out.is_floating_point() or out.is_complex())
                self.put(out, all_alive(axes) if places else list(axes))

    def new_fixed(self, count: int) -> Tensor:
        """Codes for channels of fixed number that no parameter makes, next to others that are made by some."""
        codes = self._table.allocate(count)
        self.meet_fixed(codes)
        return codes

    def new_zeros(self, counts: Sequence[int], beside: bool = True) -> list[Tensor]:
        """Codes for zeros that the code makes, perhaps as many as an attribute says.

        beside: they lie next to channels. Where there are equally many on all sides they stay so.
        """
        blocks = [self._table.allocate(count) for count in counts]
        for block in blocks:
            self.sized(block, around=True)
        if beside and len(set(counts)) == 1:
            self.tie_all(blocks)
            self._table.zeros.append(torch.cat(blocks))
        elif beside:
            self._table.zeros += blocks
        return blocks

    def join(self, parts: list[Tensor]) -> Tensor:
        """The codes of an axis that is put together; of zeros from several places only the sum shows in its size."""
        codes = torch.cat(parts)
        zeros = self._table.zeros_among(codes)
        for block in zeros if len(zeros) > 1 else ():
            self.freeze(block, Kind.UNSUPPORTED, "zeros in several places")
        return codes

    # Couple channels, and say what they do.

    def tie(self, codes: Tensor, others: Tensor) -> None:
        """Index by index, these go together; `others` may be a column or a row that is repeated."""
        self._table.tie(codes, others)

    def tie_all(self, carried: Sequence[Tensor]) -> None:
        """These go together; the result will be known by the first, so the others say now that they pass it on."""
        for other in carried[1:]:
            self.tie(carried[0], other)
            self.mark(other, Role.PASSES)

    def mark(self, axis: Axis, role: Role) -> None:
        if isinstance(axis, Tensor):
            self._table.mark(axis, role)

    def produce(self, weight: Tensor, dim: int, axis: Axis) -> None:
        """The filters of a layer lie along this dimension of its weight; an only one stays."""
        state = self._watch.state(weight)
        if state is None or not state.weights:
            return
        self.mark(axis, Role.PRODUCES)
        if not isinstance(axis, Tensor) and weight.shape[dim] == 1:
            # A view, as linear layers take of their weight, has no codes for an axis of size 1; the weight has.
            axes = [state.axes[dim], *(state.origin.state.axes if state.origin is not None else ())]
            only = next((axis for axis in axes if isinstance(axis, Tensor) and axis.numel() == 1), None)
            self.mark(only, Role.PRODUCES)
            self.freeze(only, Kind.ONLY)

    def consume(self, codes: Tensor) -> None:
        """These elements are summed up; the ones that are not zero without their channel must stay."""
        self.expose()
        if any_alive(codes):
            alive = codes[is_alive(codes)]
            self.freeze(alive, Kind.NOT_ZERO, self._watch.woken_by(alive[0]) or "another operator")

    # Keep channels.

    def freeze(self, axis: Axis, kind: Kind, detail: str | None = None) -> None:
        """Whatever channels this axis carries stay; the detail is the operator's name unless another is given."""
        if isinstance(axis, Tensor):
            self._table.freeze(axis, self._reason(kind, detail))

    def freeze_axes(self, tensor: Tensor, kind: Kind) -> None:
        for axis in self.axes(tensor):
            self.freeze(axis, kind)

    def lose(self, axis: Axis, kind: Kind, detail: str | None = None) -> Axis:
        """From here on the axis has a fixed size: whatever channels it carries stay."""
        self.freeze(axis, kind, detail)
        return None

    def meet_fixed(self, axis: Axis, tensor: Tensor | None = None) -> None:
        """The axis meets a tensor of fixed size: the reason says its size, and who made it."""
        if not isinstance(axis, Tensor):
            return
        detail = self.name
        if tensor is not None:
            state = self._watch.state(tensor)
            filters = self._watch.layers.filters
            layers = sorted({filters[name].site.module for name in state.made}) if state is not None else []
            others = f" and {len(layers) - 1} more" if len(layers) > 1 else ""
            made = f"by {layers[0] or 'the model itself'}{others}" if layers else "by no layer"
            if state is not None and state.weights:
                made = "of parameters and buffers"
            detail += f": {'x'.join(map(str, tensor.shape))}, made {made}"
        self.freeze(axis, Kind.FIXED_TENSOR, detail)

    def mix(self, axis: Axis, detail: str | None = None, kind: Kind = Kind.MIXES) -> Axis:
        """The operator combines the channels of this axis: freeze them, or carry them as inexact if allowed."""
        if not isinstance(axis, Tensor):
            return axis
        self.expose()
        if not self.inexact:
            return self.lose(axis, kind, detail)
        self._table.admit(axis, self._reason(kind, detail))
        return axis

    def wake(self, codes: Tensor) -> None:
        """The operator makes these elements non-zero although their channel is gone."""
        self._watch.wake(codes, self.name)

    def squeeze(self, axis: Axis) -> None:
        """The axis would vanish with all but one index gone."""
        if isinstance(axis, Tensor):
            self._watch.squeezed.append(axis)

    def use_batch(self) -> None:
        """Training mode may treat channels differently, so that it must be watched too."""
        self._watch.training_matters = True

    def _reason(self, kind: Kind, detail: str | None) -> Reason:
        return self._watch.reason(kind, self.name.strip("_").removeprefix("native_") if detail is None else detail)

    def expose(self) -> None:
        """The result depends on all channels of the arguments: what has met no batch norm so far never will."""
        self._watch.layers.exposed |= self._bare

    # Sizes that the code states.

    def counts(self, attribute: str, axis: Axis) -> bool:
        """Whether the running module keeps the size of this axis under that name; the name then follows the cut."""
        return isinstance(axis, Tensor) and self._watch.counts(attribute, axis)

    def sized(self, axis: Axis, around: bool = False) -> None:
        """The code states the size of this axis, perhaps by an attribute of the running module.

        around: or of one of the modules that it runs in.
        """
        if isinstance(axis, Tensor):
            self._watch.place(axis, around)

    def sized_parts(self, axes: Sequence[Axis], sizes: Sequence[int]) -> None:
        """The same for the sizes of several axes, which may be one attribute: a list or a tuple."""
        for position, axis in enumerate(axes):
            if isinstance(axis, Tensor):
                self._watch.place(axis, sizes=tuple(sizes), position=position)

    def parted(self, axis: Tensor, parts: Sequence[Tensor], spare: int) -> None:
        """The code parts an axis at places that it states: the channels stay, unless attributes say where.

        spare: how many of the parts need no attribute.
        """
        sizes = tuple(part.numel() for part in parts)
        places = [self._watch.place(part, sizes=sizes, position=index) for index, part in enumerate(parts)]
        self._watch.borders.append(Border(axis, self._reason(Kind.FIXED_PARTS, None), places, spare))

    # Layers.

    def made_by(
        self, weight: Tensor, codes: Axis, bias: Tensor | None, along: bool = True, carries: bool = False
    ) -> None:
        """The result comes from the filters of this weight.

        along: these are the codes of one axis of the weight, the one along which its filters lie.
        carries: each filter reads its own channel alone, so that what made the argument shows in the result.
        """
        if carries and not self.trains(weight):
            return  # a blur
        if self.is_weights(weight) and not all(self.is_weights(t) for t in self.tensors):
            name = self._watch.add_filters(weight, codes, bias, along)
            if self._watch.layers.filters[name].trains:
                self._made = frozenset({name})
            self._bare = frozenset({name}) | (self._bare if carries else frozenset())

    def drop_filters(self) -> None:
        """The filters that made the arguments no longer show in the result."""
        self._bare = frozenset()

    def normalise(self, codes: Axis, weight: Tensor | None, bias: Tensor | None) -> None:
        """A norm of each channel alone, which takes out the scale of what comes in."""
        self._watch.add_norm(codes, weight, bias)
        self._bare = frozenset()

    def count_macs(self, volume: int, factors: list[tuple[Axis, int]]) -> None:
        """Record the multiply-adds of this call: a number times the sizes of these axes."""
        self._watch.count(self.name, volume, factors)


def all_alive(axes: list[Axis], alive: bool = True) -> list[Axis]:
    """The axes after an operator that sets every element: removed ones are non-zero then, or zero if not `alive`."""
    return [with_alive(axis, alive) if isinstance(axis, Tensor) else axis for axis in axes]


def positive(dim: int, ndim: int) -> int:
    return dim + ndim if dim < 0 else dim
