"""Write docs/performance.md from docs/performance.json; what is written there by hand, at its end, stays.

python benchmarks/performance_page.py
"""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import fill
from typing import Any

DOCS = Path(__file__).parent.parent / "docs"
BY_HAND = "Beside it, by hand:"
IMAGES = 50_000
SIZES = {"resnet56": (32, 128), "vgg16_m": (32, 128), "resnet50": (224, 256)}
KINDS = ("Tick", "Tock", "FineTune")
PASSES = {"Tock": (3, 10), "Tick": (2, 9), "evaluation": (1, 4)}
"""Over the MACs, and over the outputs of convolutions in memory. A Tick needs no gradients of filters."""


def engine(rows: dict[str, Any], floors: dict[str, Any]) -> list[str]:
    lines = [
        "## Images on the device",
        "",
        f"Seconds per {IMAGES:,} images, made by `python benchmarks/engine.py --device cuda`: noise of 32x32 pixels at",
        "batch 128, or 224x224 at batch 256, crop and flip included; medians, seed 0. A Tick includes its removal. The",
        "plain loop has torchvision's transforms in a DataLoader.",
        "",
        "| network | how | Tick | Tock | fine-tuning | measured on |",
        "|---|---|---:|---:|---:|---|",
    ]
    for name, ways in rows.items():
        for how, row in ways.items():
            value = row["value"]
            if isinstance(value, dict):
                cells = " | ".join(f"{value[kind]:.2f}" for kind in KINDS)
            elif how.startswith("plain"):
                cells = f" | | {value:.2f}"
            else:
                continue
            lines.append(f"| {name} | {how} | {cells} | {row['hardware']} |")
    lines += [
        "",
        "Floors: seconds that arithmetic at 790 TFLOP/s and memory traffic at 4.8 TB/s alone would take.",
        "",
        "| network | arithmetic | memory | fastest Tock / larger floor | gated / plain memory |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, ways in rows.items():
        tock = min(row["value"]["Tock"] for row in ways.values() if isinstance(row["value"], dict))
        plain, gated = ways["memory"]["value"]
        arithmetic, memory = floors[name]
        ratio = tock / max(arithmetic, memory)
        lines.append(f"| {name} | {arithmetic:.2f} s | {memory:.2f} s | {ratio:.1f} | {gated / plain:.3f} |")
    return lines


def photographs(found: dict[str, Any], floor: list[float]) -> list[str]:
    lines = [
        "## Photographs",
        "",
        filled(
            "ResNet-50 at 224 pixels, batch 256, bf16, channels-last, made by"
            " `python benchmarks/images.py --photos FOLDER --device cuda --images 20480`"
            f" on one {found['hardware']}. The photographs are of ImageNet's validation set, 127 KB each on average."
            " Ceilings: what arithmetic at 790 TFLOP/s and memory traffic at 4.8 TB/s alone would allow."
        ),
        "",
        "| what | images/s | ceiling by arithmetic | by memory |",
        "|---|---:|---:|---:|",
    ]
    for name, value in found["phases"].items():
        kind = next((kind for kind in PASSES if name.startswith(kind)), "Tock")
        macs, outputs = PASSES[kind]
        ceilings = IMAGES / floor[0] * 3 / macs, IMAGES / floor[1] * 10 / outputs
        lines.append(f"| {name} | {value:,.0f} | {ceilings[0]:,.0f} | {ceilings[1]:,.0f} |")
    for name, value in found["reading"].items():
        lines.append(f"| files to batches alone, {name} | {value:,.0f} | | |")
    plain, gated = found["memory"].values()
    fidelity = found["fidelity"]
    ours, pillows = fidelity["top1"].values()
    within = dict(zip((1, 2, 4, 8), fidelity["within 1, 2, 4 and 8 levels"], strict=True))
    shares = ", ".join(f"{share}% within {level}" for level, share in within.items())
    lines += [
        "",
        f"Peak memory of eager steps: {plain:.1f} GB in a plain loop, {gated:.1f} GB with gates and captured steps"
        f" ({gated / plain:.2f}).",
        "",
        filled(
            "What the GPU decodes and resizes is not bit for bit what Pillow does. By"
            " `python benchmarks/images.py --labelled FOLDER --weights FILE --device cuda`,"
            f" on {fidelity['images']:,} photographs (shorter side 288 pixels): torchvision's mobilenet_v2 has a top-1"
            f" of {ours:.2f} with ours and {pillows:.2f} with Pillow, and gives the same class to"
            f" {fidelity['same class']:.1f}% of them. Of all values of 0 to 255, {shares} levels; the mean difference"
            f" is {fidelity['mean difference']:.2f}."
        ),
    ]
    return lines


def filled(text: str) -> str:
    return fill(text.replace(" --", "\0--"), 120, break_on_hyphens=False, break_long_words=False).replace("\0", " ")


def main() -> None:
    found = json.loads((DOCS / "performance.json").read_text())
    page = DOCS / "performance.md"
    by_hand = page.read_text().partition(BY_HAND)
    lines = ["# How fast the engine trains", "", *photographs(found["images"]["cuda"], found["floors"]["resnet50"]), ""]
    lines += [*engine(found["engine"], found["floors"]), "", ""]
    page.write_text("\n".join(lines) + by_hand[1] + by_hand[2])


if __name__ == "__main__":
    main()
