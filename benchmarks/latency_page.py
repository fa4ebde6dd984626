"""The pages on time saved, from the files that benchmarks/latency.py has written: docs/latency_*.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from secateur.words import counted

ROOT = Path(__file__).parent.parent
FILES, DOCS = ROOT / "results" / "latency", ROOT / "docs"
ORDER = ("resnet50", "mobilenet_v2", "efficientnet_b0", "regnet_y_800mf", "vgg16_bn", "resnet56")
TITLES = {
    ("cuda", 64): "Time on a GPU, 64 images at a time",
    ("cuda", 1): "Time on a GPU, one image at a time",
    ("cpu", 1): "Time on a CPU, one image at a time",
}
KINDS = {
    "whole": "whole",
    "macs": "{share:.0%} of the MACs, any widths",
    "aligned": "{share:.0%} of the MACs, multiples of {multiple}",
    "time": "as fast, by time",
    "blocks": "as fast, by time with blocks",
    "budget": "{share:.0%} of the time, with blocks",
}
METHOD = """\
The rows of a network: cut to a share of its MACs, ranked by score per MAC, with widths as they come; the same with
aligned widths; cut by time to what the aligned one takes by the table of layer times (or to that share of the time,
where the aligned one is not faster), by widths alone and with whole blocks that may go; and a budget of that share of
the time. *Blocks* is how many lost their branch. *By the table* is the time that the widths were chosen for. *Time
left* is measured, in the first way of running. The columns behind it are images/s: of the whole network, and the gain
of the others. Times are medians of n = {repetitions} passes, taken by turns with the whole network; *spread* is half
the distance between the quartiles.
"""
TRAINED = """\
Weights are trained where there is a top-1: filters are ranked by the Taylor score of 1,000 photographs of ImageNet's
validation set, cut at once, and re-fitted with 512 of them, without training. Top-1 is of {tested:,} others.
"""
RANDOM = """\
Other weights are random, ranked by the L1 norm: widths and times are of the kind that such a cut gives.
"""
BEFORE = """\
The table of these rows was fitted to the times of layers alone: MACs became part of the fit later.
"""


def page(device: str, batch: int) -> str:
    """The page of a device and batch size."""
    found = [json.loads(path.read_text()) for path in FILES.glob(f"{device}_{batch}_*.json")]
    found.sort(key=lambda each: ORDER.index(_short(each)))
    ways = list(dict.fromkeys(way for each in found for row in each["rows"] for way in row["ms"]))
    tested = max(each["tested"] for each in found)
    columns = ["network", "cut to", "MACs left", "blocks", "by the table", "time left", *ways, "spread"]
    columns += ["top-1"] if tested else []
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for each in found:
        lines += [_row(each, row, ways, bool(tested)) for row in each["rows"]]
    text = METHOD.format(repetitions=found[0]["repetitions"]) + "\n"
    text += TRAINED.format(tested=tested) + RANDOM if tested else RANDOM.replace("Other weights", "Weights")
    text += BEFORE if device == "cuda" else ""
    weights = " --weights FOLDER --photos FOLDER" if tested else ""
    command = f"python benchmarks/latency.py --networks ... --device {device} --batch {batch}{weights} --runners"
    where = found[0]["where"] + ("; bf16, channels last" if device == "cuda" else "; fp32 but for int8")
    missing = [f"- {_short(each)}, {line}" for each in found for line in each["missing"]]
    return "\n".join(
        [
            f"# {TITLES[device, batch]}",
            "",
            f"Made by `{command} {' '.join(ways)}` and `python benchmarks/latency_page.py`, on {where}; "
            f"{counted(batch, 'image')} of 224x224, or of 32x32 for ResNet-56; seed 0.",
            "",
            *text.splitlines(),
            "",
            *lines,
            "",
            *(["What cannot be reached:", "", *missing, ""] if missing else []),
            "The paper, ResNet-50 on a Titan X Pascal, batch 64: 59% of the MACs left +30% images/s, 45% left +43%.",
            "",
        ]
    )


def _short(found: dict[str, Any]) -> str:
    return found["network"].rpartition(":")[2]


def _row(found: dict[str, Any], row: dict[str, Any], ways: list[str], tested: bool) -> str:
    whole = found["rows"][0]
    first = next(iter(whole["ms"]))
    cells = [
        _short(found),
        KINDS[row["kind"]].format(share=row["share"], multiple=found["multiple"]),
        f"{row['macs']:.1%}",
        str(row["branches"]) if row["branches"] else "",
        f"{row['table']:.1%}",
        f"{row['ms'][first] / whole['ms'][first]:.1%}",
    ]
    for way in ways:
        here = way in row["ms"]
        faster = f"{found['batch'] / row['ms'][way] * 1000:,.0f}" if row is whole and here else ""
        cells.append(faster or (f"{whole['ms'][way] / row['ms'][way] - 1:+.0%}" if here else ""))
    cells.append(f"{row['spread'][first]:.1%}")
    cells += [f"{row['top1']:.1f}" if "top1" in row else ""] if tested else []
    return f"| {' | '.join(cells)} |"


def main() -> None:
    for device, batch in TITLES:
        name = "_".join(["latency", device, *([str(batch)] if (device, batch) == ("cuda", 1) else [])])
        if any(FILES.glob(f"{device}_{batch}_*.json")):
            (DOCS / f"{name}.md").write_text(page(device, batch))


if __name__ == "__main__":
    main()
