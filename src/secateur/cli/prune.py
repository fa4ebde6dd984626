"""`secateur prune`, `secateur continue` and `secateur resume`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from secateur.cli.flags import Switch, flags_of, typed
from secateur.cli.options import NewRunOutput, RunOutput, Source, pruning_of, shown_pruning
from secateur.cli.runs import start
from secateur.cli.search import SEARCH, resume_search, start_search
from secateur.errors import InvalidSetting
from secateur.pruning.settings import Budget
from secateur.recipes.recipe import scaled
from secateur.runs.settings import Preset, TickTock
from secateur.training.engine import Engine


@dataclass(frozen=True, kw_only=True)
class Prune:
    """Prune a network by Tick-Tock and fine-tune it. The run lives in a folder: stop it with Ctrl-C, resume it later.

    A recipe is trained first if there are no --weights, or if they are for other classes. `secateur prune RECIPE
    --help` shows the settings of that recipe.

    examples:
      secateur prune digits --keep-macs 0.4 --out runs/digits
      secateur prune resnet56-cifar10 --data cifar --weights runs/baseline --keep-macs 0.3 --precision bf16
      secateur prune torchvision:resnet18@class_folders --data photos --weights photos.pth --keep-macs 0.5
      secateur prune torchvision:resnet18@images --data photos --weights resnet18.pth --keep-macs 0.7 --no-train
      secateur prune my_project.task:build --keep-macs 0.4 --preset balanced
      secateur prune my_project.task:build --target-accuracy 98
      torchrun --nproc-per-node 4 -m secateur prune my_project.task:build --keep-macs 0.4
    """

    recipe: str
    """What to prune: a recipe, NETWORK@DATASET or package.module:callable for a secateur.Job (model, example, task)."""

    weights: Path | None = None
    """The trained network: a run of secateur train, or a file with a state dict."""

    new_head: str | None = None
    """The classifier to make anew, as fc, where the weights are for other classes: found for torchvision and timm."""

    preset: Preset | None = None
    """quick: repair, and a few epochs. balanced: some 25. paper: its settings. Your own jobs are quick by default."""

    target_accuracy: float | None = None
    """Instead of a budget: prune as far as this accuracy, in percent on held-out images, allows, in several runs."""

    no_train: Switch = False
    """Do not train: remove in small steps, and re-fit what is left after each. Needs few images, and no labels."""

    epochs_scale: float = 1.0
    """Multiplies the length of everything, epochs and number of Ticks: 0.01 for a rehearsal."""

    settings: Any = None
    source: Source = field(default_factory=Source)
    engine: Any = None
    output: NewRunOutput = field(default_factory=NewRunOutput)

    @classmethod
    def flags(cls, recipe: str) -> dict[str, type]:
        return {"settings": flags_of(TickTock, shown_pruning(recipe)), "engine": flags_of(Engine)}

    def run(self) -> str:
        from secateur.recipes.work import RunConfig
        from secateur.runs.search import FIRST, check_target

        given = {"epochs_scale": self.epochs_scale, "new_head": self.new_head}
        values = typed(self.settings)
        source = self.source.choosing(self.recipe, self.target_accuracy is not None or bool(values.get("best_epoch")))
        order = (source.trained if self.no_train else source.order)(self.recipe, self.weights, **given)
        if self.target_accuracy is not None:
            check_target(self.target_accuracy, values)
            values["keep_macs"] = FIRST
        settings = pruning_of(self.recipe, self.preset, values)
        if self.no_train:
            settings = _without_training(settings, values)
        engine = Engine.of(**typed(self.engine))
        self.output.check_new()
        config = RunConfig(order=order, settings=scaled(settings, self.epochs_scale), engine=engine)
        if self.target_accuracy is not None:
            return start_search(config, self.target_accuracy, self.output.out, self.output)
        return start(config, self.output.out, self.output)


def _without_training(settings: TickTock, values: dict[str, Any]) -> TickTock:
    """The settings without training, with what was typed on top."""
    if values.keys() & {"tick_data", "tick_per_class"}:
        values = {"tick_images": None, **values}
    settings = settings.without_training().but(**values)
    if settings.trains or settings.finetune.epochs or settings.retrain_epochs:
        named = ("tick_lr", "tock_every", "finetune_epochs", "retrain_epochs")
        got = " and ".join(f"--{name.replace('_', '-')}" for name in named if values.get(name))
        raise InvalidSetting("--no-train excludes what trains", got=got, remedy="Leave out one of them")
    return settings


@dataclass(frozen=True, kw_only=True)
class Continue:
    """Prune more than a run did: a new run starts where that one finished pruning, and is fine-tuned in its turn.

    All other settings are those of that run, which stays as it is.

    examples:
      secateur continue runs/digits --keep-macs 0.2 --out runs/smaller
    """

    folder: Path
    """Folder of the run."""

    budget: Any = None
    output: NewRunOutput = field(default_factory=NewRunOutput)

    @classmethod
    def flags(cls, recipe: str) -> dict[str, type]:
        return {"budget": flags_of(Budget, prefix="keep_")}

    def run(self) -> str:
        from secateur.recipes.work import read_run, smaller

        config, budget = read_run(self.folder), typed(self.budget)
        if not budget:
            raise InvalidSetting("there is no budget", remedy="Say how much stays, as --keep-macs 0.2")
        self.output.check_new()
        return start(smaller(config, **budget), self.output.out, self.output, continue_from=self.folder)


@dataclass(frozen=True, kw_only=True)
class Resume:
    """Resume a run that was stopped or killed, from its last checkpoint.

    examples:
      secateur resume runs/digits
      torchrun --nproc-per-node 4 -m secateur resume runs/large
    """

    folder: Path
    """Folder of the run."""

    output: RunOutput = field(default_factory=RunOutput)

    def run(self) -> str:
        from secateur.recipes.work import read_run

        if (self.folder / SEARCH).is_file():
            return resume_search(self.folder, self.output)
        return start(read_run(self.folder), self.folder, self.output)
