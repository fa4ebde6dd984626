"""Optimizers by name, in the fastest form that torch has for the device."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from secateur.errors import InvalidSetting, unknown_name

UNFIT = ("Optimizer", "LBFGS", "SparseAdam", "Muon")
KNOWN = {
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and name not in UNFIT
}

FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""Those that torch has one CUDA kernel for. Their state begins with zeros."""


def make_optimizer(
    name: str,
    parameters: Sequence[nn.Parameter],
    *,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    decay_norms: bool = True,
) -> torch.optim.Optimizer:
    """The optimizer of that name; the learning rate is set step by step.

    decay_norms: whether weight decay acts on parameters of one axis too: gates, batch norms and biases.
    On CUDA the learning rate of those in FUSED is a tensor there, so that a captured step can change it.
    """
    if name.lower() in (unfit.lower() for unfit in UNFIT):
        raise InvalidSetting(f"{name} does not fit: it wants a closure, sparse gradients, or matrices only")
    if name.lower() not in KNOWN:
        raise unknown_name("optimizer", name, sorted(KNOWN))
    if not parameters:
        raise InvalidSetting("nothing of the model trains: set requires_grad of its parameters")
    kind: Any = KNOWN[name.lower()]
    accepted = inspect.signature(kind).parameters
    device = parameters[0].device
    given: dict[str, Any] = {"momentum": momentum, "nesterov": nesterov and momentum > 0, "weight_decay": weight_decay}
    fused = device.type == "cuda" and kind in FUSED
    if fused:
        given |= {"fused": True, "capturable": True}
    options = {key: value for key, value in given.items() if key in accepted}
    groups: list[Any] = list(parameters)
    if not decay_norms and "weight_decay" in options:
        split = {wide: [p for p in parameters if (p.dim() > 1) == wide] for wide in (True, False)}
        decays = {True: weight_decay, False: 0.0}
        groups = [{"params": part, "weight_decay": decays[wide]} for wide, part in split.items() if part]
    optimizer = kind(groups, lr=0.0, **options)
    for group in optimizer.param_groups:
        if fused:
            group["lr"] = torch.zeros((), device=device)
    if kind is torch.optim.SGD and momentum:
        # As good as none, and a captured step needs them to be there.
        for parameter in parameters:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def can_be_captured(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a captured step of it would follow its learning rate."""
    return all(isinstance(group["lr"], Tensor) for group in optimizer.param_groups)


def placed(optimizer: torch.optim.Optimizer, parameter: Tensor, key: str, value: Any) -> Any:
    """A value read of the parameter's state, put where torch wants it: a count of steps beside it only for kernels."""
    if not isinstance(value, Tensor):
        return value
    if value.shape == parameter.shape:
        return torch.empty_like(parameter).copy_(value)
    groups = (group for group in optimizer.param_groups if any(each is parameter for each in group["params"]))
    group = next(groups, {})
    counts_outside = key == "step" and not (group.get("fused") or group.get("capturable"))
    return value if counts_outside else value.to(parameter.device)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
