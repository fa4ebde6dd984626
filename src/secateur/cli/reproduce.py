"""`secateur reproduce`."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from secateur.cli.flags import flags_of, typed
from secateur.cli.options import RunOutput, Source
from secateur.cli.runs import follow
from secateur.errors import Interrupted
from secateur.training.engine import Engine


@dataclass(frozen=True, kw_only=True)
class Reproduce:
    """Do one of the paper's experiments: all its runs, then its table or figure, next to the paper's numbers.

    Runs that are finished are not repeated, so that experiments share them, and the same command resumes an experiment
    that was stopped. `secateur recipes` lists the experiments.

    examples:
      secateur reproduce table1 --data cifar --precision bf16 --channels-last
      secateur reproduce table1 --data cifar --baseline authors_resnet56_cifar10.ckp --recipe resnet56-cifar10-authors
      secateur reproduce table3 --data cifar --epochs-scale 0.01 --out rehearsal
      secateur reproduce gfir --recipe vgg16m-cifar100 --data cifar --only "slim*"
      secateur reproduce photographs --data birds --weights mobilenet_v2.safetensors --in-memory
    """

    experiment: str
    """table1 to table3, gfir, nas, segmentation, appendix-d or -e, throughput, controls, unlabelled or photographs."""

    recipe: str | None = None
    """Another network, dataset or variant than the paper's for this experiment."""

    baseline: Path | None = None
    """The trained network, instead of training it: a run of secateur train, or a file with a state dict."""

    weights: Path | None = None
    """What training the baseline starts from, if not from random weights: a file with a state dict."""

    only: str = "*"
    """Which of the experiment's runs to do, with wildcards."""

    epochs_scale: float = 1.0
    """Multiplies the length of everything, epochs and number of Ticks: 0.01 for a rehearsal."""

    seed: int = 0
    """Seed of everything random."""

    out: Path = Path("runs")
    """Folder for the runs and the page."""

    source: Source = field(default_factory=Source)
    engine: Any = None
    output: RunOutput = field(default_factory=RunOutput)

    @classmethod
    def flags(cls, recipe: str) -> dict[str, type]:
        return {"engine": flags_of(Engine)}

    def run(self) -> str:
        from secateur.recipes.experiments import find_experiment
        from secateur.recipes.reproduce import Conditions, reproduce
        from secateur.training.distributed import join, leave

        experiment = find_experiment(self.experiment, self.recipe)
        conditions = Conditions(
            experiment=experiment,
            order=self.source.order(experiment.recipe, self.weights),
            engine=Engine.of(**typed(self.engine)),
            out=self.out,
            seed=self.seed,
            scale=self.epochs_scale,
            baseline=self.baseline,
            only=self.only,
        )
        world = join()
        quiet = self.output.quiet or not world.leads
        try:
            text, page = reproduce(
                self.experiment,
                conditions,
                lambda config, folder, continue_from: follow(config, folder, self.output, continue_from),
                lambda line: None if quiet else print(line, file=sys.stderr, flush=True),
            )
        except Interrupted as error:
            error.remedy = self.what_next()
            raise
        leave()
        if not world.leads:
            return ""
        if not self.output.json:
            return f"{text}\nwritten to {page}"
        folders = {step.name: conditions.folder(step.name) for step in experiment.steps}
        runs = {name: str(folder) for name, folder in folders.items() if folder.is_dir()}
        return json.dumps({"page": str(page), "text": text, "runs": runs})

    def what_next(self) -> str:
        return "Give the same command again to continue"
