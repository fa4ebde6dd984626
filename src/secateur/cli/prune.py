"""`secateur prune` and `secateur resume`."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from secateur.cli.display import Display, Scalars
from secateur.errors import InvalidSetting
from secateur.ticktock.schedule import TickTock
from secateur.training.engine import Engine

if TYPE_CHECKING:
    from secateur.ticktock.run import Run


@dataclass(frozen=True, kw_only=True)
class Settings(TickTock):
    """Prune by Tick-Tock: Ticks train the gates and remove a little, Tocks train everything; then fine-tune."""

    def __post_init__(self) -> None:
        """Checked when the command runs: the parser would wrap an error in words of its own."""

    def checked(self) -> TickTock:
        return TickTock(**{f.name: getattr(self, f.name) for f in fields(TickTock)})


@dataclass(frozen=True, kw_only=True)
class Hardware(Engine):
    """What makes training fast or fit, and leaves the recipe as it is."""

    def __post_init__(self) -> None:
        """Checked when the command runs."""

    def checked(self) -> Engine:
        return Engine(**{f.name: getattr(self, f.name) for f in fields(Engine)})


@dataclass(frozen=True, kw_only=True)
class Output:
    """What is shown."""

    quiet: bool = False
    """Say nothing on the way."""

    tensorboard: bool = False
    """Also write the numbers for TensorBoard, into the run's folder."""

    json: bool = False
    """Print the result as JSON."""

    debug: bool = False
    """Show the traceback of an error."""


@dataclass(frozen=True, kw_only=True)
class Prune:
    """Prune a network by Tick-Tock and fine-tune it. The run lives in a folder; stop it with Ctrl-C, go on with resume.

    examples:
      secateur prune digits --keep-macs 0.4 --out runs/digits
      secateur prune my_project.task:build --keep-macs 0.4 --tick-removes 0.002 --precision bf16 --channels-last
      torchrun --nproc-per-node 4 -m secateur prune my_project.task:build --keep-macs 0.4
    """

    job: str
    """What to prune: digits, or package.module:callable, which returns a secateur.Job (model, example, task)."""

    settings: Settings
    engine: Hardware = field(default_factory=Hardware)
    output: Output = field(default_factory=Output)

    out: Path = Path("run")
    """Folder of the run."""

    device: str = "auto"
    """Where to train: cpu, cuda, cuda:1; auto takes CUDA if there is."""

    @property
    def debug(self) -> bool:
        return self.output.debug

    def run(self) -> str:
        settings, engine = self.settings.checked(), self.engine.checked()
        if (self.out / "config.json").exists():
            raise InvalidSetting(f"{self.out} holds a run already: secateur resume {self.out}, or name another --out")
        return start(self.job, settings, engine, self.output, self.out, self.device)


@dataclass(frozen=True, kw_only=True)
class Resume:
    """Go on with a run that was stopped or killed, from its last checkpoint.

    examples:
      secateur resume runs/digits
      torchrun --nproc-per-node 4 -m secateur resume runs/large
    """

    folder: Path
    """Folder of the run."""

    output: Output = field(default_factory=Output)

    device: str = "auto"
    """Where to train: cpu, cuda, cuda:1; auto takes CUDA if there is."""

    @property
    def debug(self) -> bool:
        return self.output.debug

    def run(self) -> str:
        from secateur.training.checkpoint import read_config

        config = read_config(self.folder)
        if "job" not in config:
            raise InvalidSetting(
                f"{self.folder} was started from Python: call the same again with folder={self.folder}"
            )
        settings, engine = TickTock.from_dict(config["settings"]), Engine(**config["engine"])
        return start(config["job"], settings, engine, self.output, self.folder, self.device)


def start(name: str, settings: TickTock, engine: Engine, output: Output, out: Path, device: str) -> str:
    """Begin the run, or go on with it."""
    import torch

    from secateur.channels.analyze import analyze
    from secateur.recipes.jobs import find_job
    from secateur.results.artifact import save
    from secateur.ticktock.events import Finished
    from secateur.ticktock.run import Run
    from secateur.training.distributed import join, leave

    world = join()
    try:
        place = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    except RuntimeError as error:
        raise InvalidSetting(f"there is no device {device!r}: use cpu, cuda or cuda:1") from error
    epochs = settings.finetune_epochs
    target = settings.keep_macs or 0.0
    with Display(target, epochs, output.quiet or not world.leads) as display:
        scalars = Scalars(out / "tensorboard") if output.tensorboard and world.leads else None
        display.say(f"building {name}")
        job = find_job(name).to(place)
        job.prepare(out, display.say)
        graph = analyze(job.model, job.example, progress=None)
        run = Run(settings, job.model, graph, job.task, engine=engine, folder=out, about={"job": name}, say=display.say)
        run.watch = display.step
        if scalars is not None:
            scalars.count = len(run.history)
        result = None
        with stopped_by_signals(run):
            for event in run.events():
                display.event(event)
                if scalars is not None:
                    scalars.event(event)
                if isinstance(event, Finished):
                    result = event.result
    assert result is not None
    leave()
    if not world.leads:
        return ""
    save(result, out / "result")
    if output.json:
        return json.dumps({"macs": result.after.macs, "params": result.after.params, "metrics": result.metrics})
    return f"{result}\n\nsaved in {out / 'result'}, whose card.md says how to load it"


@contextmanager
def stopped_by_signals(run: Run) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the run after the present step, with a checkpoint; a second one ends it at once."""

    def stop(number: int, frame: Any) -> None:
        if run.stopping is not None:
            raise KeyboardInterrupt
        run.stopping = number

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
