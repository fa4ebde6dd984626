"""Cut a network: every tensor by index, and every number that a module keeps about its tensors."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from secateur.channels.bookkeeping import refresh
from secateur.channels.cost import is_kept
from secateur.channels.groups import ChannelGraph
from secateur.channels.guard import check_module
from secateur.channels.plan import Plan
from secateur.channels.shapes import memory_format
from secateur.errors import InvalidArgument, InvalidModel, InvalidOptimizer, InvalidPlan


def shrink(model: nn.Module, plan: Plan) -> nn.Module:
    """A smaller copy of the model; the model itself stays as it is."""
    return shrink_(copy_model(model), plan)


def copy_model(model: nn.Module) -> nn.Module:
    check_module(model)
    # What a forward pass has left in the modules, as weight_norm does, torch copies only without its history.
    left = [tensor for module in model.modules() for tensor in tree_leaves(vars(module)) if _has_history(tensor)]
    try:
        return copy.deepcopy(model, {id(tensor): tensor.detach().clone() for tensor in left})
    except Exception as error:
        remedy = "go without copies: analyze(probe=False) and shrink_"
        raise InvalidModel(f"{type(model).__name__} cannot be copied: {error}. Remedy: {remedy}") from error


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer, also those that a state dict leaves out, under one name each."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def tensors_for(model: nn.Module, plan: Plan, since: Plan | None = None) -> dict[str, Tensor]:
    """The same; raises if the plan was made for another network."""
    check_module(model)
    if not isinstance(plan, Plan):
        kind = type(plan).__name__
        raise InvalidArgument(
            f"a plan is wanted, got {kind}: make it with secateur.Plan.keep(graph, ...) or Plan.random"
        )
    return matching_tensors(model, plan.graph, since)


def matching_tensors(model: nn.Module, graph: ChannelGraph, since: Plan | None = None) -> dict[str, Tensor]:
    """The same; raises if the graph is of another network."""
    tensors = tensors_of(model)
    for name, shape in graph.shapes.items():
        if name not in tensors:
            raise InvalidPlan(f"the graph is of another network: it has {name!r}, which this one lacks")
        wanted, found = since.shape(name) if since is not None else shape, tuple(tensors[name].shape)
        if found != wanted:
            raise InvalidPlan(
                f"the graph is of another network: it has {name!r} of shape {wanted}, found {found}: already cut?"
            )
    new = next((name for name, p in model.named_parameters() if p.dim() and name not in graph.shapes), None)
    if new is not None:
        remedy = "merge_gates_ first" if new.endswith("gate_phi") else "analyse it anew"
        raise InvalidPlan(f"the graph is of another network: it lacks {new!r}, which this one has: {remedy}")
    return tensors


def _has_history(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_leaf


@torch.no_grad()
def shrink_(
    model: nn.Module, plan: Plan, optimizer: torch.optim.Optimizer | None = None, since: Plan | None = None
) -> nn.Module:
    """Cut the model in place and return it.

    Parameters and buffers remain the same objects with smaller contents, so that tied ones stay tied and the optimizer
    keeps its hold on them; gradients and the optimizer's per-element state are cut by the same indices.

    since: the plan of the same graph by which the model has already been cut; this one must keep no more.
    """
    tensors = tensors_for(model, plan, since)
    cuts = cuts_between(plan, since)
    if optimizer is not None:
        check_optimizer(optimizer, {name: tensors[name] for name in cuts})
    for name, indices in cuts.items():
        tensor = tensors[name]
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
    modules = dict(model.named_modules())
    for attribute in plan.graph.attributes:
        count = int(is_kept(attribute.channels, plan.kept).sum())
        if count != attribute.size:
            set_size(modules[attribute.module], attribute.attribute, attribute.position, count)
    for module in modules.values():
        refresh(module)
    return model


def cuts_between(plan: Plan, since: Plan | None) -> dict[str, dict[int, Tensor]]:
    """The indices to keep, by tensor and axis, counted in the network as it stands."""
    if since is not None and (since.graph is not plan.graph or bool((plan.kept & ~since.kept).any())):
        raise InvalidPlan("the plan keeps channels that were cut before: start from the whole network")
    cuts: dict[str, dict[int, Tensor]] = {}
    for (name, axis), indices in plan.remaining.items():
        before = since.remaining.get((name, axis)) if since is not None else None
        if before is None or before.numel() > indices.numel():
            here = indices if before is None else torch.searchsorted(before, indices)
            cuts.setdefault(name, {})[axis] = here
    return cuts


def cut(tensor: Tensor, shape: torch.Size, indices: dict[int, Tensor]) -> Tensor:
    """The tensor with only these indices per axis; axes of size 1 where `shape` has more are left alone."""
    layout = memory_format(tensor)
    for axis, kept in indices.items():
        if tensor.shape[axis] == shape[axis]:
            tensor = tensor.index_select(axis, kept.to(tensor.device))
    return tensor.contiguous(memory_format=layout)


def check_optimizer(optimizer: Any, parameters: Mapping[str, Tensor]) -> None:
    """Raise if the optimizer keeps something of these parameters that could not be cut along."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidOptimizer(f"the optimizer is one of torch.optim.Optimizer, got {type(optimizer).__name__}")
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
            if not _follows(value, parameter) and any(tensor.numel() > 1 for tensor in tensors):
                raise InvalidOptimizer(
                    f"{type(optimizer).__name__} keeps {key!r} of {name}, which has another shape and cannot be cut: "
                    "cut without the optimizer, and make a new one"
                )


def _follows(value: Any, parameter: Tensor) -> bool:
    """Whether it is a tensor with one element for each of the parameter's, or for all along some axes."""
    return (
        isinstance(value, Tensor)
        and value is not parameter
        and value.dim() == parameter.dim()
        and all(a in (b, 1) for a, b in zip(value.shape, parameter.shape, strict=True))
    )


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
        for key, values in group.items():
            if (
                key != "params"
                and isinstance(values, list)
                and len(values) == len(group["params"])
                and _follows(values[position], parameter)
            ):
                values[position] = cut(values[position], shape, indices)


def set_size(module: nn.Module, attribute: str, position: int | None, count: int) -> None:
    """Change a number that a module keeps about its channels."""
    if position is None:
        setattr(module, attribute, count)
        return
    value = getattr(module, attribute)
    if isinstance(value, list):
        value = list(value)
        value[position] = count
        setattr(module, attribute, value)
    else:
        setattr(module, attribute, (*value[:position], count, *value[position + 1 :]))
