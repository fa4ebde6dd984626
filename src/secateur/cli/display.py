"""Progress on stderr: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from secateur.errors import MissingExtra

if TYPE_CHECKING:
    from secateur.runs.events import Event
    from secateur.runs.run import Run


@contextmanager
def waiting(message: str, delay: float = 2.0) -> Iterator[Callable[[str], None]]:
    """Print the message on stderr once it takes longer than `delay` seconds; yields a function for the present step."""
    from threading import Timer

    from rich.console import Console

    console = Console(stderr=True)
    status = console.status(message)
    timer = Timer(delay, status.start if console.is_terminal else lambda: console.print(message))
    timer.start()
    try:
        yield lambda step: status.update(f"{message}: {step}")
    finally:
        timer.cancel()
        timer.join()
        status.stop()


def saved_in(folder: Path) -> str:
    return f"saved in {folder}; its card.md says how to load it"


class Display:
    """A run as it goes: a line per event, and on a terminal a bar for the epoch and one for the whole run."""

    def __init__(self, quiet: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.quiet = quiet
        self.run: Run | None = None
        """Once it has begun."""
        self.console = Console(stderr=True)
        columns = (TextColumn("{task.description:<24}"), BarColumn(), TextColumn("{task.percentage:3.0f}%"))
        self.bars = Progress(
            *columns, TimeRemainingColumn(), console=self.console, disable=quiet or not self.console.is_terminal
        )
        self.epoch = self.bars.add_task("starting", total=None)
        self.whole = self.bars.add_task("whole run", total=1.0)

    def __enter__(self) -> Display:
        self.bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if not self.bars.disable:  # before rich 14.3, stopping what never started printed an empty line
            self.bars.stop()

    def step(self, phase: str, step: int, num_steps: int) -> None:
        """Called after every step of training."""
        self.bars.update(self.epoch, description=phase, completed=step, total=num_steps)

    def show(self, event: Event | str) -> None:
        """A line; after an event, also how much of the run is done, and how much of the network is left."""
        if not self.quiet:
            self.console.print(str(event), highlight=False, markup=False, soft_wrap=True)
        if isinstance(event, str):
            return
        unit, left = next(iter(event.left.items()), ("MACs", event.share))
        done = 1.0 if event.name == "Finished" or self.run is None else self.run.done
        self.bars.update(self.whole, completed=done, description=f"{left:.1%} of the {unit} left")


class Scalars:
    """The numbers of every event, for TensorBoard.

    count: how many events were written before.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self.writer: Any = self.find_writer()(str(folder))
        self.count = count

    @staticmethod
    def find_writer() -> Any:
        """The class that writes them, or an error that says how to get it."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            remedy = 'Run: pip install "secateur[log]"'
            raise MissingExtra("TensorBoard is not installed", remedy=remedy) from error
        return SummaryWriter

    def write(self, event: Event) -> None:
        numbers = {"macs": event.macs, "params": event.params, "filters": event.filters, "seconds": event.seconds}
        loss = getattr(event, "loss", None)
        if loss is not None:
            numbers["training loss"] = loss
        for name, value in {**numbers, **event.metrics}.items():
            self.writer.add_scalar(name, value, self.count)
        self.writer.flush()
        self.count += 1
