"""Cut a network: every tensor by index, and every number that a module keeps about its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from secateur.channels.blocks import outermost_last
from secateur.channels.bookkeeping import refresh
from secateur.channels.copies import copy_model as copy_model
from secateur.channels.copies import copy_with
from secateur.channels.cuts import Cuts
from secateur.channels.groups import ChannelGraph
from secateur.channels.guard import STATISTICS, check_module, modules_of
from secateur.channels.plan import Plan
from secateur.channels.shapes import memory_format
from secateur.errors import InvalidSetting


def shrink(model: nn.Module, plan: Plan) -> nn.Module:
    """A smaller copy of the model; the model itself stays as it is."""
    check_plan(model, plan)
    return shrunk(model, plan, lambda tensor: None)


def shrunk(model: nn.Module, plan: Plan, change: Callable[[Tensor], Tensor | None]) -> nn.Module:
    """A smaller copy of the model with its tensors changed; what changes to None is copied as it is."""
    cuts, contents = plan.cuts(), list[tuple[Tensor, Tensor]]()
    for name, tensor in tensors_of(model).items():
        if name in plan.gone:
            contents.append((tensor, tensor.data))
            continue
        indices = cuts.kept.get(name)
        data = tensor.data if indices is None else cut(tensor.data, tensor.shape, indices)
        changed = change(data)
        if indices is not None or changed is not None:
            contents.append((tensor, data if changed is None else changed))
    return _resized(model, contents, cuts)


def hollow(model: nn.Module, plan: Plan | None = None) -> nn.Module:
    """A copy with zeros for numbers, those of weights without memory: enough to see what the model runs.

    plan: makes the copy a smaller one.
    """
    cuts = plan.cuts() if plan is not None else Cuts({}, {}, ())
    contents, zeros = list[tuple[Tensor, Tensor]](), dict[torch.dtype, Tensor]()
    for name, tensor in tensors_of(model).items():
        indices = cuts.kept.get(name)
        shape = tensor.shape if plan is None or indices is None else plan.shape(name)
        if tensor.dim() > 1 and isinstance(tensor, nn.Parameter):
            zero = zeros[tensor.dtype] if tensor.dtype in zeros else tensor.new_zeros(())
            contents.append((tensor, zeros.setdefault(tensor.dtype, zero).expand(shape)))
        elif indices is not None:
            whole = not tensor.is_floating_point()
            contents.append((tensor, cut(tensor.data, tensor.shape, indices) if whole else tensor.new_zeros(shape)))
        elif tensor.is_floating_point() and (isinstance(tensor, nn.Parameter) or name.endswith(STATISTICS)):
            contents.append((tensor, tensor.new_zeros(shape)))
    return _resized(model, contents, cuts)


def _resized(model: nn.Module, contents: Iterable[tuple[Tensor, Tensor]], cuts: Cuts) -> nn.Module:
    _check_sizes(model, cuts)
    _check_blocks(model, cuts)
    return _resize_(copy_with(model, contents), cuts)


def shrink_(
    model: nn.Module, plan: Plan, optimizer: torch.optim.Optimizer | None = None, since: Plan | None = None
) -> nn.Module:
    """Cut the model in place and return it; see `cut_`.

    since: the plan of the same graph by which the model has already been cut; this one must keep no more.
    """
    check_plan(model, plan, since)
    return cut_(model, plan.cuts(since), optimizer)


@torch.no_grad()
def cut_(model: nn.Module, cuts: Cuts, optimizer: torch.optim.Optimizer | None = None) -> nn.Module:
    """Apply cuts to the model in place and return it; raises before anything is changed.

    Parameters and buffers remain the same objects with smaller contents, so that tied ones stay tied and the optimizer
    keeps its hold on them; gradients and the optimizer's per-element state are cut by the same indices. The optimizer
    lets go of parameters that go with a branch, and of what it keeps about them.
    """
    tensors = tensors_of(model)
    _check_shapes(tensors, cuts.shapes)
    _check_sizes(model, cuts)
    _check_blocks(model, cuts)
    gone = [name for block in cuts.blocks for name in block.tensors]
    if optimizer is not None:
        check_optimizer(optimizer, {name: tensors[name] for name in (*cuts.kept, *gone)})
        _drop(optimizer, [tensors[name] for name in gone])
    for name, indices in cuts.kept.items():
        _cut_tensor(tensors[name], indices, optimizer)
    return _resize_(model, cuts)


def _check_sizes(model: nn.Module, cuts: Cuts) -> None:
    modules = modules_of(model) if cuts.sizes else {}
    for size in cuts.sizes:
        if (found := size.read(modules.get(size.module))) != size.before:
            what = f"the plan is of another network: {size.module}.{size.attribute} has changed"
            raise InvalidSetting(what, got=found, wanted=size.before)


def _check_blocks(model: nn.Module, cuts: Cuts) -> None:
    modules, tensors = (modules_of(model), tensors_of(model)) if cuts.blocks else ({}, {})
    for block in cuts.blocks:
        block.check(modules, tensors)


def _resize_(model: nn.Module, cuts: Cuts) -> nn.Module:
    """Replace the blocks that lose a branch, and set the numbers that modules keep about their channels."""
    for block in outermost_last(cuts.blocks):
        block.apply_(model)
    modules = modules_of(model)
    for size in cuts.sizes:
        size.set_(modules[size.module])
    for module in modules.values():
        if module._parameters or module._buffers:
            refresh(module)
    return model


def _cut_tensor(tensor: Tensor, indices: dict[int, Tensor], optimizer: torch.optim.Optimizer | None) -> None:
    shape = tensor.shape
    if optimizer is not None:
        _cut_optimizer(optimizer, tensor, indices)
    gradient = tensor.grad
    tensor.grad = None
    smaller = cut(tensor.data, shape, indices)
    if isinstance(tensor, nn.Parameter) and (tensor.is_floating_point() or tensor.is_complex()):
        # A loss of an earlier step may still be around, and with it what autograd noted about the old shape.
        # Torch drops that note on a change of type.
        kinds = (torch.complex64, torch.complex128) if tensor.is_complex() else (torch.float16, torch.float32)
        tensor.data = smaller.new_empty(0, dtype=kinds[tensor.dtype == kinds[0]])
    tensor.data = smaller
    if gradient is not None:
        tensor.grad = cut(gradient, shape, indices)


def cut(tensor: Tensor, shape: torch.Size, indices: dict[int, Tensor]) -> Tensor:
    """The tensor with only these indices per axis; axes of size 1 where `shape` has more are left alone."""
    layout = memory_format(tensor)
    for axis, kept in indices.items():
        if tensor.shape[axis] == shape[axis]:
            tensor = tensor.index_select(axis, kept.to(tensor.device))
    return tensor.contiguous(memory_format=layout)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer, also those that a state dict leaves out, under one name each."""
    plain = all(
        getattr(type(model), name) is getattr(nn.Module, name) for name in ("named_parameters", "named_buffers")
    )
    if not plain:
        return {**dict(model.named_parameters()), **dict(model.named_buffers())}
    modules = modules_of(model)
    found, seen = dict[str, Tensor](), set[int]()
    for held in ("_parameters", "_buffers"):
        for path, module in modules.items():
            for name, tensor in vars(module)[held].items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    found[f"{path}.{name}" if path else name] = tensor
    return found


def check_plan(model: nn.Module, plan: Plan, since: Plan | None = None) -> None:
    """Raise if the plan was made for another network than this, as it was cut by `since`."""
    check_module(model)
    if not isinstance(plan, Plan):
        remedy = "Make a plan with secateur.Plan.keep(graph, ...) or Plan.random"
        raise InvalidSetting("this is not a plan", got=type(plan).__name__, remedy=remedy)
    check_same_network(model, plan.graph, since)


def check_same_network(model: nn.Module, graph: ChannelGraph, since: Plan | None = None) -> None:
    """Raise if the graph is of another network than this, as it was cut by `since`."""
    shapes = graph.shapes
    if since is not None:
        shapes = {name: since.shape(name) for name in graph.shapes if name not in since.gone}
    _check_shapes(tensors_of(model), shapes)
    new = next((name for name, p in model.named_parameters() if p.dim() and name not in graph.shapes), None)
    if new is not None:
        raise InvalidSetting(f"the model has {new!r}, which the graph lacks", remedy="Analyse the model again")


def _check_shapes(tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    for name, shape in shapes.items():
        if name not in tensors:
            raise InvalidSetting(f"the plan is of another network: it has {name!r}, which the model lacks")
        if (found := tuple(tensors[name].shape)) != shape:
            what = f"the plan is of another network, or this one is already cut: {name!r}"
            raise InvalidSetting(what, got=found, wanted=shape)


def check_optimizer(optimizer: Any, parameters: Mapping[str, Tensor]) -> None:
    """Raise if the optimizer keeps something of these parameters that cannot be cut along."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidSetting("this is not an optimizer", got=type(optimizer).__name__, wanted="torch.optim.Optimizer")
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
            if not _follows(value, parameter) and any(tensor.numel() > 1 for tensor in tensors):
                raise InvalidSetting(
                    f"{type(optimizer).__name__} keeps {key!r} of {name}, which has another shape and cannot be cut",
                    remedy="Cut without the optimizer, and make a new one",
                )


def _follows(value: Any, parameter: Tensor) -> bool:
    """Whether it is a tensor with one element for each of the parameter's, or for all along some axes."""
    return (
        isinstance(value, Tensor)
        and value is not parameter
        and value.dim() == parameter.dim()
        and all(a in (b, 1) for a, b in zip(value.shape, parameter.shape, strict=True))
    )


def _drop(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> None:
    """Take these out of the optimizer, with what it keeps about them in its state and groups."""
    gone = {id(parameter) for parameter in parameters}
    for group in optimizer.param_groups:
        count = len(group["params"])
        places = [i for i, parameter in enumerate(group["params"]) if id(parameter) in gone]
        for place in reversed(places):
            optimizer.state.pop(group["params"][place], None)
            for values in group.values():
                if isinstance(values, list) and len(values) == count:
                    del values[place]
            count -= 1


def _cut_optimizer(optimizer: torch.optim.Optimizer, parameter: Tensor, indices: dict[int, Tensor]) -> None:
    """Cut what the optimizer keeps per element: tensors that follow the parameter's shape, in its state and groups."""
    shape = parameter.shape
    state = optimizer.state.get(parameter, {})
    for key, value in state.items():
        if _follows(value, parameter):
            state[key] = cut(value, shape, indices)
    for group in optimizer.param_groups:
        position = next((i for i, p in enumerate(group["params"]) if p is parameter), None)
        if position is None:
            continue
        for values in group.values():
            along = isinstance(values, list) and len(values) == len(group["params"])
            if along and _follows(values[position], parameter):
                values[position] = cut(values[position], shape, indices)
