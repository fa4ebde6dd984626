"""`secateur reproduce`."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from secateur.cli.runs import Hardware, Output, Source, watched


@dataclass(frozen=True, kw_only=True)
class Reproduce:
    """Do one of the paper's experiments: all its runs, then its table or figure, with the paper's numbers beside.

    Runs that are done are not done again, so that experiments can share them and a stopped one goes on with the same
    command. `secateur recipes` lists the experiments.

    examples:
      secateur reproduce table1 --data cifar --precision bf16 --channels-last
      secateur reproduce table1 --data cifar --baseline authors_resnet56.ckp --recipe resnet56-cifar10-authors
      secateur reproduce table3 --data cifar --epochs-scale 0.01 --out rehearsal
      secateur reproduce gfir --recipe vgg16m-cifar100 --data cifar --only "slim*"
    """

    experiment: str
    """Which one: table1, table2, table3, gfir, nas, segmentation, appendix-d, appendix-e, throughput."""

    recipe: str | None = None
    """Another network, dataset or variant than the paper's for this experiment."""

    baseline: Path | None = None
    """The trained network, instead of training it: a run of secateur train, or a file with a state dict."""

    weights: Path | None = None
    """What training the baseline starts from, where that is not random: a file with a state dict."""

    only: str = "*"
    """Which of the experiment's runs to do, with wildcards."""

    epochs_scale: float = 1.0
    """Times the length of everything, epochs and number of Ticks: 0.01 for a rehearsal."""

    seed: int = 0
    """Seed of everything random."""

    out: Path = Path("runs")
    """Folder for the runs and the page."""

    source: Source = field(default_factory=Source)
    engine: Hardware = field(default_factory=Hardware)

    quiet: bool = False
    """Say nothing on the way."""

    json: bool = False
    """Print as JSON where the page and the runs are, and the page's text."""

    debug: bool = False
    """Show the traceback of an error."""

    def run(self) -> str:
        from secateur.recipes.experiments import find_experiment
        from secateur.recipes.reproduce import Conditions, reproduce
        from secateur.training.distributed import join, leave

        experiment = find_experiment(self.experiment, self.recipe)
        engine = self.engine.checked()
        conditions = Conditions(
            order=self.source.order(experiment.recipe, self.weights),
            out=self.out,
            seed=self.seed,
            scale=self.epochs_scale,
            baseline=self.baseline,
            only=self.only,
        )
        output = Output(quiet=self.quiet)
        world = join()
        text, page = reproduce(
            self.experiment,
            experiment,
            conditions,
            lambda order, settings, folder, further: watched(
                order, settings, engine, self.engine.device, replace(output, out=folder), further
            ),
            lambda line: None if self.quiet or not world.leads else print(line, file=sys.stderr, flush=True),
        )
        leave()
        if not world.leads:
            return ""
        if not self.json:
            return f"{text}\nwritten to {page}"
        folders = {step.name: conditions.folder(step.name) for step in experiment.steps}
        runs = {name: str(folder) for name, folder in folders.items() if folder.is_dir()}
        return json.dumps({"page": str(page), "text": text, "runs": runs})
