"""Watch a forward pass: follow labels through every operator call."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import (
    _global_forward_hooks_with_kwargs,
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from secateur.channels.attributes import Border, Place
from secateur.channels.comparisons import Comparisons
from secateur.channels.constants import Constants
from secateur.channels.flow import Flow
from secateur.channels.labels import LabelTable, labels_of
from secateur.channels.memory import Memory, same_axes
from secateur.channels.reasons import Kind, Reason
from secateur.channels.rules.call import Axis, Call, State, tensors_in
from secateur.channels.rules.registry import Operator, Rule
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


@dataclass
class Product:
    """Multiply-adds of one operator call: `volume` times the sizes of up to three axes."""

    module: str
    kind: str
    volume: int
    sizes: list[int]
    axes: list[Axis]


class Watch(EagerMode):
    """Follows labels through every operator that runs while it is active."""

    def __init__(self, model: nn.Module, inexact: bool) -> None:
        super().__init__()
        self.table = LabelTable()
        self.inexact = inexact
        self.shapes_only = False
        """Whether convolutions and matrix products return zeros, which is faster."""
        self.values_matter = False
        """Whether the code depends on values, and may take other branches for others."""
        self.training_matters = False
        """Whether the code may run differently in training mode."""
        self.asked_training: set[str] = set()
        """Names of the modules whose code asks for the mode."""
        self.products: list[Product] = []
        self.places: list[Place] = []
        self.borders: list[Border] = []
        self.comparisons = Comparisons()
        self.sizes_noted = True
        """Whether sizes note what they are compared with."""
        self.counted: list[tuple[str, str, Tensor]] = []
        """Modules and attributes of which it is known that they count these channels."""
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
        self._memory = Memory(self)
        self._operators: dict[Any, Operator] = {}
        self._in_operator = False
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
        self.flow = Flow(self.leaves)
        """What the pass that runs now, or the last one, computes from what."""
        self.constants = Constants(model, f"{self._mark}_constant")
        """What it reads that no input and no training changes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outer, self._in_operator = self._in_operator, True
        try:
            return self._run(func, args, kwargs or {})
        finally:
            self._in_operator = outer

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        operator = self._operators.get(func) or self._operators.setdefault(func, Operator.of(func, pointwise))
        if operator.rule is None:
            with self:
                decomposed = func.decompose(*args, **kwargs)
            if decomposed is not NotImplemented:
                return decomposed
        inputs = tensors_in(args) + tensors_in(kwargs.values())
        looks = operator.looks_at_values and (operator.name != "index" or has_mask(args[1]))
        self.values_matter |= looks and not self.constants.excuse(inputs)
        read, counted = self.flow.read(inputs), len(self.products)
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
                self._give_up(call, Kind.UNKNOWN_OPERATOR)
        self.flow.note(operator, read, args, kwargs, out, range(counted, len(self.products)), looks)
        outputs = tensors_in(out if isinstance(out, (tuple, list)) else (out,))
        self.constants.follow(inputs, [tensor for tensor, _ in written], outputs)
        for tensor, before in written:
            self._memory.settle(tensor, before)
            if (
                tensor.layout is torch.strided
                and (leaf := self._homes.get(tensor.untyped_storage()._cdata)) is not None
            ):
                leaf.written = True
        if operator.shares_memory:
            self._memory.relate([*inputs, *outputs])
        return out

    def _follow(self, rule: Rule, call: Call) -> None:
        """Apply a rule; if it raises, the call is treated as unknown."""
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
            self.failures.append(f"the rule of {call.operator.func} raised {type(error).__name__}: {error}")
            self._give_up(call, Kind.UNSUPPORTED)

    def _give_up(self, call: Call, kind: Kind) -> None:
        """Nothing is known of this call: all channels involved stay, so that no size changes."""
        for tensor in call.tensors:
            self.freeze(self.state(tensor), self.reason(kind, str(call.operator.func)))
        for tensor in [*call.outputs, *call.operator.written_tensors(call.args, call.kwargs)]:
            self.put(tensor, State([None] * tensor.dim()))

    def leaf(self, name: str) -> Leaf:
        return next(leaf for leaf in self.leaves.values() if leaf.name == name)

    def is_idle(self, leaf: Leaf) -> bool:
        """Whether it is a buffer that its module did not use when it ran, e.g. one that only a loss reads."""
        return not isinstance(leaf.tensor, nn.Parameter) and leaf.name.rpartition(".")[0] in self.ran

    def freeze(self, state: State | None, reason: Reason) -> None:
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

    def axes_seen(self, tensor: Tensor) -> list[Axis]:
        """What the user's code may learn from the shape of a tensor."""
        if self._in_operator or not self.sizes_noted:
            return []
        leaf = self.leaves.get(id(tensor))
        state = leaf.state if leaf is not None else tensor.__dict__.get(self._mark)
        return state.axes if state is not None else []

    def put(self, tensor: Tensor, state: State) -> None:
        """Remember what is known of an operator's result."""
        if id(tensor) not in self.leaves:
            setattr(tensor, self._mark, state)
        elif not same_axes(self.leaves[id(tensor)].state.axes, state.axes):
            self._memory.forget([tensor], [state])

    def reason(self, kind: Kind, detail: str = "") -> Reason:
        """A reason that names the running module."""
        return Reason(kind, detail, self.modules.get(id(self._stack[-1]), ""))

    def wake(self, codes: Tensor, operator: str) -> None:
        """Remember which operator made these elements non-zero although their channel is gone."""
        if codes.numel():
            name = self.modules.get(id(self._stack[-1]))
            self._woken.append((labels_of(codes), f"{operator} (in {name})" if name else operator))

    def woken_by(self, code: Tensor) -> str:
        return next((text for labels, text in reversed(self._woken) if bool((labels == labels_of(code)).any())), "")

    def count(self, operator: str, volume: int, factors: list[tuple[Axis, int]]) -> None:
        """Record the multiply-adds of a call: a number times the sizes of these axes."""
        axes, sizes = [axis for axis, _ in factors], [size for _, size in factors]
        name = self.modules.get(id(self._stack[-1]), "")
        self.products.append(Product(name, operator, volume, sizes, axes))

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

    def place(
        self, codes: Tensor, around: bool = False, sizes: tuple[int, ...] = (), position: int | None = None
    ) -> Place:
        """Remember an axis whose size the code of the running module states; `around`: or of those it runs in."""
        modules = self._stack if around else self._stack[-1:]
        names = [self.modules[id(module)] for module in modules if id(module) in self.modules]
        place = Place(tuple(dict.fromkeys(names)), codes, sizes, position)
        self.places.append(place)
        return place

    def counts(self, attribute: str, codes: Tensor) -> bool:
        """Whether the running module keeps this number of channels under that name; it then follows the cut."""
        name = self.modules.get(id(self._stack[-1]))
        if name is None or vars(self._stack[-1]).get(attribute) != codes.numel():
            return False
        self.counted.append((name, attribute, codes))
        return True

    @contextmanager
    def following_modules(self) -> Iterator[None]:
        """Keep track of the running module, by global hooks."""

        def enter(module: nn.Module, args: Any) -> None:
            self._stack.append(module)
            self.ran.add(self.modules.get(id(module), ""))
            self.flow.enter(self.modules.get(id(module)), args)

        def leave(module: nn.Module, args: Any, *rest: Any) -> None:
            self._stack.pop()
            # After an error, torch leaves the keyword arguments out.
            kwargs, output = rest if len(rest) == 2 else ({}, *rest)
            self.flow.leave(kwargs, output)

        def read_training(module: nn.Module) -> bool:
            # Torch's own norms and dropouts run the same operators in both modes, as far as channels go.
            known = type(module).__module__.startswith("torch.nn.") and isinstance(module, (_NormBase, _DropoutNd))
            self.training_matters |= not known
            self.asked_training |= set() if known else {self.modules.get(id(module), "")}
            return vars(module)["training"]

        depth = len(self._stack)
        hooks = [
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, with_kwargs=True, always_call=True),
        ]
        # A property of the class goes before the instance's own entry, which stays what it is.
        outer = vars(nn.Module).get("training")  # of an analysis around this one
        nn.Module.training = property(read_training, lambda module, value: vars(module).update(training=value))  # pyright: ignore
        try:
            with escapes_seen(self):
                yield
        finally:
            if outer is None:
                del nn.Module.training
            else:
                nn.Module.training = outer
            for hook in hooks:
                hook.remove()
                # Torch leaves this note behind, and then warns of global hooks.
                _global_forward_hooks_with_kwargs.pop(hook.id, None)
            del self._stack[depth:]


@contextmanager
def escapes_seen(watch: Watch) -> Iterator[None]:
    """Notice tensors that Python code reads without an operator."""

    def wrapped(original: Any) -> Any:
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            watch.values_matter = True
            watch.flow.note_read(tensor)
            watch.freeze(watch.state(tensor), watch.reason(Kind.READ_BY_PYTHON))
            return original(tensor, *args, **kwargs)

        return read

    def replace(tensor: Tensor, value: Tensor) -> None:
        state = watch.state(value)
        watch.put(tensor, State([None] * value.dim()) if state is None else state)
        watch.flow.note_read(tensor, written=True)
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
