"""The page docs/releases.md, from the rows of docs/releases.json."""

from __future__ import annotations

import textwrap
from typing import Any

from coverage_report import escaped, hardware

Row = dict[str, Any]
CHECKED = ("equal", "uncut", "refused", "failed", "wrong")
SLOWER = 1.5
"""Times the seconds of the newest release, from which a release counts as slower."""


def markdown(chosen: dict[str, int], rows: list[Row], since: str, oldest: dict[str, str]) -> str:
    """How it was made, what came of it, every release, and what went wrong."""
    return "\n\n".join([introduction(since, oldest), summary(chosen, rows), releases(rows), exceptions(rows)]) + "\n"


def introduction(since: str, oldest: dict[str, str]) -> str:
    first = textwrap.fill(", ".join(f"{package} {release}" for package, release in oldest.items()) + ".", 120)
    return f"""# Releases of other packages

Made by `make releases` (`python benchmarks/releases.py`) on {hardware()}; one process at a time, one thread.

The networks are those of [the page of other packages](networks.md), with every final release since {since}. The check
is the same: masked and shrunk must be equal. A package with very many releases has the oldest and the last of every
minor version here. The oldest releases since {since}:

{first}

How each was tried:

- A release is installed with pip, without its dependencies, in front of the packages that are there. A dependency that
  is missing, or has another version than the release asks for, is installed as well. Torch, torchvision, torchaudio,
  numpy and scipy are not replaced, whatever a release asks for.
- *Equal*: masked and shrunk agree. *Uncut*: analysed, nothing to cut exactly. *Refused*: Secateur says why it cannot.
  *Failed*: any other error. *Wrong*: masked and shrunk differ.
- *Not built*: the release does not have the network, takes other arguments, or does not run with the packages here.
- Seconds are CPU seconds of the analyses, on a machine that other work shared. *Ratio* compares them with the newest
  release, on the networks that both have. A release above {SLOWER} counts as slower. The releases between the newest
  and the oldest were timed while the machine was slower, and have not been timed again: a high ratio may come from that
  alone. A network with a `train()` of its own is analysed in both modes, which takes twice as long: those of
  segmentation-models-pytorch 0.6.0, but not of 0.4.0.

torchvision and torchaudio are left out: each of their releases is compiled for one release of torch. So are packages
without a release since {since}: asteroid, basicsr, denoiser, easyocr, efficientnet_pytorch, encodec, facenet-pytorch,
lpips, openunmix, pretrainedmodels and resnest."""


def summary(chosen: dict[str, int], rows: list[Row]) -> str:
    """The counts that matter, in a sentence and by package."""
    count = counts(rows)
    head = ["package", "releases", "tried", "install", "import", "networks", *CHECKED, "slower releases"]
    lines = [
        "## Summary",
        "",
        f"{len(rows)} of {sum(chosen.values())} releases of {len(chosen)} packages were tried: "
        f"{sum(row['installs'] for row in rows)} install, {sum(row.get('imports', False) for row in rows)} import. "
        f"They have {sum(count.values())} networks: {count['equal']} equal, {count['uncut']} uncut, "
        f"{count['refused']} refused, {count['failed']} failed, {count['wrong']} wrong. "
        f"{sum(slower(row, rows) for row in rows)} releases are slower.",
        "",
        "| " + " | ".join(head) + " |",
        "|---" + "|---:" * (len(head) - 1) + "|",
    ]
    for package in chosen:
        own = [row for row in rows if row["package"] == package]
        count = counts(own)
        cells = [
            package,
            chosen[package],
            len(own),
            sum(row["installs"] for row in own),
            sum(row.get("imports", False) for row in own),
            sum(count.values()),
            *count.values(),
            sum(slower(row, rows) for row in own),
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def releases(rows: list[Row]) -> str:
    """One line per release."""
    head = ["release", *CHECKED, "not built", "CPU s", "ratio"]
    lines = ["## Releases", "", "| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    for row in rows:
        if not row.get("imports"):
            state = "does not import" if row["installs"] else "does not install"
            lines.append(f"| {title(row)} | {state}" + " |" * (len(head) - 1))
            continue
        numbers = [len(row.get(name, ())) for name in (*CHECKED, "not built")]
        value = ratio(row, rows)
        cells = [title(row), *numbers, f"{sum(seconds(row).values()):.1f}", f"{value:.2f}" if value else ""]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def exceptions(rows: list[Row]) -> str:
    """What went wrong or is slower, in words."""
    found = {
        "Does not install": [f"{title(row)}: {escaped(row['error'])}" for row in rows if not row["installs"]],
        "Does not import": [
            f"{title(row)}: {escaped(row['error'])}" for row in rows if row["installs"] and not row.get("imports")
        ],
        "Slower": [f"{title(row)}: {ratio(row, rows):.2f} times" for row in rows if slower(row, rows)],
    }
    for outcome in ("wrong", "failed", "refused", "not built"):
        told: dict[tuple[str, str], list[str]] = {}
        for row in rows:
            for name, error in row.get(outcome, {}).items():
                told.setdefault((f"{row['package']} {name}", error), []).append(row["release"])
        found[outcome.capitalize()] = [
            f"{name} ({', '.join(numbers)}): {escaped(error)}" for (name, error), numbers in told.items()
        ]
    lines = ["## Exceptions"]
    for heading, entries in found.items():
        if entries:
            lines += ["", f"{heading}:", "", *(f"- {entry}" for entry in entries)]
    return "\n".join(lines) if len(lines) > 1 else "## Exceptions\n\nNone."


def counts(rows: list[Row]) -> dict[str, int]:
    """Networks by what came of them, those that were built."""
    return {name: sum(len(row.get(name, ())) for row in rows) for name in CHECKED}


def seconds(row: Row) -> dict[str, float]:
    """Of the analyses that went well."""
    return {**row.get("equal", {}), **row.get("uncut", {})}


def ratio(row: Row, rows: list[Row]) -> float | None:
    """The seconds next to those of the package's newest release, the first in the list, on what both have."""
    newest = next(other for other in rows if other["package"] == row["package"])
    own, reference = seconds(row), seconds(newest)
    common = own.keys() & reference.keys()
    whole = sum(reference[name] for name in common)
    return sum(own[name] for name in common) / whole if whole else None


def slower(row: Row, rows: list[Row]) -> bool:
    return (ratio(row, rows) or 0) > SLOWER


def title(row: Row) -> str:
    return f"{row['package']} {row['release']}"
