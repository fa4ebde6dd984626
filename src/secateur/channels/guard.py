"""Run a model without changing it, and refuse models that cannot be analysed."""

from __future__ import annotations

import gc
import os
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from secateur.channels.example import Example, tensors_within
from secateur.errors import InvalidModel, InvalidSetting, place_of
from secateur.randomness import preserved

WRAPPERS = {"DataParallel": "module", "DistributedDataParallel": "module", "OptimizedModule": "_orig_mod"}
"""Modules that hold another one, and under which name."""
FLOAT = "Prune the float model first, then quantise"
CONTAINERS = {dict, OrderedDict, list, set}
STATISTICS = ("running_mean", "running_var")
"""Buffers that norms learn."""


def check_module(model: Any) -> None:
    """Raise for anything that is not a module."""
    if not isinstance(model, nn.Module):
        raise InvalidSetting("the model is not an nn.Module", got=type(model).__name__)


def check_extra_state(model: nn.Module) -> None:
    """Raise for a model with state that files of tensors cannot hold."""
    for name, module in model.named_modules():
        own = type(module).get_extra_state is not nn.Module.get_extra_state
        if own and module.get_extra_state() not in (None, {}):
            raise InvalidModel(
                f"{_place(name, module)} has extra state, which files of tensors cannot hold",
                remedy="Keep it in buffers, or prune without a folder and torch.save the result's model",
            )


def check_model(model: Any, example: Example) -> None:
    """Raise if this model cannot be analysed."""
    check_module(model)
    for name, module in model.named_modules():
        what, remedy = _refuse(name, module)
        if what:
            raise InvalidModel(f"{_place(name, module)} {what}", remedy=remedy)
    parameters = list(model.named_parameters())
    tensors: list[tuple[str, Tensor]] = [*parameters, *model.named_buffers()]
    for name, tensor in tensors:
        if is_lazy(tensor):
            raise InvalidModel(f"parameter {name!r} has no shape yet", remedy="Run the model once on an example")
        if tensor.is_quantized:
            raise InvalidModel(f"tensor {name!r} is quantised", remedy=FLOAT)
        if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
            raise InvalidModel(f"tensor {name!r} is not a plain tensor", got=type(tensor).__name__)
    if not parameters:
        raise InvalidModel(f"{type(model).__name__} has no parameters")
    places: dict[torch.device, str] = {}
    for name, tensor in tensors:
        places.setdefault(tensor.device, name)
    if len(places) > 1:
        listed = ", ".join(f"{name!r} on {device}" for device, name in places.items())
        raise InvalidModel("the model is on several devices", got=listed, remedy="Move it to one with model.to(device)")
    # Other buffers may hold infinity, as masks do, or values that nothing reads.
    learnt = [(name, t) for name, t in tensors if isinstance(t, nn.Parameter) or name.endswith(STATISTICS)]
    _check_values(learnt)
    _check_variances(model)
    device = next(iter(places))
    if not example.tensors:
        remedy = "Pass what the model is called with, e.g. torch.randn(1, 3, 224, 224)"
        raise InvalidModel("the example holds no tensor", remedy=remedy)
    for tensor in example.tensors:
        if tensor.device != device and device.type != "meta":
            raise InvalidModel("the example is on another device than the model", got=tensor.device, wanted=device)
    check_example(model, example)


def _place(name: str, module: nn.Module) -> str:
    return f"module {name!r} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"


def _refuse(name: str, module: nn.Module) -> tuple[str, str]:
    """What is wrong with a module that cannot be analysed, and what to do about it; two empty texts otherwise."""
    kind, origin = type(module).__name__, type(module).__module__.split(".")
    if kind in WRAPPERS:
        inner = WRAPPERS[kind]
        return "is a wrapper", f"Put its .{inner} in its place" if name else f"Pass model.{inner} instead"
    if kind == "FullyShardedDataParallel":
        return "is a wrapper", "Analyse the model before wrapping it"
    if isinstance(module, torch.jit.ScriptModule):
        return "is TorchScript, whose tensors cannot be cut", "Pass the Python model that it was made from"
    if any(base.__module__.startswith("torch.export.") for base in type(module).__mro__):
        return "is an exported program, whose sizes are fixed", "Pass the Python model that it was made from"
    if "quantized" in origin and kind != "FloatFunctional":
        return "is quantised", FLOAT
    if origin[0] == "torch" and {"qat", "fake_quantize", "observer"} & set(origin):
        return "is prepared for quantisation", FLOAT
    return "", ""


def check_example(model: nn.Module, example: Example) -> None:
    """Raise for an example with NaN that the outputs have too: they would equal any others."""
    if not _has_nan(example.tensors):
        return
    with undisturbed(model), torch.no_grad():
        output = example.copied()(model.eval())
    if _has_nan(tensors_within(output)):
        raise InvalidModel("the example holds NaN, and so do the outputs", wanted="an example with finite outputs")


def _has_nan(tensors: Iterable[Tensor]) -> bool:
    return any(t.is_floating_point() and t.device.type != "meta" and bool(t.isnan().any()) for t in tensors)


def _check_values(tensors: list[tuple[str, Tensor]]) -> None:
    if tensors[0][1].device.type != "meta" and not are_finite([tensor for _, tensor in tensors]):
        for name, tensor in tensors:
            if not bool(tensor.isfinite().all()):
                raise InvalidModel(f"tensor {name!r} holds NaN or infinite values")


@torch.no_grad()
def _check_variances(model: nn.Module) -> None:
    """Raise for a variance below zero: all outputs would be NaN, and NaN equals NaN wherever they are compared."""
    found = [(name, module.running_var) for name, module in model.named_modules() if isinstance(module, _NormBase)]
    variances = {f"{name}.running_var": v for name, v in found if v is not None and v.numel() and not v.is_meta}
    lowest = torch.stack([v.min().double() for v in variances.values()]).tolist() if variances else []
    for name, value in zip(variances, lowest, strict=True):
        if value < 0:
            raise InvalidModel(f"tensor {name!r} holds a variance below zero", got=value, remedy="Load sound weights")


@torch.no_grad()
def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether the sums of these tensors are finite; integers do not count."""
    tensors = [tensor for tensor in tensors if tensor.is_floating_point()]
    for dtype in (None, torch.float64):  # a sum in their own precision is faster, but may overflow
        sums = [tensor.sum(dtype=dtype).double() for tensor in tensors]
        if not sums or bool(torch.stack(sums).isfinite().all()):
            return True
    return False


def _compiled_as_written() -> AbstractContextManager[Any]:
    """Run compiled functions as written; without any, the compiler is not even loaded."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """What `named_modules` gives, in a fraction of the time."""
    found, seen = dict[str, nn.Module](), set[int]()

    def visit(path: str, module: nn.Module) -> None:
        if id(module) in seen:
            return
        if type(module).named_modules is not nn.Module.named_modules:
            own = [(name, each) for name, each in module.named_modules(prefix=path) if id(each) not in seen]
            seen.update(id(each) for _, each in own)
            found.update(own)
            return
        seen.add(id(module))
        found[path] = module
        for name, child in module._modules.items():
            if child is not None:
                visit(f"{path}.{name}" if path else name, child)

    visit("", model)
    return found


@contextmanager
def as_written(model: nn.Module) -> Iterator[None]:
    """Run compiled code as written, and attention operator by operator, so that both can be watched.

    The random state is restored on leaving; compiled calls of the model's modules are not.
    """
    tensors = (*model.parameters(), *model.buffers()) if torch.cuda.is_available() else ()
    devices = sorted({t.device.index for t in tensors if t.device.type == "cuda" and t.device.index is not None})
    fused = torch.backends.mha.get_fastpath_enabled()
    with preserved(devices), _compiled_as_written():
        for module in modules_of(model).values():
            vars(module).pop("_compiled_call_impl", None)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)


@contextmanager
def undisturbed(model: nn.Module, values: bool = True) -> Iterator[None]:
    """Run a model as written, and restore training flags, attributes, tensors and random state on leaving.

    values: whether the values of tensors are restored too.
    """
    modules = list(modules_of(model).values())
    attributes = [vars(module).copy() for module in modules]
    held = [value for saved in attributes for value in saved.values() if type(value) in CONTAINERS]
    contents, empty = [(value, type(value)(value)) for value in held if value], [value for value in held if not value]
    parameters, buffers = list(model.parameters()), list(model.buffers()) if values else []
    trained = [(parameter, parameter.requires_grad) for parameter in parameters]
    tensors = [tensor for tensor in (*parameters, *buffers) if tensor.layout is torch.strided]
    contained = [(tensor, tensor.data, tensor.detach().clone()) for tensor in tensors if values]
    try:
        with as_written(model):
            yield
    finally:
        for module, saved in zip(modules, attributes, strict=True):
            vars(module).clear()
            vars(module).update(saved)
        for value, saved in contents:
            if isinstance(value, list):
                value[:] = saved
            else:
                value.clear()
                value.update(saved)
        for value in empty:
            if value:
                value.clear()
        for parameter, flag in trained:
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)
        for tensor, memory, value in contained:
            if tensor.data_ptr() != memory.data_ptr():
                tensor.data = memory
            # Not every write counts as a new version, as those to a batch norm's statistics: compare values.
            if tensor.device.type != "meta" and not torch.equal(tensor, value):
                tensor.data.copy_(value)


@contextmanager
def collecting_later() -> Iterator[None]:
    """Put garbage collection off: thousands of objects of a copy would be looked at that are gone soon after."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def explain(error: BaseException) -> str:
    """The error in one line, with the line of the user's code that raised it."""
    text = " ".join(str(error).split())
    text = text if len(text) <= 300 else text[:297] + "..."
    place = place_of(error, f"{Path(__file__).parent.parent}{os.sep}", f"{Path(torch.__file__).parent}{os.sep}")
    return f"{type(error).__name__}{': ' if text else ''}{text}{place}"
