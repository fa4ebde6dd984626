"""Prune while Lightning trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from secateur.errors import InvalidData
from secateur.extras import import_extra
from secateur.integrations.steps import StepPruning

lightning = import_extra("lightning", "lightning")


class Prune(StepPruning, lightning.Callback):
    """A callback that removes channels every so many optimizer steps until the budget is met, then lets training go on.

    Make the pruner before the trainer, and the module's optimizer from the parameters of the model, gates included.
    When training ends, the gates are merged. The arguments are those of `StepPruning`.
    """

    _waiting = False
    """Whether the optimizer has stepped since the last batch."""

    def resume(self, checkpoint: str | Path) -> None:
        """Before `trainer.fit(..., ckpt_path=checkpoint)`: bring the model to the shapes of that checkpoint."""
        saved = torch.load(checkpoint, map_location="cpu", weights_only=True)
        if (state := saved.get("callbacks", {}).get(self.state_key)) is None:
            raise InvalidData(f"{checkpoint} holds no state of this callback", wanted=f"one under {self.state_key!r}")
        super().load_state_dict(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing: Lightning calls it when the tensors are loaded, which is too late. `resume` does it."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.begin(trainer.optimizers, trainer.world_size)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.observe()  # once per step, unscaled and before clipping
        self._waiting = True

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *given: Any) -> None:
        if self._waiting:  # with accumulated gradients, not after every batch
            self._waiting = False
            self.stepped(trainer.optimizers[0])

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.finish()
