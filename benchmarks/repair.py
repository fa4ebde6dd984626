"""Accuracy without training: a network pruned once or in steps, cut plainly and repaired.

    python benchmarks/repair.py resnet56@cifar10 --data cifar --weights resnet56.ckp --device cuda

Channels are scored by Taylor on labelled training images, and repaired with other training images without labels.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateur import Budget, Plan, Pruner, analyze, repair, shrink
from secateur.channels.shrink import copy_model
from secateur.data.arrays import Arrays
from secateur.recipes.jobs import Job, Order
from secateur.recipes.starts import open_network

SHARES = (0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
WAYS = {"once, by score": (1, 0.0), "in 5 steps, by score": (5, 0.0), "in 5 steps, by score per MAC": (5, 1.0)}
"""Steps, and the power of the MACs that the score is divided by."""


def draw(job: Job, count: int) -> tuple[Tensor, Tensor]:
    """The first images and labels that training would see, without augmentation."""
    torch.manual_seed(0)
    train = job.task.train
    if isinstance(train, Arrays):
        train = replace(train, crop=0, flip=False, erase=0, augment=None)
    images, labels = zip(*train, strict=True)
    return torch.cat(images)[:count], torch.cat(labels)[:count]


def choose(model: nn.Module, job: Job, data: tuple[Tensor, Tensor], images: Tensor, share: float, way: str) -> Plan:
    """The channels that stay; between steps the network is repaired, and scored again."""
    graph = analyze(model, job.example)
    steps, power = WAYS[way]
    kept, weights = graph.all_kept(), dict(model.named_parameters())
    for step in range(1, steps + 1):
        rank = "score_per_mac" if power else "score"
        pruner = Pruner(copy_model(model), graph=graph, rank=rank, rank_power=power)
        pruner.load_state_dict({"kept": kept, "present": kept, "merged": False, "score": {}})
        with torch.no_grad():
            for name, parameter in pruner.model.named_parameters():
                if parameter.dim() > 1 and name in weights:
                    parameter.copy_(weights[name])  # the repaired filters; gates are on the norms
        pruner.model.eval()
        for batch, labels in zip(*(part.split(128) for part in data), strict=True):
            pruner.model.zero_grad(set_to_none=True)
            F.cross_entropy(pruner.model(batch), labels).backward()
            pruner.observe()
        pruner.prune(budget=Budget(macs=1 - (1 - share) * step / steps))
        kept = pruner.kept
        if step < steps:
            weights = dict(repair(model, Plan(graph, kept), images, images=len(images)).named_parameters())
    return Plan(graph, kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="a recipe, or NETWORK@DATASET")
    parser.add_argument("--data", type=Path, help="folder of the dataset")
    parser.add_argument("--weights", required=True, help="the trained network: a run, or a file with a state dict")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--labelled", type=int, default=5120, help="training images for the score")
    parser.add_argument("--images", type=int, default=4000, help="training images for the repair")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="shares of the MACs")
    options = parser.parse_args()
    order = Order(recipe=options.recipe, data=str(options.data) if options.data else None, weights=options.weights)
    job = open_network(order, torch.device(options.device))
    model = job.model.eval()
    images, labels = draw(job, options.labelled + options.images)
    data, unlabelled = (images[: options.labelled], labels[: options.labelled]), images[options.labelled :]
    print(f"whole network: {job.task.metrics(model)['accuracy']:.2f}\n")
    print("| channels chosen | MACs | plain cut | repaired |\n| --- | --- | --- | --- |")
    for way in WAYS:
        for share in options.shares:
            plan = choose(model, job, data, unlabelled, share, way)
            repaired = repair(model, plan, unlabelled, images=len(unlabelled))
            plain, fitted = (job.task.metrics(each)["accuracy"] for each in (shrink(model, plan), repaired))
            left = plan.cost.macs / plan.graph.macs
            print(f"| {way} | {left:.1%} | {plain:.2f} | {fitted:.2f} |", flush=True)


if __name__ == "__main__":
    main()
