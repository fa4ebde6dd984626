"""Few images without labels: prune and repair with so many, and then distil the whole network into the pruned one.

    python benchmarks/few_images.py resnet56@cifar10 --data cifar --weights resnet56.ckp --images 500 --device cuda

The same images score the channels, by classes drawn from the network's own probabilities, repair the network after
every step, and train it, shifted and mirrored at random, on nothing but the outputs of the whole network.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from repair import STEP, draw
from torch import Tensor, nn

from secateur import Budget, Pruner
from secateur.channels.shrink import copy_model
from secateur.files import to_json, write_atomic
from secateur.recipes.jobs import Order
from secateur.recipes.starts import open_network

BATCH, TEMPERATURE = 128, 4.0


def observe(pruner: Pruner, images: Tensor) -> None:
    pruner.model.eval()
    for batch in images.split(32):
        pruner.model.zero_grad(set_to_none=True)
        scores = pruner.model(batch)
        F.cross_entropy(scores, torch.multinomial(scores.detach().softmax(1), 1)[:, 0]).backward()
        pruner.observe()


def augmented(images: Tensor) -> Tensor:
    """Shifted by up to an eighth of their size and mirrored, each image by itself."""
    count, size = images.shape[0], images.shape[-1]
    margin = size // 8
    padded = F.pad(images, (margin,) * 4)
    left, top = (torch.randint(2 * margin + 1, (count,), device=images.device) for _ in range(2))
    rows, columns = (start[:, None] + torch.arange(size, device=images.device) for start in (top, left))
    columns = torch.where(torch.rand(count, 1, device=images.device) < 0.5, columns, columns.flip(1))
    return padded.permute(0, 2, 3, 1)[
        torch.arange(count, device=images.device)[:, None, None], rows[:, :, None], columns[:, None]
    ].permute(0, 3, 1, 2)


def distil_(model: nn.Module, whole: nn.Module, images: Tensor, steps: int, rate: float) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=5e-4)
    model.eval()  # batch norms keep their statistics, which so few images would spoil
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * (1 + math.cos(math.pi * step / steps)) / 2
        chosen = torch.randint(len(images), (min(BATCH, len(images)),), device=images.device)
        batch = augmented(images[chosen])
        with torch.no_grad():
            wanted = (whole(batch) / TEMPERATURE).softmax(1)
        found = (model(batch) / TEMPERATURE).log_softmax(1)
        optimizer.zero_grad()
        (F.kl_div(found, wanted, reduction="batchmean") * TEMPERATURE**2).backward()
        optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="a recipe, or NETWORK@DATASET")
    parser.add_argument("--data", type=Path, help="folder of the dataset")
    parser.add_argument("--weights", required=True, help="the trained network: a run, or a file with a state dict")
    parser.add_argument("--images", type=int, default=500, help="training images, without labels")
    parser.add_argument("--seed", type=int, default=0, help="of the images that are drawn")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.3], help="shares of the MACs")
    parser.add_argument("--steps", type=int, default=600, help="steps of distillation")
    parser.add_argument("--rate", type=float, default=0.001, help="highest learning rate of distillation")
    parser.add_argument("--out", type=Path, help="file for the numbers, as JSON")
    options = parser.parse_args()
    order = Order(recipe=options.recipe, data=str(options.data) if options.data else None, weights=options.weights)
    job = open_network(order, torch.device(options.device))
    whole = job.model.eval()
    images = draw(job, options.images, options.seed)[0].to(options.device)
    pruner = Pruner(copy_model(whole), job.example, rank="score_per_mac")
    rows: list[dict[str, float]] = []
    for share in options.shares:
        met = False
        while not met:
            observe(pruner, images)
            batches = images.split(BATCH)
            met = pruner.prune(STEP, Budget(macs=share), repair=batches, images=options.images, reference=whole).met
        repaired = Pruner(copy_model(whole), graph=pruner.graph)
        repaired.load_state_dict({**pruner.state_dict(), "score": {}})
        repaired.model.load_state_dict(pruner.model.state_dict())
        model = repaired.finish()
        before = job.task.metrics(model)["accuracy"]
        distil_(model, whole, images, options.steps, options.rate)
        after = job.task.metrics(model)["accuracy"]
        rows.append({"macs": pruner.cost.macs / pruner.graph.macs, "repaired": before, "distilled": after})
        print(
            f"{options.images} images, {share:.0%} of the MACs: repaired {before:.2f}, distilled {after:.2f}",
            flush=True,
        )
    if options.out is not None:
        about = {key: getattr(options, key) for key in ("recipe", "images", "seed", "steps", "rate")}
        write_atomic(options.out, to_json({**about, "torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
