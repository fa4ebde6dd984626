"""`secateur train`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from secateur.cli.flags import flags_of, typed
from secateur.cli.options import NewRunOutput, Source, default_pruning
from secateur.cli.runs import start
from secateur.errors import InvalidSetting
from secateur.recipes.experiments import doubled
from secateur.recipes.paper import find_recipe, is_recipe
from secateur.recipes.recipe import from_scratch, scaled, transfer
from secateur.training.engine import Engine
from secateur.training.settings import Training, with_epochs


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a network: from random weights, from given ones, or in the shape of a pruned or narrower network.

    Defaults are those of the recipe, as `secateur train RECIPE --help` shows them. A pruned network is trained as the
    recipe fine-tunes, unless flags say otherwise. NETWORK@DATASET with weights is trained for 25 epochs. If the weights
    are for other classes, the classifier of a network of torchvision or timm is made anew.

    examples:
      secateur train resnet56-cifar10 --data cifar --out runs/baseline
      secateur train vgg16m-cub200 --data CUB --weights vgg16_bn.pth --precision bf16 --channels-last
      secateur train timm:mobilenetv3_small_100@class_folders --data photos --weights imagenet.safetensors
      secateur train resnet56-cifar10 --data cifar --weights runs/pruned --epochs 100 --distill 0.9
      secateur train vgg16m-cifar100 --data cifar --shape-of runs/pruned
      secateur train vgg16m-cifar100 --data cifar --narrow-to 0.25 --distill 0.9 --teacher runs/baseline
    """

    recipe: str
    """What to train: a recipe, NETWORK@DATASET or package.module:callable for a secateur.Job (model, example, task)."""

    weights: Path | None = None
    """Start from these weights: a run, a result, or a file with a state dict. A pruned network is fine-tuned."""

    new_head: str | None = None
    """The classifier to make anew, as fc, where the weights are for other classes: found for torchvision and timm."""

    shape_of: Path | None = None
    """Train the shape of this pruned network from random weights, by default for twice the recipe's epochs."""

    narrow_to: float | None = None
    """Make all layers narrower by one factor, so that this share of the MACs stays; by default for twice the epochs."""

    teacher: Path | None = None
    """What --distill learns from, if not the whole network that it starts from: a run, or a file with a state dict."""

    epochs_scale: float = 1.0
    """Multiplies the epochs: 0.01 for a rehearsal."""

    settings: Any = None
    source: Source = field(default_factory=Source)
    engine: Any = None
    output: NewRunOutput = field(default_factory=NewRunOutput)

    @classmethod
    def flags(cls, recipe: str) -> dict[str, type]:
        return {"settings": flags_of(Training, default_training(recipe).to_dict()), "engine": flags_of(Engine)}

    def run(self) -> str:
        from secateur.recipes.controls import narrowed
        from secateur.recipes.work import RunConfig

        given = {"--weights": self.weights, "--shape-of": self.shape_of, "--narrow-to": self.narrow_to}
        if len(names := [name for name, value in given.items() if value is not None]) > 1:
            raise InvalidSetting("these do not go together", got=" and ".join(names))
        teacher = str(self.teacher.absolute()) if self.teacher is not None else None
        values = {"fresh": self.shape_of is not None, "new_head": self.new_head, "teacher": teacher}
        source = self.source.choosing(self.recipe, bool(typed(self.settings).get("best_epoch")))
        order = source.order(self.recipe, self.weights or self.shape_of, **values)
        settings = scaled(self.schedule().but(**with_epochs(typed(self.settings))), self.epochs_scale)
        engine = Engine.of(**typed(self.engine))
        self.output.check_new()
        if self.narrow_to is not None:
            order = narrowed(order, self.narrow_to, settings.seed)
        return start(RunConfig(order=order, settings=settings, engine=engine), self.output.out, self.output)

    def schedule(self) -> Training:
        """How to train unless flags say otherwise."""
        if self.weights is not None:
            from secateur.recipes.starts import find_source

            if find_source(str(self.weights)).plan is not None:
                pruning = default_pruning(self.recipe)
                return Training(schedule=pruning.finetune, learning=pruning.learning) if pruning else Training()
            if is_recipe(self.recipe) and (training := find_recipe(self.recipe).transfer) is not None:
                return training
            if self.new_head is not None:
                return transfer()
        training = default_training(self.recipe)
        return doubled(training) if self.shape_of is not None or self.narrow_to is not None else training


def default_training(recipe: str) -> Training:
    return find_recipe(recipe).training if is_recipe(recipe) else from_scratch()
