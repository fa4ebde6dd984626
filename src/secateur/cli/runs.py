"""What commands that start a run have in common."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Any

from secateur.cli.display import Display, Scalars
from secateur.errors import InvalidSetting
from secateur.files import to_json
from secateur.runs.settings import TickTock
from secateur.training.engine import Engine

if TYPE_CHECKING:
    import torch

    from secateur.recipes.jobs import Order
    from secateur.runs.events import Event, Result
    from secateur.runs.run import Run


@dataclass(frozen=True, kw_only=True)
class Source:
    """What to work on."""

    data: Path | None = None
    """Folder of the dataset."""

    batch_size: int | None = None
    """Images in a batch, instead of the recipe's number."""

    erase: int | None = None
    """Side of a square to erase in every training image, for datasets in memory: 8 is good for CIFAR, 0 is none."""

    width: float = 1.0
    """Times the channels of every layer, for networks that take `width`: all of ours do."""

    hold_out: int = 0
    """Train without this many of the training images, and test on them instead of the test images: for choosing."""

    def order(self, recipe: str, weights: Path | None = None, **values: Any) -> Order:
        from secateur.recipes.jobs import Order

        given = {
            "data": str(self.data.absolute()) if self.data is not None else None,
            "batch_size": self.batch_size,
            "erase": self.erase,
            "width": self.width,
            "hold_out": self.hold_out,
            "weights": str(weights) if weights is not None else None,
        }
        return Order(recipe=recipe, **{**given, **values})


@dataclass(frozen=True, kw_only=True)
class Hardware(Engine):
    """What makes training fast or fit, and leaves the recipe as it is."""

    device: str = "auto"
    """Where to train: cpu, cuda, cuda:1; auto takes CUDA if there is."""

    def __post_init__(self) -> None:
        """Checked when the command runs: the parser would wrap an error in words of its own."""

    def checked(self) -> Engine:
        return Engine(**{f.name: getattr(self, f.name) for f in fields(Engine)})


@dataclass(frozen=True, kw_only=True)
class Output:
    """What is shown, and where it goes."""

    out: Path = Path("run")
    """Folder of the run."""

    quiet: bool = False
    """Say nothing on the way."""

    tensorboard: bool = False
    """Also write the numbers for TensorBoard, into the run's folder."""

    json: bool = False
    """Print the result as JSON."""

    debug: bool = False
    """Show the traceback of an error."""

    def must_be_new(self) -> None:
        if self.out.is_file():
            raise InvalidSetting(f"{self.out} is a file: name a folder with --out")
        if (self.out / "config.json").exists():
            raise InvalidSetting(f"{self.out} holds a run already: secateur resume {self.out}, or name another --out")


def start(
    order: Order, settings: TickTock, engine: Engine, device: str, output: Output, further: Path | None = None
) -> str:
    """Begin a run, or go on with it, and say how it went."""
    from secateur.training.distributed import join, leave

    world = join()
    result = watched(order, settings, engine, device, output, further)
    leave()
    if not world.leads:
        return ""
    if output.json:
        return to_json({"macs": result.after.macs, "params": result.after.params, "metrics": result.metrics})
    return f"{result}\n\nsaved in {output.out / 'result'}, whose card.md says how to load it"


def watched(
    order: Order, settings: TickTock, engine: Engine, device: str, output: Output, further: Path | None = None
) -> Result:
    """Do a run under the user's eyes."""
    from secateur.recipes.work import Watcher, perform
    from secateur.training.distributed import World, losing_processes

    leads = World.current().leads
    place = find_device(device)
    if output.tensorboard:
        Scalars.find_writer()
    with Display(output.quiet or not leads) as display:
        scalars: list[Scalars] = []

        def note(event: Event) -> None:
            display.event(event)
            for each in scalars[-1:]:
                each.event(event)

        @contextmanager
        def guard(run: Run) -> Iterator[None]:
            display.begin(run.settings, lambda: run.left)
            # A network that is trained first is a run of its own.
            if output.tensorboard and leads and run.record is not None:
                scalars.append(Scalars(run.record.path / "tensorboard"))
                scalars[-1].count = len(run.history)
            with stopped_by_signals(run, display.say):
                yield

        if advice := engine.advice(place.type):
            display.say(advice)
        watcher = Watcher(say=display.say, step=display.step, event=note, guard=guard)
        with losing_processes(f"Resume with: torchrun ... -m secateur resume {shlex.quote(str(output.out))}"):
            return perform(order, settings, engine, output.out, place, watcher, further)


def find_device(name: str) -> torch.device:
    """What the user calls a device."""
    import torch

    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built with CUDA
        reason = (str(error).splitlines() or [""])[0]
        here = ", ".join(["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))])
        raise InvalidSetting(f"there is no device {name!r} here ({reason}), only {here}") from error
    return device


@contextmanager
def stopped_by_signals(run: Run, say: Callable[[str], None]) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the run after the present step, with a checkpoint; a second one ends it at once."""
    waits = Timer(1.0, say, ["stopping, as soon as this step or evaluation is done and saved; once more to stop now"])

    def stop(number: int, frame: Any) -> None:
        if run.stopping is not None:
            raise KeyboardInterrupt
        run.stopping = number
        waits.start()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        waits.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)
