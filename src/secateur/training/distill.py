"""Distillation: learn from another network's outputs beside the labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateur.errors import InvalidTask

Loss = Callable[[nn.Module, Any], Tensor]


def distilled(loss: Loss, teacher: nn.Module, weight: float, temperature: float) -> Loss:
    """(1 - weight) * loss + weight * T^2 * KL(teacher || model), both softened by the temperature T.

    The model is watched while the loss calls it, and the teacher called with the same arguments: any task whose model
    gives scores over classes along axis 1 can be distilled.
    """
    teacher.eval().requires_grad_(False)

    def combined(model: nn.Module, batch: Any) -> Tensor:
        calls: list[tuple[Any, Any, Any]] = []
        handle = model.register_forward_hook(
            lambda module, args, kwargs, output: calls.append((args, kwargs, output)), with_kwargs=True
        )
        try:
            own = loss(model, batch)
        finally:
            handle.remove()
        if not calls:
            raise InvalidTask("the loss never called the model, so that there is nothing to distil")
        terms = []
        for args, kwargs, output in calls:
            with torch.no_grad():
                target = _scores(teacher(*args, **kwargs))
            terms.append(softened(_scores(output), target, temperature))
        return (1 - weight) * own + weight * torch.stack(terms).mean()

    return combined


def softened(scores: Tensor, target: Tensor, temperature: float) -> Tensor:
    """T^2 * KL, averaged over images and places."""
    log_probabilities = F.log_softmax(_wide(scores) / temperature, 1)
    wanted = F.log_softmax(_wide(target) / temperature, 1)
    return temperature**2 * (wanted.exp() * (wanted - log_probabilities)).sum(1).mean()


def _wide(scores: Tensor) -> Tensor:
    return scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores


def _scores(output: Any) -> Tensor:
    if isinstance(output, Mapping) and isinstance(output.get("out"), Tensor):
        output = output["out"]
    if not isinstance(output, Tensor) or output.dim() < 2:
        raise InvalidTask(f"only scores over classes can be distilled; the model gives a {type(output).__name__}")
    return output
