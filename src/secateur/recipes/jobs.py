"""Jobs by name: a network, an example of its input, and a task. What `secateur prune` works on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model, save_model
from torch import nn

from secateur.channels.example import map_tensors
from secateur.errors import InvalidModel, unknown_name
from secateur.models.lookup import find_callable
from secateur.results.artifact import write
from secateur.training.distributed import World
from secateur.training.task import Task


@dataclass(frozen=True)
class Job:
    """What is to be pruned, and on what.

    train: makes the network that is to be pruned out of the model, if it is not trained yet; not called again when a
        run goes on.
    """

    model: nn.Module
    example: Any
    task: Task
    train: Callable[[nn.Module, Callable[[str], None]], None] | None = None

    def to(self, device: torch.device) -> Job:
        moved = map_tensors(self.example, lambda tensor: tensor.to(device))
        train = self.task.train
        task = replace(self.task, train=train.to(device)) if hasattr(train, "to") else self.task  # pyright: ignore
        return replace(self, model=self.model.to(device), example=moved, task=task)

    def prepare(self, folder: Path, say: Callable[[str], None]) -> None:
        """Train the network, or take it from the run's folder if that has been done."""
        world = World.current()
        original = folder / "original.safetensors"
        if world.leads and not original.exists():
            if self.train is not None:
                self.train(self.model, say)
            folder.mkdir(parents=True, exist_ok=True)
            write(original, lambda target: save_model(self.model, str(target)))
        world.wait()
        load_model(self.model, original, device=str(next(self.model.parameters()).device))


def digits_job() -> Job:
    """A ResNet-14 on scikit-learn's handwritten digits."""
    from secateur.data.digits import digits
    from secateur.models.resnet_cifar import CifarResNet
    from secateur.recipes.demo import train_baseline_
    from secateur.training.task import classification

    train, test = digits()
    task = classification(train, test)
    torch.manual_seed(0)
    model = CifarResNet(14, in_channels=1)
    return Job(model, test.images[:1], task, lambda m, say: train_baseline_(m, task, train, 0, say))


JOBS: dict[str, Callable[[], Job]] = {"digits": digits_job}


def find_job(name: str) -> Job:
    """The job of that name, or what package.module:callable returns."""
    module, colon, attribute = name.partition(":")
    if not colon and name not in JOBS:
        raise unknown_name("job", name, list(JOBS))
    job = find_callable(module, attribute)() if colon else JOBS[name]()
    if not isinstance(job, Job):
        raise InvalidModel(f"{name} must return a secateur.Job, got {type(job).__name__}")
    return job
