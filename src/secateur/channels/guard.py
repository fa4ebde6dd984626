"""Look at a model without leaving a trace, and refuse the ones that cannot be looked at."""

from __future__ import annotations

import os
import random
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from secateur.channels.example import Example, tensors_within
from secateur.errors import InvalidArgument, InvalidExample, InvalidModel, place_of

WRAPPERS = {"DataParallel": "module", "DistributedDataParallel": "module", "OptimizedModule": "_orig_mod"}
"""Modules that hold another one, and under which name."""
STATISTICS = ("running_mean", "running_var")
"""Buffers that norms learn."""


def check_module(model: Any) -> None:
    """Raise for what is no network at all."""
    if not isinstance(model, nn.Module):
        raise InvalidArgument(f"a model is an nn.Module, got {type(model).__name__}: pass the network itself")


def check_extra_state(model: nn.Module) -> None:
    """Raise for a model of which files of tensors do not tell everything."""
    for name, module in model.named_modules():
        own = type(module).get_extra_state is not nn.Module.get_extra_state
        if own and module.get_extra_state() not in (None, {}):
            where = f"module {name!r}" if name else "the model"
            raise InvalidModel(
                f"{where} ({type(module).__name__}) has extra state, which files of tensors cannot hold: keep it in "
                "buffers instead, or prune without a folder and torch.save the result's model yourself"
            )


def check_model(model: Any, example: Example) -> None:
    """Raise if this model cannot be analysed, naming what and the remedy."""
    check_module(model)
    for name, module in model.named_modules():
        kind = type(module).__name__
        where = f"module {name!r}" if name else "the model"
        if kind in WRAPPERS:
            remedy = f"put its .{WRAPPERS[kind]} in its place" if name else f"pass model.{WRAPPERS[kind]} instead"
            raise InvalidModel(f"{where} is wrapped in {kind}: {remedy}")
        if kind == "FullyShardedDataParallel":
            raise InvalidModel(f"{where} is wrapped in {kind}: analyse the model before wrapping it")
        if isinstance(module, torch.jit.ScriptModule):
            raise InvalidModel(
                f"{where} is TorchScript, whose tensors cannot be cut: pass the Python model it was made from"
            )
        if any(base.__module__.startswith("torch.export.") for base in type(module).__mro__):
            raise InvalidModel(
                f"{where} is an exported program, whose sizes are fixed: pass the Python model it was made from"
            )
        origin = type(module).__module__.split(".")
        if "quantized" in origin and kind != "FloatFunctional":
            raise InvalidModel(f"{where} ({kind}) is quantised: prune the float model first, then quantise")
        if origin[0] == "torch" and {"qat", "fake_quantize", "observer"} & set(origin):
            raise InvalidModel(f"{where} ({kind}) is prepared to be quantised: prune the float model first")
    parameters = list(model.named_parameters())
    tensors: list[tuple[str, Tensor]] = [*parameters, *model.named_buffers()]
    for name, tensor in tensors:
        if is_lazy(tensor):
            raise InvalidModel(f"parameter {name!r} has no shape yet: run the model once on an example")
        if tensor.is_quantized:
            raise InvalidModel(f"tensor {name!r} is quantised: prune the float model first, then quantise")
        if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
            raise InvalidModel(f"tensor {name!r} is a {type(tensor).__name__}: pass a model of plain tensors")
    if not parameters:
        raise InvalidModel(f"{type(model).__name__} has no parameters: there is nothing to prune")
    places: dict[torch.device, str] = {}
    for name, tensor in tensors:
        places.setdefault(tensor.device, name)
    if len(places) > 1:
        listed = ", ".join(f"{name!r} on {device}" for device, name in places.items())
        raise InvalidModel(f"the model is spread over several devices ({listed}): move it to one with model.to(device)")
    # Other buffers may hold infinity, as masks do, or what nobody reads.
    learnt = [(name, t) for name, t in tensors if isinstance(t, nn.Parameter) or name.endswith(STATISTICS)]
    _check_values(learnt)
    device = next(iter(places))
    if not example.tensors:
        raise InvalidExample(
            "the example holds no tensor: pass what the model is called with, e.g. torch.randn(1, 3, 224, 224)"
        )
    for tensor in example.tensors:
        if tensor.device != device and device.type != "meta":
            raise InvalidExample(f"the model is on {device}, the example on {tensor.device}: move one with .to(...)")
    check_example(model, example)


def check_example(model: nn.Module, example: Example) -> None:
    """Raise for one with NaN that the outputs have too: they would equal any others."""
    if not _has_nan(example.tensors):
        return
    with undisturbed(model), torch.no_grad():
        output = example.copied()(model.eval())
    if _has_nan(tensors_within(output)):
        raise InvalidExample("the example holds NaN, and so does what comes of it: pass one with sound outputs")


def _has_nan(tensors: Iterable[Tensor]) -> bool:
    return any(t.is_floating_point() and t.device.type != "meta" and bool(t.isnan().any()) for t in tensors)


def _check_values(tensors: list[tuple[str, Tensor]]) -> None:
    if tensors[0][1].device.type != "meta" and not are_finite([tensor for _, tensor in tensors]):
        for name, tensor in tensors:
            if not bool(tensor.isfinite().all()):
                raise InvalidModel(f"tensor {name!r} holds NaN or infinite values: load a sound checkpoint")


@torch.no_grad()
def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether the sums of these are, which are soon computed; those of whole numbers do not count."""
    sums = [tensor.sum(dtype=torch.float64) for tensor in tensors if tensor.is_floating_point()]
    return not sums or bool(torch.stack(sums).isfinite().all())


def _as_written() -> AbstractContextManager[Any]:
    """Functions that torch.compile was given run without it; where nothing was, the compiler is not even loaded."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


@contextmanager
def undisturbed(model: nn.Module, values: bool = True) -> Iterator[None]:
    """Put back training flags, attributes, tensors and random state on leaving. What is compiled runs as written
    meanwhile, and attention step by step: compiled code and fused layers cannot be watched.

    values: whether what the tensors hold matters.
    """
    modules = list(model.modules())
    attributes = [dict(vars(module)) for module in modules]
    contents = [
        (value, type(value)(value))
        for saved in attributes
        for value in saved.values()
        if type(value) in (dict, OrderedDict, list, set)
    ]
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.layout is torch.strided]
    contained = [(tensor, tensor.data, tensor.detach().clone()) for tensor in tensors if values]
    devices = sorted({t.device.index for t in tensors if t.device.type == "cuda" and t.device.index is not None})
    numpy = sys.modules.get("numpy")
    chance = random.getstate(), numpy.random.get_state() if numpy is not None else None
    fused = torch.backends.mha.get_fastpath_enabled()
    with torch.random.fork_rng(devices=devices), _as_written():
        for module in modules:
            vars(module).pop("_compiled_call_impl", None)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)
            random.setstate(chance[0])
            if numpy is not None:
                numpy.random.set_state(chance[1])
            for module, saved in zip(modules, attributes, strict=True):
                vars(module).clear()
                vars(module).update(saved)
            for value, saved in contents:
                if isinstance(value, list):
                    value[:] = saved
                else:
                    value.clear()
                    value.update(saved)
            for parameter, flag in trained:
                if parameter.requires_grad != flag:
                    parameter.requires_grad_(flag)
            for tensor, memory, value in contained:
                if tensor.data_ptr() != memory.data_ptr():
                    tensor.data = memory
                # Not every write counts as a new version, as those to a batch norm's statistics: compare values.
                if tensor.device.type != "meta" and not torch.equal(tensor, value):
                    tensor.data.copy_(value)


def explain(error: BaseException) -> str:
    """The error in one line, with the line of the user's code that raised it."""
    text = " ".join(str(error).split())
    text = text if len(text) <= 300 else text[:297] + "..."
    place = place_of(error, f"{Path(__file__).parent.parent}{os.sep}", f"{Path(torch.__file__).parent}{os.sep}")
    return f"{type(error).__name__}{': ' if text else ''}{text}{place}"
