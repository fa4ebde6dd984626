"""Prune a trained detector of ultralytics, with its own data yaml, trainer, `val` and `export`.

    python prune.py best.pt data.yaml --keep-macs 0.6 --epochs 50 --imgsz 320

A run that was stopped after the network had been pruned continues with `--resume`, and the path of its last.pt.
"""

import argparse
from functools import partial

from pruning import PruningTrainer
from ultralytics import YOLO

parser = argparse.ArgumentParser()
parser.add_argument("weights", help="a detector that was trained on the data")
parser.add_argument("data", help="the data yaml")
parser.add_argument("--keep-macs", type=float, default=0.6)
parser.add_argument("--prune-epochs", type=int, default=5)
parser.add_argument("--epochs", type=int, default=50)
parser.add_argument("--imgsz", type=int, default=640)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--device", default=None)
parser.add_argument("--name", default="pruned")
parser.add_argument("--resume", action="store_true")
args = parser.parse_args()

trainer = partial(PruningTrainer, keep_macs=args.keep_macs, prune_epochs=args.prune_epochs)
model = YOLO(args.weights)
model.train(
    trainer=trainer, data=args.data, epochs=args.epochs, imgsz=args.imgsz, batch=args.batch, device=args.device,
    name=args.name, resume=args.resume, plots=False,
)  # fmt: skip
metrics = model.val(data=args.data, imgsz=args.imgsz, batch=args.batch, device=args.device, plots=False)
share = model.model.kept_macs
print(f"{share:.1%} of the MACs, mAP50-95 {metrics.box.map:.4f}: {model.trainer.best}")
print(f"exported to {model.export(format='onnx', imgsz=args.imgsz)}")
