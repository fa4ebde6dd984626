"""The tables of docs/coverage.md, from the rows of docs/coverage.json."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def hardware() -> str:
    """Processor, cores and torch, as far as the system tells."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    parts = [f"{platform.system()} {platform.machine()}", *named[:1], f"{os.cpu_count()} cores"]
    return ", ".join([*parts, f"torch {version('torch')}"])


def markdown(networks: list[Row], rows: list[Row], fraction: float, seed: int, enough: float) -> str:
    """The whole page: how it was made, what came of it, every network, and why filters stay."""
    known = {(network["family"], network["name"]): network for network in networks}
    rows = [{**row, "network": known[row["family"], row["name"]]} for row in rows]
    parts = [introduction(fraction, seed), summary(networks, rows, enough), table(rows), reasons(rows)]
    return "\n\n".join(parts) + "\n"


def introduction(fraction: float, seed: int) -> str:
    return f"""# Coverage

Made by `make coverage` (`python benchmarks/coverage.py`) on {hardware()}; one thread per network, seed {seed}.

Every network has random weights and random, non-zero batch norm weights, biases and statistics. {fraction:.0%} of every
group of channels is removed, chosen at random. *Masked* is the whole network with zeros where the plan removes,
*shrunk* the cut network; the difference is the largest between any two output values, relative to the largest value
of that output, in double precision and evaluation mode. It must be at most 1e-9 (networks over 150 M parameters:
single precision, 1e-4). Detectors are compared on what their heads return. Seconds are CPU seconds of the analysis
with and without the probe; memory is the most that the process held until the analysis was done, Python, torch and
the network included.

Of pytorchcv 0.0.74 it is the first network of every file that takes one image and runs in double precision; they were
chosen, and first tried, when the analysis was finished.

Torch-Pruning 1.6.1, for comparison, on those of torchvision and timm: global pruning of half the channels by group
magnitude, with the last layer excluded by hand; *equal* says that its result was the masked network's."""


def summary(networks: list[Row], rows: list[Row], enough: float) -> str:
    """The counts that matter."""
    exact = [row for row in rows if row["mode"] == "exact"]
    failed = [row for row in exact if row["outcome"] == "failed"]
    uncut = [row for row in exact if row["outcome"] == "uncut"]
    good = len(exact) - len(failed) - len(uncut)
    plain = [row for row in exact if row["network"]["kind"] == "cnn"]
    less = [row for row in plain if not row.get("params_removed", 0) >= enough]
    helped = {
        (row["family"], row["name"])
        for row in rows
        if row["mode"] == "inexact" and row["outcome"] == "inexact" and row["params_removed"] >= enough
    }
    exceptions = [row for row in less if (row["family"], row["name"]) in helped]
    peer = [row["network"]["torch_pruning"] for row in exact if "torch_pruning" in row["network"]]
    finished = [outcome for outcome in peer if outcome["outcome"] == "ok"]
    equal = [outcome["masked_equals_pruned"] for outcome in finished]
    lines = [
        "## Summary",
        "",
        f"- {len(exact)} of {len(networks)} networks tried: {good} analysed and cut exactly, "
        f"{len(uncut)} analysed without anything to cut exactly, {len(failed)} failed.",
        f"- {len(plain) - len(less)} of {len(plain)} pure CNNs ({share(len(plain) - len(less), len(plain))}) lose at "
        f"least {enough:.0%} of their parameters exactly; {len(exceptions)} more do in inexact mode.",
        f"- Torch-Pruning finished {len(finished)} of the {len(peer)} that it was tried on: {equal.count(True)} equal, "
        f"{equal.count(False)} not equal, {equal.count(None)} not checked.",
    ]
    if failed:
        lines += ["", "Failed:", "", *(f"- {title(row)}: {row['error']}" for row in failed)]
    if less:
        lines += ["", f"Pure CNNs that lose less than {enough:.0%} of their parameters:", ""]
        lines += [f"- {title(row)} ({percent(row, 'params_removed')}): {main_reason(row)}" for row in less]
    return "\n".join(lines)


def table(rows: list[Row]) -> str:
    """One line per network, and one more where it was also cut inexactly."""
    head = [
        *("network", "kind", "input", "filters prunable", "of convolutions", "parameters removed", "MACs removed"),
        *("difference", "CPU s", "without probe", "MB", "Torch-Pruning"),
    ]
    lines = ["## Networks", "", "| " + " | ".join(head) + " |", "|---|---|---" + "|---:" * 8 + "|---|"]
    for row in rows:
        cells = [
            title(row),
            row["network"]["kind"],
            "x".join(map(str, row["network"]["input"])),
            share(row.get("free_filters"), row.get("filters")),
            share(row.get("free_convolution_filters"), row.get("convolution_filters")),
            percent(row, "params_removed"),
            percent(row, "macs_removed"),
            f"{row['difference']:.0e}" if row["outcome"] in ("exact", "inexact") else row["outcome"],
            number(row, "seconds", 2),
            number(row, "seconds_without_probe", 2),
            number(row, "memory_mb", 0),
            peer_outcome(row["network"].get("torch_pruning")),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def reasons(rows: list[Row]) -> str:
    """For every network that is not wholly prunable: how many filters stay, and why."""
    lines = [
        "## What stays, and why",
        "",
        "Filters of convolutions and linear layers; in brackets the first such layer.",
    ]
    for row in rows:
        if row.get("stays"):
            lines += ["", f"**{title(row)}**: {row['free_filters']} of {row['filters']} filters can go", ""]
            for entry in row["stays"][:6]:
                others = f" and {entry['layers'] - 1} more" if entry["layers"] > 1 else ""
                lines.append(f"- {entry['filters']}: {escaped(entry['reason'])} (`{entry['first']}`{others})")
            rest = row["stays"][6:]
            if rest:
                lines.append(f"- {sum(entry['filters'] for entry in rest)}: {len(rest)} other reasons")
            lines += [f"- note: {escaped(note)}" for note in row["notes"]]
    return "\n".join(lines)


def title(row: Row) -> str:
    return f"{row['family']} {row['name']}" + (" (inexact)" if row["mode"] == "inexact" else "")


def main_reason(row: Row) -> str:
    """Why most of the filters that stay do."""
    if row.get("stays"):
        first = row["stays"][0]
        return f"{first['filters']} of {row['filters']} filters: {escaped(first['reason'])}"
    return row.get("error", "every filter can go")


def peer_outcome(outcome: Row | None) -> str:
    if outcome is None:
        return ""
    equal = {True: ", equal", False: ", not equal", None: ""}[outcome["masked_equals_pruned"]]
    return outcome["outcome"].replace("_", " ") + equal


def share(part: int | None, whole: int | None) -> str:
    return f"{part / whole:.1%}" if part is not None and whole else ""


def percent(row: Row, key: str) -> str:
    return f"{row[key]:.1%}" if key in row else ""


def number(row: Row, key: str, digits: int) -> str:
    return f"{row[key]:.{digits}f}" if key in row else ""


def escaped(text: str) -> str:
    """Text that Markdown shows as it is."""
    for character in "\\|*_[]<>":
        text = text.replace(character, f"\\{character}")
    return text
