"""Watch a network run: every operator call is seen, none is changed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from secateur.channels.labels import LabelTable, labels_of
from secateur.channels.memory import Memory, same_axes
from secateur.channels.rules import Axis, Call, State
from secateur.channels.rules.registry import Operator, Rule, tensors_in
from secateur.channels.rules.ties import pointwise
from secateur.channels.shapes import PRODUCTS, EagerMode, has_mask, shape_only
from secateur.channels.sites import Layers

COUNTER = itertools.count()


@dataclass
class Leaf:
    """A parameter or buffer, with the codes of every axis."""

    name: str
    tensor: Tensor
    state: State
    used: bool = False
    written: bool = False
    """Whether the forward pass changes it, under its own name or another."""


Attribute = tuple[str, str]
"""Name of a module and of its attribute."""


@dataclass
class SizeNote:
    """An attribute of a module that equals the number of channels on some axis."""

    module: str
    attribute: str
    position: int | None
    """Index into the attribute if it is a list or tuple."""
    codes: Tensor


@dataclass
class Product:
    """Multiply-adds of one operator call: `volume` times the sizes of up to three axes."""

    module: str
    kind: str
    volume: int
    sizes: list[int]
    axes: list[Axis]


LAYER_SIZES = ("in_channels", "out_channels", "in_features", "out_features")


class Watch(EagerMode):
    """Follows labels through every operator that runs while it is active."""

    def __init__(self, model: nn.Module, inexact: bool) -> None:
        super().__init__()
        self.table = LabelTable()
        self.inexact = inexact
        self.shapes_only = False
        """Give convolutions and matrix products zeros for results: what runs is seen at a fraction of the time."""
        self.values_matter = False
        """Whether code looked at values, and might have gone another way for others."""
        self.training_matters = False
        """Whether code may run differently in training mode."""
        self.products: list[Product] = []
        self.notes: list[SizeNote] = []
        self.borders: list[tuple[Tensor, str, list[set[Attribute]], int]] = []
        """Channels that stay, and why, if of these sets of attributes more than so many count nothing after all."""
        self.squeezed: list[Tensor] = []
        """Axes that would vanish with all but one index gone."""
        self.failures: list[str] = []
        self.leaves: dict[int, Leaf] = {}
        self.modules = {id(module): name for name, module in reversed(list(model.named_modules()))}
        self.ran = {""}
        """Names of the modules that have run."""
        self.layers = Layers(model, self.modules)
        # Tensors that were kept from an earlier analysis are strangers to this one.
        self._mark = f"_secateur_{next(COUNTER)}"
        self._stack: list[nn.Module] = [model]
        self._given: dict[int, Tensor] = {}
        """The channels that recurrent modules are given."""
        self._memory = Memory(self)
        self._operators: dict[Any, Operator] = {}
        self._woken: list[tuple[Tensor, str]] = []
        tensors = {id(t): (name, t) for name, t in reversed([*model.named_parameters(), *model.named_buffers()])}
        sizes = [size for _, tensor in reversed(tensors.values()) for size in tensor.shape]
        codes = iter(self.table.allocate(sum(sizes)).split(sizes))
        self.table.num_slices = self.table.size
        for name, tensor in reversed(tensors.values()):
            axes: list[Axis] = [next(codes) for _ in tensor.shape]
            leaf = self.leaves[id(tensor)] = Leaf(name, tensor, State(axes, weights=True))
            leaf.state.origin = leaf
        strided = [leaf for leaf in self.leaves.values() if leaf.tensor.layout is torch.strided]
        self._homes = {leaf.tensor.untyped_storage()._cdata: leaf for leaf in strided}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operator = self._operators.get(func) or self._operators.setdefault(func, Operator.of(func, pointwise))
        if operator.rule is None:
            with self:
                decomposed = func.decompose(*args, **kwargs)
            if decomposed is not NotImplemented:
                return decomposed
        inputs = tensors_in(args) + tensors_in(kwargs.values())
        if operator.looks_at_values and (operator.name != "index" or has_mask(args[1])):
            self.values_matter = True
        known = [state for t in inputs if (state := self.state(t)) is not None]
        written = [(t, self.state(t)) for t in operator.written_tensors(args, kwargs)]
        layout = (inputs[0].shape, inputs[0].stride()) if inputs else None
        out = shape_only(operator.name, args) if self.shapes_only else None
        out = func(*args, **kwargs) if out is None else out
        if known or not inputs or operator.name in PRODUCTS or operator.name.startswith("new_"):
            call = Call(self, operator, args, kwargs, layout, out)
            if operator.rule is not None:
                self._follow(operator.rule, call)
            else:
                self._give_up(call, f"operator {func} is unknown")
        for tensor, before in written:
            self._memory.settle(tensor, before)
            if (
                tensor.layout is torch.strided
                and (leaf := self._homes.get(tensor.untyped_storage()._cdata)) is not None
            ):
                leaf.written = True
        if operator.shares_memory:
            self._memory.relate([*inputs, *tensors_in(out if isinstance(out, (tuple, list)) else (out,))])
        return out

    def _follow(self, rule: Rule, call: Call) -> None:
        """Apply a rule; a call that it was not made for is treated as unknown."""
        try:
            rule(call)
        except (
            ArithmeticError,
            AssertionError,
            LookupError,
            RuntimeError,
            StopIteration,
            TypeError,
            ValueError,
        ) as error:
            self.failures.append(
                f"operator {call.operator.func} could not be followed: {type(error).__name__}: {error}"
            )
            self._give_up(call, f"operator {call.operator.func} could not be followed")

    def _give_up(self, call: Call, reason: str) -> None:
        """Nothing is known of what this call does: all channels involved stay, so that no size changes."""
        for tensor in call.tensors:
            self.freeze(self.state(tensor), self.located(reason))
        for tensor in [*call.outputs, *call.operator.written_tensors(call.args, call.kwargs)]:
            self.put(tensor, State([None] * tensor.dim()))

    def leaf(self, name: str) -> Leaf:
        return next(leaf for leaf in self.leaves.values() if leaf.name == name)

    def is_idle(self, leaf: Leaf) -> bool:
        """Whether it is a buffer that its module has run without, as one that only a loss reads."""
        return not isinstance(leaf.tensor, nn.Parameter) and leaf.name.rpartition(".")[0] in self.ran

    def freeze(self, state: State | None, reason: str) -> None:
        """Whatever channels a tensor carries stay."""
        for axis in state.axes if state is not None else ():
            if isinstance(axis, Tensor):
                self.table.freeze(axis, reason)

    def state(self, tensor: Tensor) -> State | None:
        leaf = self.leaves.get(id(tensor))
        if leaf is not None:
            leaf.used = True
            return leaf.state
        return tensor.__dict__.get(self._mark)

    def put(self, tensor: Tensor, state: State) -> None:
        """Remember what is known of an operator's result."""
        if id(tensor) not in self.leaves:
            setattr(tensor, self._mark, state)
        elif not same_axes(self.leaves[id(tensor)].state.axes, state.axes):
            self._memory.forget([tensor], [state])

    def located(self, reason: str) -> str:
        name = self.modules.get(id(self._stack[-1]), "")
        return f"{reason} (in {name})" if name else reason

    def wake(self, codes: Tensor, operator: str) -> None:
        """Remember which operator made these elements non-zero although their channel is gone."""
        if codes.numel():
            self._woken.append((labels_of(codes), self.located(f" after {operator}")))

    def woken_by(self, code: Tensor) -> str:
        return next((text for labels, text in reversed(self._woken) if bool((labels == labels_of(code)).any())), "")

    def count(self, call: Call, volume: int, factors: list[tuple[Axis, int]]) -> None:
        """Record the multiply-adds of a call: a number times the sizes of these axes."""
        axes, sizes = [axis for axis, _ in factors], [size for _, size in factors]
        name = self.modules.get(id(self._stack[-1]), "")
        self.products.append(Product(name, call.name, volume, sizes, axes))

    def add_filters(self, weight: Tensor, codes: Axis, bias: Tensor | None, along: bool) -> str:
        """A layer has run: remember it among `layers`."""
        leaf = self._origin(weight)
        trains = weight.requires_grad if leaf is None else leaf.tensor.requires_grad
        return self.layers.add_filters(self._stack[-1], leaf, trains, codes, self._uncast(bias), along)

    def add_norm(self, codes: Axis, weight: Tensor | None, bias: Tensor | None) -> None:
        """A norm of each channel alone has run: remember it among `layers`."""
        bare = weight is None and bias is None
        self.layers.add_norm(self._stack[-1], self._origin(weight), codes, self._uncast(bias), bare)

    def _origin(self, tensor: Tensor | None) -> Leaf | None:
        state = self.state(tensor) if tensor is not None else None
        return state.origin if state is not None else None

    def _uncast(self, tensor: Tensor | None) -> Tensor | None:
        """The parameter itself, where the tensor is a view or a cast of one."""
        leaf = self._origin(tensor)
        return leaf.tensor if leaf is not None else tensor

    def note_size(self, axis: Axis, size: int, around: bool = False) -> set[Attribute]:
        """Note attributes of the running module that equal this number of channels.

        around: those of the modules that it runs in, too.
        """
        noted: set[Attribute] = set()
        for module in self._stack if around else self._stack[-1:]:
            if isinstance(axis, Tensor):
                others = self._others(module, axis)
                equal = [name for name, value in vars(module).items() if type(value) is int and value == size]
                noted |= self._note(module, [name for name in equal if name not in others], None, axis)
        return noted

    def _others(self, module: nn.Module, axis: Tensor) -> tuple[str, ...]:
        """Attributes of torch's own modules that do not count this axis, although they may equal its length."""
        if isinstance(module, (_ConvNd, nn.Linear)):
            return LAYER_SIZES  # they follow the weight
        given = self._given.get(id(module))
        if given is None:
            return ()
        return ("hidden_size",) if torch.equal(labels_of(axis), labels_of(given)) else ("input_size",)

    def note_sizes(self, axes: list[Axis], sizes: list[int]) -> set[Attribute]:
        """The same for attributes that are lists or tuples of sizes."""
        found = [
            name
            for name, value in vars(self._stack[-1]).items()
            if isinstance(value, (list, tuple)) and all(type(v) is int for v in value) and list(value) == sizes
        ]
        noted: set[Attribute] = set()
        for position, axis in enumerate(axes):
            if isinstance(axis, Tensor):
                noted |= self._note(self._stack[-1], found, position, axis)
        return noted

    def _note(self, module: nn.Module, attributes: list[str], position: int | None, codes: Tensor) -> set[Attribute]:
        name = self.modules.get(id(module))
        if name is None:
            return set()
        self.notes.extend(SizeNote(name, attribute, position, codes) for attribute in attributes)
        return {(name, attribute) for attribute in attributes}

    def unnamed_without(self, attributes: set[Attribute]) -> list[tuple[Tensor, str]]:
        """Channels with a border between them that only these attributes could tell, and the reason why they stay."""
        return [
            (codes, reason)
            for codes, reason, named, spare in self.borders
            if sum(names <= attributes for names in named) > spare
        ]

    def forget_notes(self, attributes: set[Attribute]) -> None:
        """These equal a number of channels by chance."""
        for codes, reason in self.unnamed_without(attributes):
            self.table.freeze(codes, reason)
        self.notes = [note for note in self.notes if (note.module, note.attribute) not in attributes]

    @contextmanager
    def following_modules(self) -> Iterator[None]:
        """Know which module is running, by hooks that are not the model's."""

        def enter(module: nn.Module, args: Any) -> None:
            self._stack.append(module)
            recurrent = isinstance(module, nn.RNNBase) and args and isinstance(args[0], Tensor)
            given = self.state(args[0]) if recurrent else None
            if given is not None and isinstance(given.axes[-1], Tensor):
                self._given[id(module)] = given.axes[-1]
            self.ran.add(self.modules.get(id(module), ""))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._stack.pop()

        def read_training(module: nn.Module) -> bool:
            # Torch's own norms and dropouts run the same operators in both modes, as far as channels go.
            known = type(module).__module__.startswith("torch.nn.") and isinstance(module, (_NormBase, _DropoutNd))
            self.training_matters |= not known
            return vars(module)["training"]

        depth = len(self._stack)
        hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
        # A property of the class goes before the instance's own entry, which stays what it is.
        nn.Module.training = property(read_training, lambda module, value: vars(module).update(training=value))  # pyright: ignore
        try:
            with escapes_seen(self):
                yield
        finally:
            del nn.Module.training
            for hook in hooks:
                hook.remove()
            del self._stack[depth:]


@contextmanager
def escapes_seen(watch: Watch) -> Iterator[None]:
    """Notice tensors that leave for Python by ways that are no operators."""

    def wrapped(original: Any) -> Any:
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            watch.values_matter = True
            watch.freeze(watch.state(tensor), watch.located("is read by Python code"))
            return original(tensor, *args, **kwargs)

        return read

    def replace(tensor: Tensor, value: Tensor) -> None:
        state = watch.state(value)
        watch.put(tensor, State([None] * value.dim()) if state is None else state)
        original_data.__set__(tensor, value)

    own = dict(vars(Tensor))
    original_data: Any = Tensor.data
    names = ("tolist", "numpy", "__array__", "__dlpack__", "data_ptr")
    for name in names:
        setattr(Tensor, name, wrapped(getattr(Tensor, name)))
    Tensor.data = property(original_data.__get__, replace)  # pyright: ignore
    try:
        yield
    finally:
        for name in (*names, "data"):
            if name in own:
                setattr(Tensor, name, own[name])
            else:
                delattr(Tensor, name)
