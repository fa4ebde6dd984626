"""The whole job in a minute: train a small ResNet on handwritten digits, prune it, fine-tune, verify, save."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from secateur.channels.analyze import analyze
from secateur.channels.verify import Verification, verify
from secateur.data.arrays import Arrays
from secateur.data.digits import digits
from secateur.models.lookup import find_model
from secateur.randomness import seeded
from secateur.recipes.paper import find_recipe
from secateur.results.artifact import save
from secateur.results.bench import latency
from secateur.results.report import write_report
from secateur.results.summary import device_name
from secateur.runs.events import Result
from secateur.runs.settings import TickTock
from secateur.training.loop import Trainer, Work
from secateur.training.optimizers import make_optimizer
from secateur.training.schedules import triangle
from secateur.training.task import Task, classification

BASELINE_EPOCHS = 15
NETWORK: dict[str, Any] = {"name": "resnet14", "options": {"in_channels": 1}}
SETTINGS = find_recipe("digits").pruning
"""The paper's schedule, shortened for a dataset of 1,438 images."""


@dataclass(frozen=True)
class Demo:
    """What the demo has found out."""

    result: Result
    verification: Verification
    seconds: dict[str, float]
    """Median latency of a batch of 64 images, before and after."""
    page: Path
    """The report."""

    def rows(self) -> list[tuple[str, float, float]]:
        """What is measured, before and after."""
        result = self.result
        return [
            ("MACs", result.before.macs, result.after.macs),
            ("parameters", result.before.params, result.after.params),
            ("accuracy (%)", result.metrics_before["accuracy"], result.metrics["accuracy"]),
            ("CPU latency (ms)", 1000 * self.seconds["before"], 1000 * self.seconds["after"]),
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        rows = {name: {"before": before, "after": after} for name, before, after in self.rows()}
        return {**rows, "verified_to": self.verification.difference, "settings": self.result.settings.to_dict()}

    def __str__(self) -> str:
        lines = [f"{'':<18} {'before':>12} {'after':>12} {'left':>8}"]
        for name, before, after in self.rows():
            style = ",.0f" if before > 1000 else ".2f"
            left = "" if name.startswith("accuracy") else f"{after / before:.1%}"
            lines.append(f"{name:<18} {before:>12{style}} {after:>12{style}} {left:>8}")
        return "\n".join([*lines, "", f"verified: {self.verification}", "latency: batch of 64, median of 30, by turns"])


def run_demo(folder: Path, settings: TickTock, say: Callable[[str], None]) -> Demo:
    """Train, prune, verify, time and save; `say` is told what is going on."""
    train, test = digits()
    task = classification(train, test)
    model = train_baseline(task, train, settings.seed, say)
    example = test.images[:64]
    graph = analyze(model, example[:1])
    result = settings(model, graph, task, progress=lambda event: say(str(event)))
    verification = verify(model, result.plan, example)
    seconds = latency({"before": model, "after": result.model}, example)
    timed = {**seconds, "batch": len(example), "device": device_name(example.device)}
    save(result, folder, latency=timed, input=list(example[:1].shape), network=NETWORK)
    page = write_report([folder], folder / "report.html")
    return Demo(result, verification, seconds, page)


def train_baseline(task: Task, train: Arrays, seed: int, say: Callable[[str], None]) -> nn.Module:
    """A ResNet-14 for 8x8 images, trained until it is as good as it gets."""
    with seeded(seed):
        model = find_model(NETWORK["name"], **NETWORK["options"])
    optimizer = make_optimizer("sgd", list(model.parameters()), momentum=0.9, nesterov=True, weight_decay=5e-4)
    trainer = Trainer(model)
    steps = BASELINE_EPOCHS * len(train)
    for epoch in range(BASELINE_EPOCHS):
        before = epoch * len(train)
        work = Work("baseline", task.loss, optimizer, rate=lambda s, b=before: triangle(b + s, steps, 0.01, 0.2))
        with seeded(seed, epoch):
            trainer.epoch(train, work)
        say(f"training the baseline, epoch {epoch + 1:2} of {BASELINE_EPOCHS}: {task.metrics(model)['accuracy']:.2f}%")
    return model
