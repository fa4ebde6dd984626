"""Runs in folders, as commands do them, without the commands."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import own_networks
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from secateur import Engine, Event, Result, TickTock, Training
from secateur.files import read_json
from secateur.recipes.jobs import Order
from secateur.recipes.recipe import from_scratch
from secateur.recipes.work import Observer, RunConfig, perform, read_run

CPU = torch.device("cpu")
PRUNING = TickTock.of(keep_macs=0.5, tick_removes=0.2, tock_every=1, tock_epochs=1, finetune_epochs=2)
TRAINING = from_scratch().but(epochs=2)
TUNING = Training.of(epochs=1, distill=0.5)

Progress = Callable[[Event | str], object]


def do(
    order: Order,
    settings: TickTock | Training,
    out: Path,
    progress: Progress = lambda event: None,
    continue_from: Path | None = None,
    engine: Engine | None = None,
) -> Result:
    config = RunConfig(order=order, settings=settings, engine=engine or Engine())
    return perform(config, out, CPU, Observer(progress=progress), continue_from)


def resume(out: Path, progress: Progress = lambda event: None) -> Result:
    """Everything from the run's own folder, as `secateur resume` does it."""
    return perform(read_run(out), out, CPU, Observer(progress=progress))


def summary(run: Path) -> dict[str, Any]:
    return read_json(run / "result" / "summary.json")


def weights(file: Path) -> dict[str, Tensor]:
    return load_file(file)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def shapes(tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def count_macs(model: nn.Module, example: Tensor) -> int:
    """Multiply-adds as torch's own counter has them; it counts both as an operation."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval()(example)
    return counter.get_total_flops() // 2


def count_params(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@dataclass(frozen=True)
class Chain:
    """Folders of runs that start from each other's results."""

    order: Order
    """Without what it starts from."""
    folder: Path

    def __getitem__(self, name: str) -> Path:
        return self.folder / name

    def after(self, name: str, **values) -> Order:
        return replace(self.order, weights=str(self[name]), **values)


def whole_network() -> nn.Module:
    return own_networks.plain(num_classes=10, width=2.0)


class Stopped(Exception):
    """Instead of a kill."""


def stopping_at(number: int) -> Progress:
    """Raise at the event of that number."""
    events: list[Event] = []

    def count(event: Event | str) -> None:
        if isinstance(event, Event):
            events.append(event)
        if len(events) == number:
            raise Stopped

    return count
