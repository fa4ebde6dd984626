"""`secateur train`, `finetune`, `scratch` and `shrunk`: runs that remove nothing."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from secateur.cli.runs import Hardware, Output, Source, start
from secateur.recipes.recipe import Recipe, Training, scaled
from secateur.runs.settings import TickTock
from secateur.training.schedules import Shape


@dataclass(frozen=True, kw_only=True)
class Schedule(Training):
    """How a network is trained from the start: SGD, with a learning rate that falls in steps."""

    def __post_init__(self) -> None:
        """Checked when the command runs: the parser would wrap an error in words of its own."""

    @classmethod
    def of(cls, training: Training, times: int = 1) -> Schedule:
        values = {f.name: getattr(training, f.name) for f in fields(Training)}
        return cls(**{**values, "epochs": times * training.epochs})

    def checked(self, scale: float) -> Training:
        return Training(**{f.name: getattr(self, f.name) for f in fields(Training)}).scaled(scale)


@dataclass(frozen=True, kw_only=True)
class FromTheStart:
    """What trainings from random weights have in common."""

    seed: int = 0
    """Seed of everything random."""

    epochs_scale: float = 1.0
    """Times the epochs: 0.01 for a rehearsal."""

    training: Schedule = field(default_factory=Schedule)
    source: Source = field(default_factory=Source)
    engine: Hardware = field(default_factory=Hardware)
    output: Output = field(default_factory=Output)

    @property
    def debug(self) -> bool:
        return self.output.debug

    def train(self, recipe: str, **values: Any) -> str:
        settings = self.training.checked(self.epochs_scale).settings(self.seed)
        self.output.must_be_new()
        order = self.source.order(recipe, **values)
        return start(order, settings, self.engine.checked(), self.engine.device, self.output)


@dataclass(frozen=True, kw_only=True)
class Train(FromTheStart):
    """Train a recipe's network, as the paper trained its baselines.

    examples:
      secateur train resnet56-cifar10 --data cifar --out runs/baseline
      secateur train vgg16m-cub200 --data CUB --weights vgg16_bn.pth --precision bf16 --channels-last
      secateur train resnet20@fashion_mnist --data fashion --epochs 20 --lr 0.05
    """

    recipe: str
    """What to train: a recipe, NETWORK@DATASET or package.module:callable for a secateur.Job (model, example, task)."""

    weights: Path | None = None
    """Weights to start from, where they are not random: a run, or a file with a state dict."""

    @classmethod
    def like(cls, recipe: Recipe) -> dict[str, Any]:
        """The recipe's values."""
        return {"training": Schedule.of(recipe.training)}

    def run(self) -> str:
        return self.train(self.recipe, weights=self.weights)


@dataclass(frozen=True, kw_only=True)
class Scratch(FromTheStart):
    """Train the shape of a pruned network from random weights: what is the shape worth by itself? The paper trains it
    for twice the epochs of the baseline, to be fair to it.

    examples:
      secateur scratch vgg16m-cifar100 runs/pruned --data cifar --out runs/scratch
    """

    recipe: str
    """How to train: a recipe, NETWORK@DATASET, or package.module:callable."""

    pruned: Path
    """The run whose result has the shape."""

    @classmethod
    def like(cls, recipe: Recipe) -> dict[str, Any]:
        """The recipe's values, and twice its epochs."""
        return {"training": Schedule.of(recipe.training, times=2)}

    def run(self) -> str:
        return self.train(self.recipe, weights=self.pruned, fresh=True)


@dataclass(frozen=True, kw_only=True)
class Shrunk(FromTheStart):
    """Train the network with all layers made narrower by the same factor, which is found so that a share of the MACs is
    left: what would do instead of pruning? The paper trains it for twice the epochs of the baseline.

    examples:
      secateur shrunk vgg16m-cifar100 --keep-macs 0.25 --data cifar --out runs/shrunk
    """

    recipe: str
    """What to train: a recipe, NETWORK@DATASET, or package.module:callable, whose callable takes `width`."""

    keep_macs: float = 0.25
    """Share of the MACs that is left."""

    @classmethod
    def like(cls, recipe: Recipe) -> dict[str, Any]:
        """The recipe's values, and twice its epochs."""
        return {"training": Schedule.of(recipe.training, times=2)}

    def run(self) -> str:
        from secateur.recipes.controls import narrowed

        order = narrowed(self.source.order(self.recipe), self.keep_macs, self.seed)
        return self.train(self.recipe, width=order.width)


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """How a pruned network is trained."""

    epochs: int = 40
    """Epochs."""

    lr: tuple[float, float] = (1e-3, 1e-2)
    """Lowest and highest learning rate."""

    shape: Shape = "triangle"
    """triangle (up, down), warmup (up for a fifth, down to zero), cosine, steps (/10 at 60, 80 and 90%) or constant."""

    optimizer: str = "sgd"
    """Any of torch's, by name: sgd, adamw, ..."""

    momentum: float = 0.9
    """Momentum, for optimizers that have it."""

    nesterov: bool = False
    """Nesterov's form of it."""

    weight_decay: float = 1e-4
    """Weight decay."""

    decay_norms: bool = True
    """Weight decay acts on batch norms and biases too; --no-decay-norms: on filters alone."""

    distill: float = 0.0
    """Share of the loss that is distance from the unpruned network's output."""

    distill_temperature: float = 4.0
    """How much both outputs are softened for that."""

    ema: float = 0.0
    """Decay of a moving average of the weights, which is then the result; 0: none."""

    evaluate: Literal["always", "phases", "end"] = "always"
    """When the metrics are computed: after every epoch, or at the end only."""

    seed: int = 0
    """Seed of everything random."""

    @classmethod
    def of(cls, settings: TickTock) -> Tuning:
        return cls(**{name: getattr(settings, NAMES.get(name, name)) for name in cls.__dataclass_fields__})

    def checked(self, scale: float) -> TickTock:
        """As a run that removes nothing."""
        values = {NAMES.get(f.name, f.name): getattr(self, f.name) for f in fields(self)}
        return scaled(TickTock(keep_macs=1.0, **values), scale)


NAMES = {"epochs": "finetune_epochs", "lr": "finetune_lr", "shape": "finetune_shape"}
"""Where the settings of a run say it longer."""


@dataclass(frozen=True, kw_only=True)
class Finetune:
    """Fine-tune the result of a run once more, with the recipe's fine-tuning or another. With --distill it learns from
    the network that was pruned.

    examples:
      secateur finetune resnet56-cifar10 runs/pruned --data cifar --epochs 100 --distill 0.9 --out runs/longer
    """

    recipe: str
    """How: a recipe, NETWORK@DATASET, or package.module:callable."""

    pruned: Path
    """The run whose result is fine-tuned."""

    epochs_scale: float = 1.0
    """Times the epochs: 0.01 for a rehearsal."""

    tuning: Tuning = field(default_factory=Tuning)
    source: Source = field(default_factory=Source)
    engine: Hardware = field(default_factory=Hardware)
    output: Output = field(default_factory=Output)

    @classmethod
    def like(cls, recipe: Recipe) -> dict[str, Any]:
        """The recipe's values."""
        return cls.from_settings(recipe.pruning)

    @classmethod
    def from_settings(cls, settings: TickTock) -> dict[str, Any]:
        """A job's own values."""
        return {"tuning": Tuning.of(settings)}

    @property
    def debug(self) -> bool:
        return self.output.debug

    def run(self) -> str:
        order = self.source.order(self.recipe, self.pruned)
        self.output.must_be_new()
        settings = self.tuning.checked(self.epochs_scale)
        return start(order, settings, self.engine.checked(), self.engine.device, self.output)
