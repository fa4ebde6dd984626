"""Distillation: learn from another network's outputs beside the labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateur.errors import InvalidTask
from secateur.nested import map_tensors
from secateur.training.batches import device_of, hand_over

Loss = Callable[[nn.Module, Any], Tensor]


def distilled(loss: Loss, teacher: nn.Module, weight: float, temperature: float) -> Loss:
    """(1 - weight) * loss + weight * T^2 * KL(teacher || model), both softened by the temperature T.

    The model is watched while the loss calls it, and the teacher called with the same arguments: any task whose model
    gives scores over classes along axis 1 can be distilled.
    """
    teacher.eval().requires_grad_(False)

    def combined(model: nn.Module, batch: Any) -> Tensor:
        answers: list[Callable[[], Tensor]] = []
        outputs: list[Any] = []

        def called(module: nn.Module, args: Any, kwargs: Any) -> None:
            answers.append(_asked(teacher, args, kwargs))

        ask = model.register_forward_pre_hook(called, with_kwargs=True)
        keep = model.register_forward_hook(lambda module, args, output: outputs.append(output))
        try:
            own = loss(model, batch)
        finally:
            ask.remove()
            keep.remove()
        if not outputs:
            raise InvalidTask("the loss never called the model, so that there is nothing to distil")
        pairs = zip(outputs, answers, strict=True)
        terms = [softened(scores_of(output), answer(), temperature) for output, answer in pairs]
        return (1 - weight) * own + weight * torch.stack(terms).mean()

    return combined


@torch.no_grad()
def _asked(teacher: nn.Module, args: Any, kwargs: Any) -> Callable[[], Tensor]:
    """The teacher's scores, to be waited for; on a GPU it works them out beside the model, which leaves room for it."""
    # Both may write to what they are given.
    args, kwargs = map_tensors((args, kwargs), torch.clone)
    device = device_of(teacher)
    if device.type != "cuda":
        target = scores_of(teacher(*args, **kwargs))
        return lambda: target
    beside = torch.cuda.Stream(device)
    beside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(beside):
        target = scores_of(teacher(*args, **kwargs))

    def answer() -> Tensor:
        # What the teacher reads is held until here: it must not be given to the model while it is read.
        hand_over((args, kwargs, target), beside, device)
        return target

    return answer


def softened(scores: Tensor, target: Tensor, temperature: float) -> Tensor:
    """T^2 * KL, averaged over images and places."""
    log_probabilities = F.log_softmax(_wide(scores) / temperature, 1)
    wanted = F.log_softmax(_wide(target) / temperature, 1)
    return temperature**2 * (wanted.exp() * (wanted - log_probabilities)).sum(1).mean()


def _wide(scores: Tensor) -> Tensor:
    return scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores


def scores_of(output: Any) -> Tensor:
    """What of a model's output can be distilled; raises if nothing can."""
    if isinstance(output, Mapping) and isinstance(output.get("out"), Tensor):
        output = output["out"]
    if not isinstance(output, Tensor) or output.dim() < 2:
        raise InvalidTask(f"only scores over classes can be distilled; the model gives a {type(output).__name__}")
    return output
