"""`secateur recipes`, `evaluate` and `structure`: what there is."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from shutil import get_terminal_size
from textwrap import wrap
from typing import Any

from secateur.cli.display import waiting
from secateur.cli.flags import Switch
from secateur.cli.options import Output, Source, check_folder, find_device
from secateur.errors import InvalidData, InvalidSetting
from secateur.files import to_json
from secateur.recipes.recipe import Recipe
from secateur.runs.settings import TickTock


@dataclass(frozen=True, kw_only=True)
class Recipes:
    """List the recipes, with the data they need, and the experiments of the paper.

    examples:
      secateur recipes
      secateur recipes --show vgg16m-cub200
    """

    show: str | None = None
    """Show one recipe whole: its settings, and how the folder of its data looks. A recipe, or NETWORK@DATASET."""

    output: Output = field(default_factory=Output)

    def run(self) -> str:
        from secateur.data.catalog import DATASETS, find_dataset
        from secateur.recipes.experiments import EXPERIMENTS
        from secateur.recipes.paper import RECIPES, find_recipe, summary_of

        if self.show is not None:
            recipe = find_recipe(self.show)
            return json.dumps(_plain(recipe)) if self.output.json else _whole(self.show, recipe)
        recipes = [(name, summary_of(find), find_dataset(find().data).summary) for name, find in RECIPES.items()]
        experiments = [(name, summary_of(make), make().data) for name, make in EXPERIMENTS.items()]
        if self.output.json:
            keys = ("name", "summary", "data")
            kinds = {"recipes": recipes, "experiments": experiments}
            return json.dumps(
                {kind: [dict(zip(keys, row, strict=True)) for row in rows] for kind, rows in kinds.items()}
            )
        return "\n".join(
            [
                "Recipes: secateur train|prune|evaluate RECIPE --data FOLDER",
                *_table(recipes),
                "",
                "The paper's experiments, of several runs each: secateur reproduce EXPERIMENT --data FOLDER",
                *_table(experiments),
                "",
                "Any network on any dataset is NETWORK@DATASET, as resnet20@cifar100. Datasets:",
                *_table([(name, dataset.summary, "") for name, dataset in DATASETS.items()]),
            ]
        )


def _plain(recipe: Recipe) -> dict[str, Any]:
    transfer = recipe.transfer.to_dict() if recipe.transfer is not None else None
    settings = {"training": recipe.training.to_dict(), "transfer": transfer, "pruning": recipe.pruning.to_dict()}
    return {**asdict(recipe), **settings}


def _whole(name: str, recipe: Recipe) -> str:
    """A recipe with every setting that is not the default, and its data."""
    from secateur.data.catalog import find_dataset

    options = "".join(f", {key}={value}" for key, value in recipe.options.items())
    default = TickTock.of(keep_macs=1.0).to_dict()
    erased = f", squares of {recipe.erase} pixels erased" if recipe.erase else ""
    training = recipe.training.to_dict()
    transfer = recipe.transfer.to_dict() if recipe.transfer is not None else training
    from_weights = [f"  {key} = {value}" for key, value in transfer.items() if value != training[key]]
    pruning = [(key, value) for key, value in recipe.pruning.to_dict().items() if value != default[key]]
    return "\n".join(
        [
            f"{name}: {recipe.network}{options}, batches of {recipe.batch_size}{erased}",
            "",
            "trained with",
            *(f"  {key} = {value}" for key, value in training.items()),
            "",
            *(["trained from given weights with the same, except", *from_weights, ""] if from_weights else []),
            "pruned with the defaults, except",
            *(f"  {key} = {value}" for key, value in pruning),
            "",
            find_dataset(recipe.data).describe(),
        ]
    )


def _table(rows: list[tuple[str, str, str]]) -> list[str]:
    """As wide as the terminal, or 120 columns where there is none."""
    wide = max(len(name) for name, _, _ in rows)
    room = get_terminal_size((120, 0)).columns
    lines = []
    for name, summary, data in rows:
        text = f"{summary} [{data}]" if data else summary
        lines += wrap(text, room, initial_indent=f"  {name:<{wide}}  ", subsequent_indent=" " * (wide + 4))
    return lines


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Test a network on a recipe's test data: the result of a run, or weights from a file.

    examples:
      secateur evaluate resnet56-cifar10 --data cifar --weights runs/pruned
      secateur evaluate resnet56-cifar10 --data cifar --weights authors_resnet56_cifar10.ckp
    """

    recipe: str
    """What to test: a recipe, NETWORK@DATASET, or package.module:callable."""

    weights: Path | None = None
    """A run, a result, or a file with a state dict."""

    source: Source = field(default_factory=Source)

    device: str = "auto"
    """Where: cpu, cuda, cuda:1; auto uses CUDA if available."""

    output: Output = field(default_factory=Output)

    def run(self) -> str:
        from secateur.recipes.starts import open_network

        with waiting(f"testing {self.recipe}"):
            order = self.source.trained(self.recipe, self.weights)
            check_folder(order)
            job = open_network(order, find_device(self.device))
            metrics = job.task.metrics(job.model)
        if not metrics:
            remedy = "Give its task test data, or a function that evaluates"
            raise InvalidData(f"{self.recipe} has nothing to test with", remedy=remedy)
        if self.output.json:
            return to_json(metrics)
        return "\n".join(f"{name:<16} {value:.4f}" for name, value in metrics.items())


@dataclass(frozen=True, kw_only=True)
class Structure:
    """Show the channels of every layer before and after, of runs or results side by side.

    examples:
      secateur structure runs/pruned
      secateur structure runs/one-shot runs/tick-only runs/tick-tock --figure structures.svg
      secateur structure runs/resnet50 --percent --figure appendix-d.png
    """

    runs: tuple[Path, ...]
    """Folders of runs, finished or not, or of results."""

    figure: Path | None = None
    """Also draw it into this file: .svg, .png or .pdf."""

    percent: Switch = False
    """Draw what was removed of each layer in percent (the paper's Appendix D), not channels (Appendix E)."""

    output: Output = field(default_factory=Output)

    def run(self) -> str:
        from secateur.results.figures import draw_structures
        from secateur.results.structure import read_structure

        if not self.runs:
            raise InvalidSetting("no run is named", remedy="Name one or several: secateur structure runs/pruned")
        structures = [read_structure(run) for run in self.runs]
        if self.figure is not None:
            draw_structures(structures, self.figure, percent=self.percent)
        if self.output.json:
            return json.dumps([structure.to_dict() for structure in structures])
        drawn = [f"drawn into {self.figure}"] if self.figure is not None else []
        return "\n\n".join([*map(str, structures), *drawn])
