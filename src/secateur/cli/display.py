"""What is going on, on stderr: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from secateur.errors import MissingExtra

if TYPE_CHECKING:
    from secateur.runs.events import Event
    from secateur.runs.settings import TickTock


@contextmanager
def waiting(message: str, delay: float = 2.0) -> Iterator[Callable[[str], None]]:
    """Say on stderr what is going on, once it takes longer than `delay` seconds; yields what tells the present step."""
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


class Display:
    """A run as it goes: a line per event, and on a terminal a bar for the epoch and one for the whole."""

    def __init__(self, quiet: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.quiet = quiet
        self.target, self.epochs = 0.0, 0
        self.counted, self.left = "MACs", None
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

    def begin(self, settings: TickTock, left: Callable[[], float] | None = None) -> None:
        """A run begins; there may be several, one after another.

        left: tells the share that is left of what the budget counts.
        """
        from secateur.pruning.selection import UNITS

        ((name, self.target),) = ((name, share) for name, share in settings.budgets.items() if share is not None)
        self.counted, self.left = UNITS[name.removeprefix("keep_")], left
        self.epochs = settings.finetune_epochs

    def say(self, text: str) -> None:
        if not self.quiet:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def step(self, phase: str, step: int, num_steps: int) -> None:
        """Called after every step of training."""
        self.bars.update(self.epoch, description=phase, completed=step, total=num_steps)

    def event(self, event: Event) -> None:
        """A line, and how far the run has come: pruning counts as one half, fine-tuning as the other.

        A run that removes nothing is plain training, whatever its phase is called.
        """
        training = self.target == 1
        left, text = event.share, str(event)
        if self.left is not None and self.counted != "MACs":
            left = self.left()
            text = text.replace("of the MACs", f"of the MACs, {left:.1%} of the {self.counted}", 1)
        self.say(text.replace("FineTune epoch", "Training epoch") if training else text)
        tuning = type(event).__name__ == "FineTune"
        pruned = 1.0 if tuning else min(1.0, (1 - left) / max(1e-9, 1 - self.target))
        tuned = getattr(event, "epoch", 0) / max(1, self.epochs) if tuning else 0.0
        share = tuned if training else (pruned + tuned) / (2 if self.epochs else 1)
        done = 1.0 if type(event).__name__ == "Finished" else share
        self.bars.update(self.whole, completed=done, description=f"{left:.1%} of the {self.counted} left")


class Scalars:
    """Every event's numbers, for TensorBoard."""

    def __init__(self, folder: Path) -> None:
        self.writer: Any = self.find_writer()(str(folder))
        self.count = 0

    @staticmethod
    def find_writer() -> Any:
        """What writes them, or an error that says how to get it."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtra('TensorBoard is not installed; run: pip install "secateur[log]"') from error
        return SummaryWriter

    def event(self, event: Event) -> None:
        numbers = {"macs": event.macs, "params": event.params, "filters": event.filters, "seconds": event.seconds}
        loss = getattr(event, "loss", None)
        if loss is not None:
            numbers["training loss"] = loss
        for name, value in {**numbers, **event.metrics}.items():
            self.writer.add_scalar(name, value, self.count)
        self.writer.flush()
        self.count += 1
