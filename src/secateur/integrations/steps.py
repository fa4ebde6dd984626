"""Pruning by optimizer steps, for any trainer."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from secateur.errors import InvalidSetting
from secateur.pruning.pruner import Pruner, Removal
from secateur.pruning.settings import Budget


class StepPruning:
    """Remove channels every so many optimizer steps until the budget is met; what trains after that is fine-tuning.

    pruner: of the model that is trained; the optimizer is made after it.
    fraction: the share of the remaining filters to remove each time.
    every: optimizer steps between two removals; their gradients are the score.
    progress: called with a line for every removal.
    """

    def __init__(
        self,
        pruner: Pruner,
        budget: Budget,
        *,
        fraction: float = 0.05,
        every: int = 100,
        progress: Callable[[str], object] = lambda text: None,
    ) -> None:
        if every < 1:
            raise InvalidSetting("every is out of range", got=every, wanted="1 or more steps")
        self.pruner, self.budget, self.fraction, self.every, self.progress = pruner, budget, fraction, every, progress
        self.step = 0
        self.removals: list[Removal] = []
        """What was removed so far; a loop that is resumed begins anew."""
        self.met = False

    def begin(self, optimizers: list[Any], processes: int) -> None:
        """Raise for what cannot be pruned, before anything trains."""
        if processes > 1:
            remedy = "Train on one device, or use secateur.prune under torchrun"
            raise InvalidSetting("a callback prunes on one device", got=f"{processes} devices", remedy=remedy)
        if len(optimizers) != 1:
            raise InvalidSetting("a callback prunes with one optimizer", got=f"{len(optimizers)} optimizers")
        if not self.pruner.gates.merged:
            self.pruner.check_optimizer(bare(optimizers[0]))

    def observe(self) -> None:
        """Before every optimizer step, with its gradients."""
        if not self.met:
            self.pruner.observe()

    def stepped(self, optimizer: Any) -> None:
        """After every optimizer step."""
        self.step += 1
        if self.met or self.step % self.every:
            return
        removal = self.pruner.prune(self.fraction, self.budget, optimizer=bare(optimizer))
        self.removals.append(removal)
        self.met = removal.met
        self.progress(f"step {self.step}: {removal}")

    def finish(self) -> None:
        """Merge the gates; the model is the user's again."""
        if not self.met:
            warnings.warn(
                f"training ended after {self.step} steps, before the budget was met. Train longer, prune more often, "
                "or remove a larger fraction",
                stacklevel=2,
            )
        self.pruner.finish()

    def state_dict(self) -> dict[str, Any]:
        return {"pruner": self.pruner.state_dict(), "step": self.step, "met": self.met}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Bring the model to the shapes of the state, before its tensors are loaded and the optimizer is made."""
        self.pruner.load_state_dict(state["pruner"])
        self.step, self.met = state["step"], state["met"]


def bare(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer that a trainer has wrapped."""
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, torch.optim.Optimizer) else optimizer
