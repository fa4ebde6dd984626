"""Trainers for networks of ultralytics: one that prunes while it trains, and one that trains what is left further.

Both take the network of the checkpoint itself. The trainer of ultralytics builds it anew from its yaml, at full width.
"""

from copy import deepcopy

import torch
from ultralytics.models.yolo.detect import DetectionTrainer
from ultralytics.utils import LOGGER
from ultralytics.utils.torch_utils import EarlyStopping, ModelEMA

import secateur


class FineTuner(DetectionTrainer):
    """Train a network at the widths it has, as after pruning."""

    def get_model(self, cfg=None, weights=None, verbose=True):
        if weights is None:
            raise ValueError("there are no weights: begin with a trained network, as YOLO('best.pt')")
        if weights.model[-1].nc != self.data["nc"]:
            classes = f"{weights.model[-1].nc} classes, and the data have {self.data['nc']}"
            raise ValueError(f"the network has {classes}: train it on the data with `yolo train` first")
        for name, parameter in weights.named_parameters():
            parameter.requires_grad_(".dfl." not in name)  # a checkpoint has all of them frozen
        return weights


class PruningTrainer(FineTuner):
    """Prune in the first epochs, a share after each, and fine-tune in those that follow.

    keep_macs: share of the MACs that stays, counted at the image size of the training.
    prune_epochs: how many epochs prune. Checkpoints are written from the last of these on.
    settings: for `secateur.Pruner`, such as score, rank and limits.
    """

    def __init__(self, *args, keep_macs=0.6, prune_epochs=5, settings=None, **kwargs):
        super().__init__(*args, **kwargs)
        if self.world_size > 1 or self.args.compile:
            raise ValueError("pruning needs one device and compile=False: it changes the shapes of the network")
        if not self.resume and not 1 <= prune_epochs < self.epochs:
            raise ValueError(f"prune_epochs is {prune_epochs}: wanted at least 1 and less than epochs, {self.epochs}")
        self.budget = secateur.Budget(macs=keep_macs)
        self.prune_epochs = prune_epochs
        self.settings = settings or {}
        self.pruner = None
        self.add_callback("on_train_epoch_end", PruningTrainer.prune)

    def build_optimizer(self, model, **settings):
        """Put the gates in place first: the optimizer must have them."""
        if self.resume:  # there is no checkpoint before the network is pruned
            if not hasattr(model, "kept_macs"):
                raise ValueError(f"{self.args.model} is of a run that did not prune: resume it without this trainer")
        else:
            if self.accumulate > (batches := len(self.train_loader)):
                steps = f"the optimizer steps after {self.accumulate} batches, and an epoch has {batches}"
                raise ValueError(f"{steps}: pass a smaller nbs, such as nbs={self.batch_size}")
            size = self.args.imgsz
            example = torch.zeros(1, self.data["channels"], size, size, device=self.device)
            self.pruner = secateur.Pruner(model, example, **self.settings)
            LOGGER.info(f"{self.pruner.graph.macs:,} MACs at {size}x{size}")
        return super().build_optimizer(model, **settings)

    def optimizer_step(self):
        """What ultralytics does, with `observe` between unscaling and clipping, and no moving average of the gates."""
        if self.pruner is None:
            return super().optimizer_step()
        self.scaler.unscale_(self.optimizer)
        self.pruner.observe()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=10.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def prune(self):
        """Remove a share at the end of an epoch, and the gates when the budget is met."""
        if self.pruner is None:
            return
        left = self.prune_epochs - self.epoch  # epochs that prune, with this one
        excess = self.pruner.cost.macs / self.pruner.graph.macs - self.budget.macs
        step = excess / left if left > 1 else 1.0
        removal = self.pruner.prune(budget=self.budget, step=step, optimizer=self.optimizer)
        LOGGER.info(f"epoch {self.epoch + 1}: {removal}")
        if removal.met:
            self.finish()
        self.ema = ModelEMA(secateur.merge_gates_(deepcopy(self.model)))  # what is validated and saved

    def finish(self):
        """Take the gates away, from the optimizer too."""
        self.model.kept_macs = self.pruner.cost.macs / self.pruner.graph.macs
        set_hidden_widths(self.pruner.finish())
        self.pruner = None
        left = {id(parameter) for parameter in self.model.parameters()}
        for group in self.optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) in left]
        for parameter in list(self.optimizer.state):
            if id(parameter) not in left or parameter.dim() == 1:  # scales and shifts, which the gates were merged into
                del self.optimizer.state[parameter]
        self.best_fitness = None  # of a larger network
        self.stopper = EarlyStopping(patience=self.args.patience)

    def save_model(self):
        return self.pruner is None and super().save_model()


def set_hidden_widths(model):
    """Bring C2f and its kind up to date: only their `forward_split`, which the export uses, reads the width `c`."""
    for module in model.modules():
        if hasattr(module, "forward_split"):
            module.c = module.cv1.conv.out_channels // 2
