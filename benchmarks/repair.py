"""Accuracy without training: a network pruned at once or in small steps, cut plainly and repaired.

    python benchmarks/repair.py resnet56@cifar10 --data cifar --weights resnet56.ckp --score taylor --device cuda

Channels are scored on training images, with their labels. Other training images, without labels, serve for the repair
and for new statistics of the batch norms. No image is augmented.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateur import Budget, Pruner, analyze, repair, shrink
from secateur.channels.groups import ChannelGraph
from secateur.channels.shrink import copy_model
from secateur.files import to_json, write_atomic
from secateur.pruning.scores import Random
from secateur.recipes.jobs import Job, Order
from secateur.recipes.starts import open_network
from secateur.training.batches import unaugmented

SHARES = (0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
STEP = 0.05
WAYS = {"once": "score", "steps": "score_per_mac"}
"""How channels are chosen, and what ranks them."""


def draw(job: Job, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Training images and labels, without augmentation."""
    torch.manual_seed(seed)
    found: list[tuple[Tensor, Tensor]] = []
    for images, labels in unaugmented(job.task.train):
        found.append((images, labels))
        if sum(len(labels) for _, labels in found) >= count:
            break
    return torch.cat([images for images, _ in found])[:count], torch.cat([labels for _, labels in found])[:count]


def observe(pruner: Pruner, data: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Score all channels."""
    pruner.model.eval()
    for images, labels in data:
        pruner.model.zero_grad(set_to_none=True)
        F.cross_entropy(pruner.model(images), labels).backward()
        pruner.observe()


@torch.no_grad()
def with_new_statistics(model: nn.Module, batches: Iterable[Tensor]) -> nn.Module:
    """A copy whose batch norms have the statistics of these images."""
    model = copy_model(model)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the mean over all batches
    model.train()
    for images in batches:
        model(images)
    return model.eval()


class Measurement:
    """One network, one score and one seed."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        order = Order(recipe=options.recipe, data=str(options.data) if options.data else None, weights=options.weights)
        self.job = open_network(order, torch.device(options.device))
        self.model = self.job.model.eval()
        self.graph: ChannelGraph = analyze(self.model, self.job.example)
        drawn = draw(self.job, options.labelled + options.images, options.seed)
        images, labels = (part.to(options.device) for part in drawn)
        count = options.labelled
        self.labelled = list(zip(images[:count].split(128), labels[:count].split(128), strict=True))
        self.unlabelled = images[count:].split(128)
        self.rows: list[dict[str, object]] = []

    def accuracy(self, model: nn.Module) -> float:
        return round(self.job.task.metrics(model)["accuracy"], 2)

    def pruner(self, way: str) -> Pruner:
        score = Random(self.options.seed) if self.options.score == "random" else self.options.score
        return Pruner(copy_model(self.model), graph=self.graph, score=score, rank=WAYS[way])

    def note(self, way: str, pruner: Pruner, seconds: float, **accuracy: float) -> None:
        share = pruner.cost.macs / self.graph.macs
        self.rows.append({"way": way, "macs": round(share, 4), "seconds": round(seconds, 1), **accuracy})
        numbers = "  ".join(f"{name.replace('_', ' ')} {value:.2f}" for name, value in accuracy.items())
        print(f"{way:<6} {share:6.1%} of the MACs  {numbers}  {seconds:.1f} s", flush=True)

    def once(self, share: float) -> None:
        started, pruner = time.perf_counter(), self.pruner("once")
        observe(pruner, self.labelled)
        pruner.prune(budget=Budget(macs=share))
        repaired = repair(self.model, pruner.plan, self.unlabelled, images=self.options.images)
        seconds = time.perf_counter() - started
        plain = shrink(self.model, pruner.plan)
        self.note(
            "once",
            pruner,
            seconds,
            plain=self.accuracy(plain),
            statistics=self.accuracy(with_new_statistics(plain, self.unlabelled)),
            repaired=self.accuracy(repaired),
        )

    def steps(self) -> None:
        started, pruner = time.perf_counter(), self.pruner("steps")
        for share in self.options.shares:
            met = False
            while not met:
                observe(pruner, self.labelled)
                met = pruner.prune(
                    self.options.step,
                    Budget(macs=share),
                    repair=self.unlabelled,
                    images=self.options.images,
                    reference=self.model,
                ).met
            self.note("steps", pruner, time.perf_counter() - started, repaired=self.accuracy(pruner.model.eval()))

    def save(self, whole: float) -> None:
        device = torch.device(self.options.device)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU"
        keys = ("recipe", "score", "seed", "labelled", "images", "step")
        about = {key: getattr(self.options, key) for key in keys}
        about |= {"device": name, "torch": torch.__version__, "whole": whole, "rows": self.rows}
        write_atomic(self.options.out, to_json(about).encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="a recipe, or NETWORK@DATASET")
    parser.add_argument("--data", type=Path, help="folder of the dataset")
    parser.add_argument("--weights", required=True, help="the trained network: a run, or a file with a state dict")
    parser.add_argument("--score", default="taylor", help="importance of a channel")
    parser.add_argument("--seed", type=int, default=0, help="of the images that are drawn")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--labelled", type=int, default=2048, help="training images for the score")
    parser.add_argument("--images", type=int, default=512, help="training images for the repair")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="shares of the MACs")
    parser.add_argument("--step", type=float, default=STEP, help="share of the filters that a small step removes")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--out", type=Path, help="file for the numbers, as JSON")
    measurement = Measurement(parser.parse_args())
    whole = measurement.accuracy(measurement.model)
    print(f"whole network: {whole:.2f}")
    if "once" in measurement.options.ways:
        for share in measurement.options.shares:
            measurement.once(share)
    if "steps" in measurement.options.ways:
        measurement.steps()
    if measurement.options.out is not None:
        measurement.save(whole)


if __name__ == "__main__":
    main()
