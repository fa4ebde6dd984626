"""Optimizers by name, in the fastest form that torch has for the device."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from secateur.errors import InvalidSetting, unknown_name
from secateur.training.settings import Learning

UNFIT = ("Optimizer", "LBFGS", "SparseAdam", "Muon")
KNOWN = {
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and name not in UNFIT
}

FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""Those that torch has one CUDA kernel for. Their state begins with zeros."""


def make_optimizer(parameters: Sequence[nn.Parameter], learning: Learning) -> torch.optim.Optimizer:
    """The optimizer of the settings; the learning rate is set step by step.

    On CUDA the learning rate of those in FUSED is a tensor there, so that a captured step can change it.
    """
    name, momentum = learning.optimizer, learning.momentum
    if name.lower() in (unfit.lower() for unfit in UNFIT):
        raise InvalidSetting(f"the optimizer {name} does not fit: it needs a closure, sparse gradients, or matrices")
    if name.lower() not in KNOWN:
        raise unknown_name("optimizer", name, sorted(KNOWN))
    if not parameters:
        raise InvalidSetting("nothing of the model trains", remedy="Set requires_grad of its parameters")
    kind: Any = KNOWN[name.lower()]
    accepted = inspect.signature(kind).parameters
    device = parameters[0].device
    nesterov, weight_decay = learning.nesterov and momentum > 0, learning.weight_decay
    given: dict[str, Any] = {"momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
    fused = device.type == "cuda" and kind in FUSED
    if fused:
        given |= {"fused": True, "capturable": True}
    options = {key: value for key, value in given.items() if key in accepted}
    groups: list[Any] = list(parameters)
    if not learning.decay_norms and "weight_decay" in options:
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


def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    """What the optimizer keeps for each parameter, by name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(parameter)]: dict(state) for parameter, state in optimizer.state.items()}


def load_optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module, state: dict[str, Any]) -> None:
    """Give an optimizer of the same parameters what `optimizer_state` has found in another."""
    parameters = dict(model.named_parameters())
    for name, values in state.items():
        parameter = parameters[name]
        placed = {key: _placed(optimizer, parameter, key, value) for key, value in values.items()}
        optimizer.state[parameter].update(placed)


def _placed(optimizer: torch.optim.Optimizer, parameter: Tensor, key: str, value: Any) -> Any:
    """The value where torch wants it: a count of steps is on the GPU only for kernels that read it there."""
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
