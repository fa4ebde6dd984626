"""A network with gates as a plain one, and what was done to the plain one back into it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from secateur.channels.plan import Plan
from secateur.channels.shrink import copy_model, shrink_
from secateur.pruning.gates import Gates, merge_gates_


def plain_copy(gates: Gates) -> nn.Module:
    """A copy of the network without gates and without the channels that are masked."""
    model = copy_model(gates.model)
    shrink_(model, Plan(gates.graph, gates.kept), since=gates.present)
    return merge_gates_(model)


@torch.no_grad()
def take_weights_(gates: Gates, plain: nn.Module, names: Iterable[str]) -> None:
    """Give the network with gates these weights of a plain copy. Gates, masked channels and momentum stay as they are;
    so do filters whose gate is zero.
    """
    parameters = dict(gates.model.named_parameters())
    left = Plan(gates.graph, gates.kept).cuts(gates.present).kept
    factors = {
        f"{site.module}.{site.weight}" if site.module else site.weight: (module.gate_factor(), site.axis)
        for module, site in zip(gates.modules, gates.sites, strict=True)
    }
    for name in names:
        parameter = parameters[name]
        rows, columns = (
            left.get(name, {}).get(axis, torch.arange(parameter.shape[axis])).to(parameter.device) for axis in (0, 1)
        )
        before, value = parameter[rows[:, None], columns], plain.get_parameter(name).to(parameter)
        if name in factors:
            factor, axis = factors[name]
            shape = [1] * value.dim()
            shape[axis] = -1
            factor = factor[rows if axis == 0 else columns].to(value).reshape(shape)
            value = torch.where(factor == 0, before, value / torch.where(factor == 0, 1, factor))
        parameter[rows[:, None], columns] = value
