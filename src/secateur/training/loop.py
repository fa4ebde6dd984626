"""One epoch of training, and learning rates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from secateur.errors import InvalidTask, NonFiniteLoss
from secateur.training.batches import device_of, on_device

LOOK_EVERY = 50
"""Steps between looks at the loss on devices that would have to be waited for."""


def triangle(step: int, num_steps: int, low: float, high: float) -> float:
    """The 1-cycle learning rate: linearly from low to high over the first half of the steps, and back.

    >>> [triangle(step, 4, 1.0, 3.0) for step in range(5)]
    [1.0, 2.0, 3.0, 2.0, 1.0]
    """
    return low + (high - low) * (1 - abs(2 * step / num_steps - 1))


def train_epoch(
    model: nn.Module,
    batches: Iterable[Any],
    loss_of: Callable[[nn.Module, Any], Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    rate: Callable[[int], float],
    after_backward: Callable[[], None] | None = None,
) -> float:
    """Go through the batches once, one optimizer step each; the mean loss.

    rate: the learning rate of a step, counted from 0.
    after_backward: called when the gradients are there, before the optimizer's step.

    Raises `NonFiniteLoss` with the step at which the loss stopped being a number.
    """
    device = device_of(model)
    total = torch.zeros((), dtype=torch.float64, device=device)
    broken = torch.full((), -1, dtype=torch.long, device=device)
    step = -1
    for step, batch in enumerate(on_device(batches, model)):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        model.zero_grad(set_to_none=True)
        loss = loss_of(model, batch)
        if step == 0:
            check_loss(loss)
        value = loss.detach()
        total += value
        broken = torch.where((broken < 0) & ~value.isfinite(), step, broken)
        if (device.type == "cpu" or step % LOOK_EVERY == 0) and int(broken) >= 0:
            raise NonFiniteLoss(int(broken))
        loss.backward()
        if after_backward is not None:
            after_backward()
        optimizer.step()
    if step < 0:
        raise InvalidTask("the training data yields no batches")
    if int(broken) >= 0:
        raise NonFiniteLoss(int(broken))
    model.zero_grad(set_to_none=True)
    return float(total) / (step + 1)


def check_loss(loss: Any) -> None:
    """Raise unless this can be trained on."""
    if not isinstance(loss, Tensor):
        raise InvalidTask(f"the loss must be a tensor, got {type(loss).__name__}: return it without .item()")
    if loss.dim() != 0:
        raise InvalidTask(f"the loss must be a scalar, got shape {tuple(loss.shape)}: reduce it, e.g. with .mean()")
    if not loss.requires_grad:
        raise InvalidTask("the loss has no gradient: compute it from the model's output without detach() or no_grad()")


@contextmanager
def seeded(seed: int, *counters: int) -> Iterator[None]:
    """Random numbers that depend on the seed and these counters alone; the caller's go on undisturbed afterwards."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(mix(seed, *counters))
        yield


def mix(seed: int, *counters: int) -> int:
    """One seed from several numbers."""
    for counter in counters:
        seed = (seed * 0x9E3779B97F4A7C15 + counter + 1) % 2**63
    return seed
