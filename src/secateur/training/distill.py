"""Distillation: learn from another network's outputs beside the labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateur.errors import InvalidTask
from secateur.training.batches import device_of, hand_over, map_tensors

Loss = Callable[[nn.Module, Any], Tensor]


def distilled(loss: Loss, teacher: nn.Module, weight: float, temperature: float, mix: str = "none") -> Loss:
    """(1 - weight) * loss + weight * T^2 * KL(teacher || model), both softened by the temperature T.

    The model is watched while the loss calls it, and the teacher called with the same arguments: any task whose model
    gives scores over classes along axis 1 can be distilled. With `mix` both are called with mixtures of images; what
    the labels say is left as it is, as most of an image is still what it was.
    """
    teacher.eval().requires_grad_(False)

    def combined(model: nn.Module, batch: Any) -> Tensor:
        answers: list[Callable[[], Tensor]] = []
        outputs: list[Any] = []

        def called(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if mix != "none":
                args, kwargs = _mixed_images((args, kwargs), mix)
            answers.append(_asked(teacher, args, kwargs))
            return args, kwargs

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
        terms = [softened(_scores(output), answer(), temperature) for output, answer in pairs]
        return (1 - weight) * own + weight * torch.stack(terms).mean()

    return combined


@torch.no_grad()
def _asked(teacher: nn.Module, args: Any, kwargs: Any) -> Callable[[], Tensor]:
    """The teacher's scores, to be waited for; on a GPU it works them out beside the model, which leaves room for it."""
    # Both may write to what they are given.
    args, kwargs = map_tensors((args, kwargs), torch.clone)
    device = device_of(teacher)
    if device.type != "cuda":
        target = _scores(teacher(*args, **kwargs))
        return lambda: target
    beside = torch.cuda.Stream(device)
    beside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(beside):
        target = _scores(teacher(*args, **kwargs))

    def answer() -> Tensor:
        # What the teacher reads is held until here: it must not be given to the model while it is read.
        hand_over((args, kwargs, target), beside, device)
        return target

    return answer


def _mixed_images(arguments: Any, how: str) -> Any:
    found: list[Tensor] = []
    map_tensors(arguments, lambda tensor: found.append(tensor) if _are_images(tensor) else None)
    if len(found) != 1:
        raise InvalidTask(f"distill_mix is for models that take one batch of images, and this one takes {len(found)}")
    return map_tensors(arguments, lambda tensor: mixed(tensor, how) if tensor is found[0] else tensor)


def _are_images(tensor: Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_floating_point()


def mixed(images: Tensor, how: str) -> Tensor:
    """Each image with up to half of another one of the batch."""
    others = images.flip(0)
    count, _, *size = images.shape
    share, *corner = torch.rand(3, count, 1, device=images.device)
    share = share / 2
    if how == "blend":
        return images.lerp(others, share[:, :, None, None].to(images.dtype))
    side = share.sqrt()
    inside = []
    for length, place in zip(size, corner, strict=True):
        start = place * (1 - side)
        middles = (torch.arange(length, device=images.device) + 0.5) / length
        inside.append((start <= middles) & (middles < start + side))
    rows, columns = inside
    return torch.where(rows[:, None, :, None] & columns[:, None, None, :], others, images)


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
