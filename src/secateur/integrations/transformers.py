"""Prune while the Trainer of Hugging Face's transformers trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from secateur.errors import InvalidSetting
from secateur.extras import import_extra
from secateur.integrations.steps import StepPruning

transformers = import_extra("transformers", "transformers")

STATE = "pruner.pt"
"""The file in a checkpoint."""


class Prune(StepPruning, transformers.TrainerCallback):
    """A callback that removes channels every so many optimizer steps until the budget is met, then lets training go on.

    Make the pruner before `trainer.train()`. When training ends, the gates are merged. The trainer clips gradients
    before its callbacks see them, so a step whose gradients are clipped counts less in the score; `max_grad_norm=0`
    avoids that. The arguments are those of `StepPruning`.
    """

    def resume(self, checkpoint: str | Path) -> None:
        """Before `trainer.train(resume_from_checkpoint=checkpoint)`: bring the model to its shapes."""
        self.load_state_dict(torch.load(Path(checkpoint) / STATE, map_location="cpu", weights_only=True))

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if args.load_best_model_at_end:
            remedy = "Checkpoints from before a removal have other shapes. Load the best one yourself, with resume()"
            raise InvalidSetting("load_best_model_at_end is set", remedy=remedy)
        if args.fp16 and not args.max_grad_norm:
            remedy = "Set max_grad_norm, or use bf16"
            raise InvalidSetting("with fp16 the trainer scales gradients back only to clip them", remedy=remedy)
        self.begin([given["optimizer"]], max(args.world_size, args.n_gpu))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.observe()

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.stepped(given["optimizer"])

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        torch.save(self.state_dict(), folder / STATE)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.finish()
