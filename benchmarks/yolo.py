"""A detector of ultralytics on real boxes: trained, then pruned and fine-tuned, beside the whole one trained as long.

python examples/yolo/pets.py IMAGES XMLS heads           # the data: heads of Oxford-IIIT Pets
python benchmarks/yolo.py heads/data.yaml --out results/yolo
python benchmarks/yolo.py heads/data.yaml --out results/yolo --weights whole.pt --stages pruned control
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from functools import partial
from pathlib import Path

import torch
import ultralytics
from ultralytics import YOLO
from ultralytics.engine import trainer as engine
from ultralytics.utils.torch_utils import get_flops

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "yolo"))

from pruning import PruningTrainer

STAGES = ("whole", "pruned", "control")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="yolov8n")
    parser.add_argument("--weights", type=Path, help="the whole network, trained before")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--epochs", type=int, default=100, help="of the whole network")
    parser.add_argument("--more", type=int, default=50, help="epochs with pruning, and as many without for the control")
    parser.add_argument("--keep-macs", type=float, default=0.6)
    parser.add_argument("--prune-epochs", type=int, default=10)
    parser.add_argument("--rank", default="score")
    parser.add_argument("--imgsz", type=int, default=320)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--lr", type=float, help="of AdamW in the pruned and the control stage; theirs if left out")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    engine.check_amp = lambda model: True  # theirs downloads a network

    args.out.mkdir(parents=True, exist_ok=True)
    runs = args.out.resolve() / "runs"
    common = {
        "data": str(args.data.resolve()), "imgsz": args.imgsz, "batch": args.batch, "workers": args.workers,
        "cache": "ram", "plots": False, "seed": args.seed, "deterministic": False, "project": str(runs),
        "exist_ok": True, "patience": 0,
    }  # fmt: skip
    learning = {} if args.lr is None else {"optimizer": "AdamW", "lr0": args.lr, "momentum": 0.9, "warmup_bias_lr": 0.0}
    settings = {"rank": args.rank}
    prune = partial(PruningTrainer, keep_macs=args.keep_macs, prune_epochs=args.prune_epochs, settings=settings)
    weights = args.weights or args.out / "whole.pt"
    report = {
        "ultralytics": ultralytics.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        **{name: getattr(args, name) for name in ("model", "epochs", "more", "keep_macs", "prune_epochs", "rank")},
        **{name: getattr(args, name) for name in ("imgsz", "batch", "lr", "seed")},
        "stages": {},
    }
    for stage in args.stages:
        start = time.perf_counter()
        model = YOLO(f"{args.model}.yaml" if stage == "whole" else weights)
        own = {"trainer": prune} if stage == "pruned" else {}
        more = {"epochs": args.epochs} if stage == "whole" else {"epochs": args.more, **learning}
        model.train(name=stage, **own, **more, **common)
        seconds = time.perf_counter() - start
        best = args.out / f"{stage}.pt"
        shutil.copy(model.trainer.best, best)
        report["stages"][stage] = {"seconds": round(seconds, 1), **measured(best, args)}
        print(f"RESULT {stage}: {report['stages'][stage]}", flush=True)
        (args.out / "yolo.json").write_text(json.dumps(report, indent=1) + "\n")


def measured(path: Path, args: argparse.Namespace) -> dict[str, float]:
    """What the network of a checkpoint is, and how well it detects on the validation images."""
    model = YOLO(path)
    numbers = {
        "macs_share": getattr(model.model, "kept_macs", 1.0),
        "gflops": get_flops(model.model, args.imgsz),
        "params": sum(parameter.numel() for parameter in model.model.parameters()),
    }
    found = model.val(
        data=str(args.data.resolve()), imgsz=args.imgsz, batch=args.batch, workers=args.workers, plots=False,
        project=str(args.out.resolve() / "runs"), name=f"val_{path.stem}", exist_ok=True,
    )  # fmt: skip
    found = {"map50_95": found.box.map, "map50": found.box.map50, "inference_ms": found.speed["inference"]}
    return {**numbers, **{name: float(value) for name, value in found.items()}}


if __name__ == "__main__":
    main()
