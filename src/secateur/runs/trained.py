"""What trains in which phase, and by which optimizer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from secateur.pruning.gates import Gates
from secateur.runs.settings import TickTock
from secateur.training.optimizers import make_optimizer


def in_tick(
    model: nn.Module, gates: Gates, trained: Sequence[nn.Parameter], final: Sequence[str], shifts: bool
) -> list[nn.Parameter]:
    """The gates and the final layers, and if so set the shifts of gated batch norms."""
    named = dict(model.named_parameters())
    chosen = {id(named[name]) for name in final if name in named}
    if shifts:
        chosen |= {id(p) for m in gates.modules if m.gate_fold.frozen for p in m.gate_tensors()[2:]}
    return [*(p for p in trained if id(p) in chosen), *gates.trainable]


def in_tock(gates: Gates, trained: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Everything but the weights of batch norms that are folded into gates."""
    frozen = {id(p) for m in gates.modules if m.gate_fold.frozen for p in m.gate_tensors()[1:2]}
    return [*(p for p in trained if id(p) not in frozen), *gates.trainable]


def only_train_(model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
    """Nothing else gets a gradient, and so neither weight decay nor momentum moves it."""
    chosen = {id(p) for p in parameters}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in chosen)
        parameter.grad = None


def optimizer_for(parameters: Sequence[nn.Parameter], settings: TickTock) -> torch.optim.Optimizer:
    return make_optimizer(
        settings.optimizer,
        parameters,
        momentum=settings.momentum,
        nesterov=settings.nesterov,
        weight_decay=settings.weight_decay,
        decay_norms=settings.decay_norms,
    )
