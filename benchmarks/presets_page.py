"""The page on presets, from the files that benchmarks/presets.py has written: docs/presets.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
FILES = ROOT / "results" / "presets"
WAYS = {
    "once": "once, no repair",
    "once-repair": "once, repair",
    "once-distill": "once, repair, distillation (**quick**)",
    "steps": "steps of 5%, repair",
    "steps-distill": "steps of 5%, repair, distillation (**balanced**)",
    "tick-tock-distill": "short Tick-Tock, distillation",
}
TITLES = {
    "resnet56_cifar10": "ResNet-56 on CIFAR-10",
    "vgg16m_cifar100": "VGG-16-M on CIFAR-100",
    "resnet50_pets": "ResNet-50 on half of Oxford-IIIT Pets, 160 px",
    "mobilenet_v2_cub": "MobileNet-v2 on CUB-200's training images, 160 px",
    "mobilenet_v2_12_pets": "MobileNet-v2 on 12 classes of pets, 96 px",
    "resnet14_digits": "ResNet-14 on digits",
}
HEAD = """\
# Presets

What should a default do? Made by `benchmarks/presets.py NETWORK@DATASET` and `benchmarks/presets_page.py`. All numbers
are accuracies on images held out of the *training* images, seed 0, n = 1. Networks on CIFAR and digits are trained from
random weights, the others from ImageNet weights. MACs left are those that the cut has reached, in multiples of 8.

- **Repair** brings back most of what a cut at once destroys, and VGG-16-M ends 4.7 points higher. ResNet-56 is an
  exception: cut by the score alone, without repair, it ended 0.9 higher than by the score per MAC with repair.
- **Steps** of 5% end where a cut at once does on CIFAR, and 2.0 points higher for ResNet-50 on pets. They take several
  times as long to prune.
- **Distillation** adds 0.7 to 1.1 points on CIFAR at equal epochs.
- **The rate** depends on where the weights come from. On CIFAR 0.05 is better than 0.01. On pets, networks with
  ImageNet weights do better with 0.003 than with 0.01; on CUB-200 MobileNet-v2 does better with 0.01. So `quick` and
  `balanced` take 0.01, and a user's own photographs on the command line 0.003. `--finetune-lr` is the first thing to
  try.
- **Epochs**: five epochs of fifty batches are too few. `quick` trains for 5 epochs or 1,000 steps, whichever is more,
  up to 25 epochs; `balanced` for 25 epochs or 3,000 steps.
- With 28 epochs on VGG-16-M, small steps with repair and distillation end 0.3 above the cut at once and 0.7 above a
  Tick-Tock of about the same length.
"""


def table(path: Path) -> list[str]:
    data: dict[str, Any] = json.loads(path.read_text())
    rows = data["rows"]
    whole = rows[0]["whole"]["accuracy"]
    lines = [
        f"## {TITLES[path.stem]}",
        "",
        f"{data['hardware']}; tested on {data['hold_out']:,} images; the whole network has {whole:.2f}%.",
        "",
        "| way | epochs | rate | MACs left | after the cut | fine-tuned |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        name, epochs, rate = row["way"].split(":")
        cells = (f"{row['macs']:.1%}", f"{row['pruned']['accuracy']:.2f}", f"{row['after']['accuracy']:.2f}")
        lines.append(f"| {WAYS[name]} | {epochs} | {rate} | {' | '.join(cells)} |")
    return [*lines, ""]


def page() -> str:
    return "\n".join([HEAD, *(line for name in TITLES for line in table(FILES / f"{name}.json"))]).rstrip() + "\n"


if __name__ == "__main__":
    (ROOT / "docs" / "presets.md").write_text(page())
