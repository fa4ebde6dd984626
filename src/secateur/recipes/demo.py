"""The whole job in a minute: train a small ResNet on handwritten digits, prune it, fine-tune, verify, save."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from secateur.channels.analyze import analyze
from secateur.channels.verify import Verification, verify
from secateur.data.digits import digits
from secateur.models.lookup import find_model
from secateur.randomness import seeded
from secateur.recipes.paper import find_recipe
from secateur.results.artifact import save
from secateur.results.bench import latency
from secateur.results.report import write_report
from secateur.results.summary import device_name
from secateur.runs.events import Result
from secateur.runs.prune import prune, train
from secateur.runs.settings import TickTock
from secateur.training.settings import Training
from secateur.training.task import Task, classification

BASELINE = Training.of(epochs=15, lr=0.2, lr_low=0.01, nesterov=True, weight_decay=5e-4)
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
    """Train, prune, verify, time and save; `say` is called with lines about the progress."""
    training, test = digits()
    task = classification(training, test)
    model = train_baseline(task, settings.seed, say)
    example = test.images[:64]
    graph = analyze(model, example[:1])
    result = prune(model, example[:1], task, settings=settings, graph=graph, progress=lambda event: say(str(event)))
    verification = verify(model, result.plan, example)
    result = replace(result, verification=verification)
    seconds = latency({"before": model, "after": result.model}, example)
    timed = {**seconds, "batch": len(example), "device": device_name(example.device)}
    save(result, folder, latency=timed, input=list(example[:1].shape), network=NETWORK)
    page = write_report([folder], folder / "report.html")
    return Demo(result, verification, seconds, page)


def train_baseline(task: Task, seed: int, say: Callable[[str], None]) -> nn.Module:
    """A ResNet-14 for 8x8 images."""
    with seeded(seed):
        model = find_model(NETWORK["name"], **NETWORK["options"])
    settings = BASELINE.but(seed=seed)
    return train(model, torch.zeros(1, 1, 8, 8), task, settings=settings, progress=lambda event: say(str(event))).model
