"""When does a residual network lose channels of its trunk, and does that pay? Without training.

    python benchmarks/trunks.py resnet56@cifar10 --data cifar --weights resnet56.ckp --device cuda

All channels are scored once and go at once, by score or by score per MAC. A channel of a trunk has gates in many
layers, whose scores add up, and saves MACs in as many. Beside each network stands the one whose trunks had to stay.
Both are repaired.
"""

from __future__ import annotations

import argparse
import platform
from pathlib import Path

import torch
from repair import draw, observe

from secateur import Budget, Limits, Pruner, analyze, repair
from secateur.channels.groups import ChannelGraph
from secateur.channels.shrink import copy_model
from secateur.errors import UnreachableBudget
from secateur.files import to_json, write_atomic
from secateur.recipes.jobs import Order
from secateur.recipes.starts import open_network

SHARES = (0.6, 0.4, 0.3, 0.2, 0.1)


def trunks(graph: ChannelGraph) -> list[str]:
    """The groups whose channels are made by more than two layers: those of residual sums."""
    return [group.name for group in graph.groups if len(group.layers) > 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="a recipe, or NETWORK@DATASET")
    parser.add_argument("--data", type=Path, help="folder of the dataset")
    parser.add_argument("--weights", required=True, help="the trained network: a run, or a file with a state dict")
    parser.add_argument("--seed", type=int, default=0, help="of the images that are drawn")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--labelled", type=int, default=2048, help="training images for the score")
    parser.add_argument("--images", type=int, default=512, help="training images for the repair")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="shares of the MACs")
    parser.add_argument("--out", type=Path, help="file for the numbers, as JSON")
    options = parser.parse_args()
    order = Order(recipe=options.recipe, data=str(options.data) if options.data else None, weights=options.weights)
    job = open_network(order, torch.device(options.device))
    whole = job.model.eval()
    graph = analyze(whole, job.example)
    images, labels = (part.to(options.device) for part in draw(job, options.labelled + options.images, options.seed))
    count = options.labelled
    labelled = list(zip(images[:count].split(128), labels[:count].split(128), strict=True))
    names = trunks(graph)
    scored = Pruner(copy_model(whole), graph=graph)
    observe(scored, labelled)
    rows = []
    for rank in ("score", "score_per_mac"):
        for share in options.shares:
            found: dict[bytes, float] = {}
            for free in (True, False):
                limits = Limits(multiple_of=1, at_least={} if free else dict.fromkeys(names, 1.0))
                pruner = Pruner(copy_model(whole), graph=graph, rank=rank, limits=limits)
                pruner.load_state_dict(scored.state_dict())
                try:
                    pruner.prune(budget=Budget(macs=share))
                except UnreachableBudget as error:
                    print(f"{rank:<13} {share:6.1%}  {error}")
                    continue
                widths = {name: int(pruner.kept[graph.group(name).span].sum()) for name in names}
                key = pruner.kept.numpy().tobytes()
                if key not in found:
                    repaired = repair(whole, pruner.plan, images[count:].split(128), images=options.images)
                    found[key] = round(job.task.metrics(repaired)["accuracy"], 2)
                accuracy, macs = found[key], round(pruner.cost.macs / graph.macs, 4)
                rows.append({"rank": rank, "macs": macs, "free": free, "trunks": widths, "repaired": accuracy})
                print(f"{rank:<13} {macs:6.1%}  {'free' if free else 'kept'}  {widths}  {accuracy:.2f}", flush=True)
    if options.out is not None:
        about = {key: getattr(options, key) for key in ("recipe", "seed", "labelled", "images")}
        name = torch.cuda.get_device_name() if options.device.startswith("cuda") else platform.processor() or "CPU"
        about |= {"device": name, "torch": torch.__version__, "rows": rows}
        write_atomic(options.out, to_json(about).encode())


if __name__ == "__main__":
    main()
