"""Runs in folders, as commands do them, without the commands."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from secateur import Engine, Event, Result, TickTock
from secateur.recipes.jobs import Order
from secateur.recipes.recipe import Training
from secateur.recipes.work import Watcher, perform
from secateur.results.structure import read_json

CPU = torch.device("cpu")
PRUNING = TickTock(keep_macs=0.5, tick_removes=0.2, ticks_per_tock=1, tock_epochs=1, finetune_epochs=2)
TRAINING = Training(epochs=2).settings(seed=0)


def do(order: Order, settings: TickTock, out: Path, event: Callable[[Event], None] = lambda event: None) -> Result:
    return perform(order, settings, Engine(), out, CPU, Watcher(event=event))


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
