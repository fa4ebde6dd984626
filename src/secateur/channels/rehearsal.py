"""A deterministic forward pass that records intermediate results, so that two networks can be compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from secateur.channels.example import Example, tensors_within
from secateur.channels.guard import as_written, modules_of, undisturbed
from secateur.channels.shapes import (
    PRODUCTS,
    EagerMode,
    gives_any_shape,
    has_mask,
    is_sized,
    name_of,
    numbers,
    reads_values,
    shape_only,
    skipped,
)
from secateur.channels.whole_layers import NORMS, OPTIONS, as_one_step
from secateur.randomness import seed_all

CHOICES = ("topk", "sort", "argmax", "argmin", "torchvision::nms")
SHIFTED = {"addmm": "mm", "baddbmm": "bmm"}
"""Products with an addition, and the plain product: torch decides which of the two a linear layer runs."""
TRAINED = {"native_dropout": 2, "rrelu_with_noise": 4}
"""Operators that do something in training mode alone, and the position of the flag that says so."""
BY_SHAPE = ("add", "add_", "sub", "mul", "mul_", "div", "cat", "native_batch_norm", "native_layer_norm", "unbind")
"""More operators that raise because of shapes alone."""
ARITHMETIC = ("add", "sub", "rsub", "mul", "div", "pow", "remainder", "fmod", "floor_divide")
"""Operators whose whole numbers are operands, and neither sizes nor positions."""
ATTENTION = "_scaled_dot_product"
"""What operators begin with that scale by the width of the queries, unless they are given a scale."""
MEANS = {"rand": 0.5, "rand_like": 0.5, "randn": 0.0, "randn_like": 0.0, "exponential_": 1.0}


@dataclass(frozen=True)
class Product:
    """A convolution or matrix product; removed channels give zeros there, so that masked and shrunk have equal sums."""

    operator: str
    sums: Tensor
    """Sum and norm of the elements."""


@dataclass(frozen=True, eq=False)
class Choice:
    """Elements picked by value, as boxes are."""

    sums: Tensor
    """Of what they were picked from."""
    shape: torch.Size
    """Likewise."""
    picked: tuple[Tensor, ...]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Choice) or len(self.picked) != len(other.picked):
            return False
        return all(torch.equal(a, b) for a, b in zip(self.picked, other.picked, strict=True))


@dataclass(frozen=True)
class Outcome:
    """The outputs of a forward pass, and the steps that led to them."""

    outputs: list[Tensor]
    steps: list[Product | Choice]
    floating: list[bool]
    """For each output whether it is floating-point."""
    factors: list[tuple[str, float]]
    """Numbers that operators were given to compute with. One that depends on a width may have no effect on these
    inputs, as the scale of a softmax over equal values has none.
    """

    @property
    def blind(self) -> bool:
        """Whether the outputs tell little about the steps: classes, masks, zeros, or only NaN."""
        telling = [output for output, floating in zip(self.outputs, self.floating, strict=True) if floating]
        return not any(bool(output.nan_to_num(0, 0, 0).any()) for output in telling)

    @property
    def choices(self) -> list[Choice]:
        return [step for step in self.steps if isinstance(step, Choice)]

    def sums(self, places: Sequence[int]) -> list[Tensor]:
        """Of the steps at these places."""
        return [self.steps[place].sums for place in places]

    def without(self, places: Set[int]) -> Outcome:
        """The same outcome without the steps at these places."""
        return replace(self, steps=[step for place, step in enumerate(self.steps) if place not in places])


class Record(EagerMode):
    """Records operators, products and choices, and replaces random numbers by their mean: dropout does nothing."""

    def __init__(self, precision: torch.dtype | None = None) -> None:
        """precision: replaces a lower one that the code asks for, as x.half() does."""
        super().__init__()
        self.precision = precision
        self.steps: list[Product | Choice] = []
        self.factors: list[tuple[str, float]] = []
        self.operators: list[tuple[Any, ...]] = []
        """Every operator that was run, with the numbers it was given."""
        self.shapes: list[list[torch.Size]] = []
        """Of their results."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = name_of(func)
        kwargs = kwargs or {}
        asked = kwargs.get("dtype")
        if self.precision is not None and asked is not None and _is_coarser(asked, self.precision):
            kwargs = {**kwargs, "dtype": self.precision}
        trained = TRAINED.get(name)
        product = None
        if name in SHIFTED and "out" not in kwargs:
            # The product alone: subtracting the summand would leave its rounding. A summand with weight 0 may be
            # uninitialised memory.
            product = self._operate(name, func, args, {**kwargs, "beta": 0})
            beta = kwargs.get("beta", 1)
            out = product + beta * args[0] if beta else product
        elif trained is None:
            out = self._operate(name, func, args, kwargs)
        else:
            out = func(*args[:trained], False)
        self._take_chance_out(name, out, args)
        self._note(name, func, args, kwargs, out, product)
        return out

    def convolve(self, module: Any, data: Tensor, forward: Callable[..., Tensor]) -> Tensor:
        """Run a layer for `as_one_step`."""
        out = self._convolution(module, data, forward)
        self._note("convolution", None, _arguments(module, data), {}, out, None)
        return out

    def _convolution(self, module: Any, data: Tensor, forward: Callable[..., Tensor]) -> Tensor:
        return forward(data)

    def pass_through(self, module: Any, data: Tensor, forward: Callable[..., Tensor]) -> Tensor:
        """Run a layer for `as_one_step`."""
        out = self._activation_or_norm(module, data, forward)
        self.operators.append((type(module).__name__, *(getattr(module, name) for name in OPTIONS[type(module)])))
        self.shapes.append([out.shape])
        return out

    def _activation_or_norm(self, module: Any, data: Tensor, forward: Callable[..., Tensor]) -> Tensor:
        return forward(data)

    def _operate(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)

    def _note(
        self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, product: Tensor | None
    ) -> None:
        values = _flat((*args, *kwargs.values()))
        self.operators.append((name, *numbers(name, args, values)))
        self.shapes.append([value.shape for value in _flat((out,)) if isinstance(value, Tensor)])
        self.factors += [(name, number) for number in _factors(name, args, values, kwargs.get("scale"))]
        self._note_values(name, func, args, values, out, product)

    def _note_values(
        self, name: str, func: Any, args: tuple[Any, ...], values: list[Any], out: Any, product: Tensor | None
    ) -> None:
        if name in PRODUCTS:
            self.steps.append(Product(SHIFTED.get(name, name), _sums(out if product is None else product)))
        elif name in CHOICES or (gives_any_shape(func) and (name != "index" or has_mask(args[1]))):
            picked = tuple(t for t in tensors_within((args, out)) if not t.is_floating_point())
            self.steps.append(Choice(_sums(args[0]), args[0].shape, picked))

    def _take_chance_out(self, name: str, out: Any, args: tuple[Any, ...]) -> None:
        if name in MEANS:
            out.fill_(MEANS[name])
        elif name in ("bernoulli_", "bernoulli"):
            chance = 0.5 if name == "bernoulli_" else args[0]
            given = args[1] if len(args) > 1 else chance
            out.copy_(given) if isinstance(given, Tensor) else out.fill_(given)
        elif name == "uniform_":
            out.fill_(sum((*args[1:], *(0.0, 1.0)[len(args) - 1 :])) / 2)
        elif name == "normal_":
            out.fill_(args[1] if len(args) > 1 else 0.0)


class ShapesOnly(Record):
    """Without the arithmetic: convolutions and matrix products give zeros."""

    def __init__(self, bare: bool = False) -> None:
        """bare: norms and activations in evaluation mode do nothing, too, where no code reads values."""
        super().__init__()
        self.bare = bare
        self.doubtful = False
        """Whether an error may be due to zeros: an operator has read values, or raised it for other than shapes."""
        self.addresses: set[int] = set()
        """Memory addresses of what the operators were given."""

    def _operate(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = (skipped(name, args) if self.bare else None) if name not in PRODUCTS else shape_only(name, args)
        if result is not None:
            return result
        self.doubtful |= reads_values(func)
        try:
            return func(*args, **kwargs)
        except Exception:
            by_shape = name in PRODUCTS or is_sized(name) or name in BY_SHAPE
            self.doubtful |= not by_shape or (func._schema.is_mutable and _repeats(args[0]))
            raise

    def _convolution(self, module: Any, data: Tensor, forward: Callable[..., Tensor]) -> Tensor:
        plain = module.padding_mode == "zeros" and not isinstance(module.padding, str)
        plain = plain and "_conv_forward" not in vars(module)
        fits = plain and data.dim() == module.weight.dim() and data.dtype == module.weight.dtype
        result = shape_only("convolution", _arguments(module, data)) if fits else None
        if result is None:
            raise ValueError("this has to run operator by operator")
        return result

    def _activation_or_norm(self, module: Any, data: Tensor, forward: Callable[..., Tensor]) -> Tensor:
        held = (data, *module._parameters.values(), *module._buffers.values())
        self.addresses |= {tensor.data_ptr() for tensor in held if tensor is not None}
        if self.bare and getattr(module, "inplace", False):
            return data
        if self.bare and isinstance(module, NORMS):
            vectors = module.weight, module.bias, module.running_mean, module.running_var
            training = module.training or module.running_mean is None
            result = skipped("native_batch_norm", (data, *vectors, training, 0.0, 0.0))
            return forward(data) if result is None else result[0]
        return forward(data)

    def _note_values(self, name: str, func: Any, args: Any, values: list[Any], out: Any, product: Any) -> None:
        given = (value for value in values if isinstance(value, Tensor))
        self.addresses |= {tensor.data_ptr() for tensor in given if tensor.layout is torch.strided and tensor.numel()}


def _arguments(module: Any, data: Tensor) -> tuple[Any, ...]:
    """What a convolution gives to its operator."""
    options = module.stride, module.padding, module.dilation, module.transposed, module.output_padding, module.groups
    return data, module.weight, module.bias, *options


def _factors(name: str, args: tuple[Any, ...], values: list[Any], scale: float | None) -> list[float]:
    """The numbers that an operator computes with, that of its own making among them."""
    kinds = (int, float) if name.removesuffix("_") in ARITHMETIC else float
    given = [float(value) for value in values if isinstance(value, kinds) and not isinstance(value, bool)]
    makes_own = name.startswith(ATTENTION) and scale is None
    return [*given, args[0].shape[-1] ** -0.5] if makes_own else given


def _flat(values: tuple[Any, ...]) -> list[Any]:
    """What an operator is given or gives: values, and lists of them."""
    return [entry for value in values for entry in (value if isinstance(value, (list, tuple)) else (value,))]


def _is_coarser(dtype: torch.dtype, precision: torch.dtype) -> bool:
    return dtype.is_floating_point and torch.finfo(dtype).bits < torch.finfo(precision).bits


def _repeats(tensor: Any) -> bool:
    """Whether one number stands for many, as in weights without memory: nothing can be written to it."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True) if isinstance(tensor, Tensor) else ()
    return any(size > 1 and stride == 0 for size, stride in sizes)


def _sums(tensor: Tensor) -> Tensor:
    values = real(tensor).double()
    return torch.stack([values.sum(), torch.linalg.vector_norm(values)])


def real(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


@cache
def _drops(kind: type[nn.Module]) -> bool:
    return "drop" in kind.__name__.lower() or kind.__name__ == "StochasticDepth"


@torch.no_grad()
def run(
    model: nn.Module,
    example: Example,
    mode: str,
    record: Record | None = None,
    *,
    values: bool = True,
    last: bool = False,
) -> Outcome:
    """A forward pass in evaluation or training mode, without dropout.

    values: whether the values of the model's tensors are restored.
    last: the model is of no use after that, and nothing of it is restored.
    """
    record = record or Record()
    with as_written(model) if last else undisturbed(model, values), as_one_step(record), record:
        model.train(mode == "train")
        for module in modules_of(model).values():
            if _drops(type(module)) and not any(module.children()):
                module.eval()
        seed_all(0)
        output = example.copied()(model)
    found = tensors_within(output)
    floating = [tensor.is_floating_point() or tensor.is_complex() for tensor in found]
    return Outcome([real(tensor).double() for tensor in found], record.steps, floating, record.factors)
