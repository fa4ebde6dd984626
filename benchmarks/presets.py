"""Ways to prune and fine-tune at the same cost, on images held out of the training data: what presets should do.

python benchmarks/presets.py resnet56@cifar10 --data cifar --hold-out 5000 --train-epochs 20 --out r56.json
python benchmarks/presets.py torchvision:mobilenet_v2@class_folders --data birds --weights mobilenet_v2.pth \\
    --image-size 160 --hold-out 1200 --out mobilenet.json --ways steps steps-distill

A way is a name of WAYS, with the number of epochs and the highest learning rate: steps:5:0.01.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from coverage_report import hardware

import secateur
from secateur.channels.analyze import analyze
from secateur.files import to_json, write_atomic
from secateur.recipes.jobs import Order, build
from secateur.recipes.recipe import transfer
from secateur.recipes.starts import begin
from secateur.runs.events import Tick
from secateur.runs.prune import prune, train

ONCE = {"tick_removes": 1.0, "tick_lr": 0.0, "tick_images": 2048, "tock_every": 0}
STEPS = {
    "tick_removes": 0.05,
    "tick_step": 0.05,
    "tick_lr": 0.0,
    "tick_images": 2048,
    "tock_every": 0,
    "rank": "score_per_mac",
    "repair": 512,
}
TICK_TOCK = {"tick_removes": 0.04, "tick_data": 0.2, "tock_every": 5, "tock_epochs": 2, "rank": "score"}
WAYS: dict[str, dict[str, Any]] = {
    "once": ONCE,
    "once-repair": {**ONCE, "rank": "score_per_mac", "repair": 512},
    "steps": STEPS,
    "steps-score": {**STEPS, "rank": "score"},
    "steps-distill": {**STEPS, "distill": 0.9},
    "steps-half": {**STEPS, "distill": 0.5},
    "steps-fine": {**STEPS, "tick_removes": 0.02, "tick_step": 0.02, "distill": 0.9},
    "once-distill": {**ONCE, "rank": "score_per_mac", "repair": 512, "distill": 0.9},
    "tick-tock": TICK_TOCK,
    "tick-tock-distill": {**TICK_TOCK, "distill": 0.9},
    "tick-tock-repair": {**TICK_TOCK, "distill": 0.9, "repair": 512},
    "paper": {},
}


def settings_of(way: str, keep: float, seed: int) -> secateur.TickTock:
    name, epochs, rate = way.split(":")
    if name == "paper":
        return secateur.TickTock.of(keep_macs=keep, seed=seed, evaluate="phases")
    return secateur.TickTock.of(
        keep_macs=keep,
        finetune_epochs=int(epochs),
        finetune_lr=float(rate),
        finetune_lr_low=0.0,
        finetune_shape="warmup",
        evaluate="phases",
        seed=seed,
        **WAYS[name],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="NETWORK@DATASET")
    parser.add_argument("--data", help="folder of the dataset, if it has one")
    parser.add_argument("--weights", help="trained on other classes; otherwise random weights")
    parser.add_argument("--image-size", type=int)
    parser.add_argument("--hold-out", type=int, required=True, help="training images to test on")
    parser.add_argument("--train-epochs", type=int, default=25, help="of the whole network, before all else")
    parser.add_argument("--keep-macs", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--trained", type=Path, help="file for the trained whole network, which is taken if it exists")
    parser.add_argument("--until", type=float, default=1e9, help="seconds after which no further way is begun")
    parser.add_argument("--ways", nargs="+", required=True, help="as steps:5:0.01")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    begun = time.perf_counter()
    device = torch.device(options.device)
    order = Order(
        recipe=options.recipe,
        data=options.data,
        weights=options.weights,
        image_size=options.image_size,
        hold_out=options.hold_out,
    )
    on_gpu = device.type == "cuda"
    engine = secateur.Engine(precision="bf16" if on_gpu else "fp32", channels_last=on_gpu)
    job = build(order, options.seed, device, on_gpu)
    graph = analyze(job.model, job.example)
    model = begin(job, graph, order, options.seed).model
    if options.trained is not None and options.trained.exists():
        model.load_state_dict(torch.load(options.trained, map_location=device, weights_only=True))
    elif options.train_epochs:
        training = transfer().but(epochs=options.train_epochs, evaluate="end", seed=options.seed)
        if options.weights is None:
            training = training.but(lr=0.1, weight_decay=5e-4)
        result = train(model, job.example, job.task, settings=training, engine=engine)
        model = result.model
        print(f"{options.recipe}: {result}", flush=True)
        if options.trained is not None:
            torch.save(model.state_dict(), options.trained)
    rows: list[dict[str, Any]] = []
    for way in options.ways:
        if time.perf_counter() - begun > options.until:
            print(f"{options.recipe}: no time for {way}", flush=True)
            continue
        settings, started = settings_of(way, options.keep_macs, options.seed), time.perf_counter()
        result = prune(model, job.example, job.task, settings=settings, engine=engine, graph=graph)
        pruned = next(event for event in reversed(result.history) if isinstance(event, Tick))
        row = {
            "way": way,
            "keep_macs": options.keep_macs,
            "seed": options.seed,
            "whole": result.metrics_before,
            "pruned": pruned.metrics,
            "after": result.metrics,
            "macs": result.after.macs / result.before.macs,
            "seconds": time.perf_counter() - started,
        }
        rows.append(row)
        accuracies = " -> ".join(f"{row[key].get('accuracy', 0):.2f}" for key in ("whole", "pruned", "after"))
        print(f"{options.recipe} {way}: {accuracies}, {row['macs']:.3f}, {row['seconds']:.0f} s", flush=True)
        where = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16" if on_gpu else hardware()
        held = {"recipe": options.recipe, "hold_out": options.hold_out, "image_size": options.image_size}
        found = {**held, "train_epochs": options.train_epochs, "hardware": where, "rows": rows}
        write_atomic(options.out, to_json(found, indent=1))


if __name__ == "__main__":
    main()
