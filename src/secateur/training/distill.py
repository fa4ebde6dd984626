"""Distillation: learn from another network's outputs and from the labels."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateur.errors import InvalidData
from secateur.nested import map_tensors
from secateur.training.batches import device_of, hand_over
from secateur.training.entries import Key, form_of, tensor_of
from secateur.training.features import Features
from secateur.training.task import Loss


def distilled(
    loss: Loss,
    teacher: nn.Module,
    weight: float,
    temperature: float,
    output: Key | None = None,
    features: Features | None = None,
) -> Loss:
    """(1 - weight) * loss + weight * T^2 * KL(teacher || model), both softened by the temperature T.

    Whenever the loss calls the model, the teacher is called with the same arguments, so this works for any task whose
    model gives scores over classes along axis 1. With a weight of 1 only its calls of the model matter.
    output: where these are in what both return.
    features: of both, whose distance counts beside that of the scores.
    """
    teacher.eval().requires_grad_(False)

    def combined(model: nn.Module, batch: Any) -> Tensor:
        answers: list[Callable[[], tuple[Tensor, Tensor | None]]] = []
        outputs: list[tuple[Any, Tensor | None]] = []

        with features.watched(model) if features is not None else nullcontext([]) as seen:

            def called(module: nn.Module, args: Any, kwargs: Any) -> None:
                seen.clear()
                answers.append(_asked(teacher, args, kwargs, output, features))

            def returned(module: nn.Module, args: Any, found: Any) -> None:
                outputs.append((found, features.last(seen) if features is not None else None))

            ask = model.register_forward_pre_hook(called, with_kwargs=True)
            keep = model.register_forward_hook(returned)
            try:
                labelled = loss(model, batch)
            finally:
                ask.remove()
                keep.remove()
        if not outputs:
            raise InvalidData("the loss never calls the model, so there is nothing to distil")
        terms: list[Tensor] = []
        for (given, own), answer in zip(outputs, answers, strict=True):
            scores, target = answer()
            terms.append(softened(scores_of(given, output), scores, temperature))
            if features is not None and own is not None and target is not None:
                terms[-1] = terms[-1] + features.distance(own, target)
        distance = torch.stack(terms).mean()
        return distance if weight == 1 else (1 - weight) * labelled + weight * distance

    return combined


@torch.no_grad()
def _asked(
    teacher: nn.Module, args: Any, kwargs: Any, output: Key | None, features: Features | None
) -> Callable[[], tuple[Tensor, Tensor | None]]:
    """A function that waits for the teacher's scores and features, which a GPU computes beside the model's."""
    # Both may write to what they are given.
    args, kwargs = map_tensors((args, kwargs), torch.clone)
    device = device_of(teacher)

    def compute() -> tuple[Tensor, Tensor | None]:
        with features.watched(teacher) if features is not None else nullcontext([]) as found:
            scores = scores_of(teacher(*args, **kwargs), output)
        return scores, features.last(found) if features is not None else None

    if device.type != "cuda":
        target = compute()
        return lambda: target
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        target = compute()

    def answer() -> tuple[Tensor, Tensor | None]:
        # Holds what the teacher reads until here, so that the model does not get that memory meanwhile.
        hand_over((args, kwargs, target), stream, device)
        return target

    return answer


def softened(scores: Tensor, target: Tensor, temperature: float) -> Tensor:
    """T^2 * KL, averaged over images and pixels."""
    log_probabilities = F.log_softmax(_wide(scores) / temperature, 1)
    wanted = F.log_softmax(_wide(target) / temperature, 1)
    return temperature**2 * (wanted.exp() * (wanted - log_probabilities)).sum(1).mean()


def _wide(scores: Tensor) -> Tensor:
    return scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores


def scores_of(found: Any, output: Key | None = None) -> Tensor:
    """The scores in what a model returns; raises if there are none."""
    scores = tensor_of(found, output)
    if scores is None or scores.dim() < 2:
        raise InvalidData(
            "the output of the model cannot be distilled",
            got=form_of(found),
            wanted="scores over classes",
            remedy='Say where they are when you make the task, as with output="logits"' if scores is None else None,
        )
    return scores
