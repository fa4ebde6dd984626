"""Do a run for a command: show it, stop it by signals, and say what to do when it ends early."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Any

from secateur.cli.display import Display, Scalars, saved_in
from secateur.cli.options import RunOutput, check_folder, find_device
from secateur.errors import Diverged, Interrupted
from secateur.files import read_json, to_json

if TYPE_CHECKING:
    from secateur.recipes.work import RunConfig
    from secateur.runs.events import Event, Result
    from secateur.runs.run import Run


def start(config: RunConfig, out: Path, output: RunOutput, continue_from: Path | None = None) -> str:
    """Begin a run, or resume it; what the command prints in the end."""
    from secateur.training.distributed import join, leave

    world = join()
    result = follow(config, out, output, continue_from)
    leave()
    if not world.leads:
        return ""
    if output.json:
        return to_json({"macs": result.after.macs, "params": result.after.params, "metrics": result.metrics})
    return f"{summary_of(result, out)}\n\n{saved_in(out / 'result')}"


def summary_of(result: Result, out: Path) -> str:
    """The result, and what the network takes where that was measured."""
    from secateur.recipes.timing import in_words

    latency = read_json(out / "result" / "summary.json").get("latency")
    return f"{result}\n{in_words(latency)}" if latency else str(result)


def follow(config: RunConfig, out: Path, output: RunOutput, continue_from: Path | None = None) -> Result:
    """Do a run, and show how it goes."""
    from secateur.recipes.work import Observer, perform
    from secateur.training.distributed import World, losing_processes

    leads, engine = World.current().leads, config.engine
    check_folder(config.order)
    device = find_device(output.device)
    if output.tensorboard:
        Scalars.find_writer()
    with Display(output.quiet or not leads) as display:
        scalars: list[Scalars] = []

        def progress(event: Event | str) -> None:
            display.show(event)
            if scalars and not isinstance(event, str):
                scalars[0].write(event)

        @contextmanager
        def guard(run: Run) -> Iterator[None]:
            display.run = run
            if output.tensorboard and leads:
                scalars.append(Scalars(out / "tensorboard", len(run.history)))
            with stopped_by_signals(run, display.show):
                yield

        if device.type == "cuda" and engine.precision != "fp32" and not engine.channels_last:
            display.show(f"note: on a GPU, training in {engine.precision} is much faster with --channels-last")
        observer = Observer(progress=progress, on_step=display.step, guard=guard)
        path = shlex.quote(str(out))
        try:
            with losing_processes(f"Resume it: torchrun ... -m secateur resume {path}"):
                return perform(config, out, device, observer, continue_from)
        except Interrupted as error:
            error.remedy = f"Resume it: secateur resume {path}"
            raise
        except Diverged as error:
            saved = shlex.quote(str(out / "diverged"))
            error.remedy = f"Fine-tune that: secateur train {config.order.recipe} --weights {saved}"
            raise


@contextmanager
def stopped_by_signals(run: Run, say: Callable[[str], None]) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the run after the present step, with a checkpoint; a second one ends it at once."""
    waits = Timer(1.0, say, ["stopping after this step or evaluation, with a checkpoint; Ctrl-C again stops at once"])

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
