"""`secateur prune`, `secateur further` and `secateur resume`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from secateur.cli.runs import Hardware, Output, Source, start
from secateur.recipes.recipe import Recipe, scaled, stretched
from secateur.runs.settings import BUDGETS, TickTock


@dataclass(frozen=True, kw_only=True)
class Settings(TickTock):
    """Prune by Tick-Tock: Ticks train the gates and remove a little, Tocks train everything; then fine-tune."""

    def __post_init__(self) -> None:
        """Checked when the command runs: the parser would wrap an error in words of its own."""

    @classmethod
    def of(cls, settings: TickTock) -> Settings:
        """The same as flags."""
        values = {f.name: getattr(settings, f.name) for f in fields(TickTock)}
        for name in BUDGETS:
            values[name] = Untyped(values[name]) if values[name] is not None else None
        return cls(**values)

    def checked(self, scale: float) -> TickTock:
        """The settings, in which a budget that was typed replaces the recipe's."""
        values = {f.name: getattr(self, f.name) for f in fields(TickTock)}
        typed = any(values[name] is not None and not isinstance(values[name], Untyped) for name in BUDGETS)
        for name in BUDGETS:
            if isinstance(values[name], Untyped):
                values[name] = None if typed else float(values[name])
        return scaled(TickTock(**values), scale)


class Untyped(float):
    """A default, to be told from the same number in the user's command."""


@dataclass(frozen=True, kw_only=True)
class Prune:
    """Prune a network by Tick-Tock and fine-tune it. The run lives in a folder; stop it with Ctrl-C, go on with resume.

    A recipe that is given no --weights is trained first. `secateur prune RECIPE --help` shows that recipe's settings.

    examples:
      secateur prune digits --keep-macs 0.4 --out runs/digits
      secateur prune resnet56-cifar10 --data cifar --weights runs/baseline --keep-macs 0.3 --precision bf16
      secateur prune torchvision:resnet18@class_folders --data photos --weights photos.pth --keep-macs 0.5
      secateur prune my_project.task:build --keep-macs 0.4 --tick-removes 0.002
      torchrun --nproc-per-node 4 -m secateur prune my_project.task:build --keep-macs 0.4
    """

    recipe: str
    """What to prune: a recipe, NETWORK@DATASET or package.module:callable for a secateur.Job (model, example, task)."""

    weights: Path | None = None
    """The trained network: a run of secateur train, or a file with a state dict."""

    again: int = 0
    """First train the whole network for so many epochs more, on the labels; with --distill, a better teacher."""

    epochs_scale: float = 1.0
    """Times the length of everything, epochs and number of Ticks: 0.01 for a rehearsal."""

    settings: Settings
    source: Source = field(default_factory=Source)
    engine: Hardware = field(default_factory=Hardware)
    output: Output = field(default_factory=Output)

    @classmethod
    def like(cls, recipe: Recipe) -> dict[str, Any]:
        """The recipe's values."""
        return {**cls.from_settings(recipe.pruning), "again": recipe.again}

    @classmethod
    def from_settings(cls, settings: TickTock) -> dict[str, Any]:
        """A job's own values."""
        return {"settings": Settings.of(settings)}

    @property
    def debug(self) -> bool:
        return self.output.debug

    def run(self) -> str:
        again = stretched(self.again, self.epochs_scale)
        order = self.source.order(self.recipe, self.weights, epochs_scale=self.epochs_scale, again=again)
        settings, engine = self.settings.checked(self.epochs_scale), self.engine.checked()
        self.output.must_be_new()
        return start(order, settings, engine, self.engine.device, self.output)


@dataclass(frozen=True, kw_only=True)
class Further:
    """Prune further than a run did: a new run goes on where that one ended pruning, and is fine-tuned in its turn.

    All other settings are that run's. What it has done is not done again, and it stays as it is.

    examples:
      secateur further runs/digits --keep-macs 0.2 --out runs/smaller
    """

    folder: Path
    """Folder of the run."""

    keep_macs: float | None = None
    """Share of the whole network's MACs to be left. One budget is needed."""

    keep_params: float | None = None
    """The same for parameters."""

    keep_filters: float | None = None
    """The same for filters."""

    keep_latency: float | None = None
    """The same for the time that the layers take, by the table that the run has measured."""

    device: str = "auto"
    """Where to train: cpu, cuda, cuda:1; auto takes CUDA if there is."""

    output: Output = field(default_factory=Output)

    @property
    def debug(self) -> bool:
        return self.output.debug

    def run(self) -> str:
        from secateur.recipes.work import reopen

        order, settings, engine = reopen(self.folder)
        smaller = settings.but(rank=settings.ranking, **{name: getattr(self, name) for name in BUDGETS})
        self.output.must_be_new()
        return start(order, smaller, engine, self.device, self.output, self.folder)


@dataclass(frozen=True, kw_only=True)
class Resume:
    """Go on with a run that was stopped or killed, from its last checkpoint.

    examples:
      secateur resume runs/digits
      torchrun --nproc-per-node 4 -m secateur resume runs/large
    """

    folder: Path
    """Folder of the run."""

    device: str = "auto"
    """Where to train: cpu, cuda, cuda:1; auto takes CUDA if there is."""

    quiet: bool = False
    """Say nothing on the way."""

    tensorboard: bool = False
    """Also write the numbers for TensorBoard, into the run's folder."""

    json: bool = False
    """Print the result as JSON."""

    debug: bool = False
    """Show the traceback of an error."""

    def run(self) -> str:
        from secateur.recipes.work import reopen

        output = Output(out=self.folder, quiet=self.quiet, tensorboard=self.tensorboard, json=self.json)
        order, settings, engine = reopen(self.folder)
        return start(order, settings, engine, self.device, output)
