"""The page docs/networks.md, from the rows of docs/networks.json."""

from __future__ import annotations

from typing import Any

from coverage_report import escaped, hardware

Row = dict[str, Any]
LITTLE = 0.9
"""Share of the parameters that is free; of networks with less the page says why."""


def markdown(rows: list[Row], versions: dict[str, str], fraction: float) -> str:
    """How it was made, what came of it, every network, and why parameters stay."""
    tried = [row for row in rows if row["outcome"] not in ("missing", "not built")]
    parts = [introduction(fraction), summary(tried, versions), table(tried), reasons(tried)]
    return "\n\n".join(parts) + "\n"


def introduction(fraction: float) -> str:
    return f"""# Networks of other packages

Made by `python benchmarks/packages.py` and `--peers` on {hardware()}; one thread per network.
[Coverage](coverage.md) has those of torchvision, timm and pytorchcv. [Releases](releases.md) has these with the
releases of two years.

Every network is built without pretrained weights, many in a small variant, with random batch norms. *Free* is the
share of the parameters that goes when one channel of every group is left. *Gone* is what goes with {fraction:.0%} of
every group; the result is compared with the network that has zeros in their place, as on the page of the coverage, and
must agree to 1e-9, or 1e-4 for those that run in single precision only. Seconds are CPU seconds of the analysis with
the probe, on a machine that other work shared.

Torch-Pruning, for comparison: {fraction:.0%} of every group by its `BasePruner`, with the layers that make the output
excluded. *Runs* says that its result runs and has outputs of the same shapes; the values were not compared."""


def summary(rows: list[Row], versions: dict[str, str]) -> str:
    """The counts that matter."""
    good = [row for row in rows if row["outcome"] == "exact"]
    uncut = [row for row in rows if row["outcome"] == "uncut"]
    failed = [row for row in rows if row["outcome"] in ("failed", "out of time")]
    peers = [row["peer"] for row in rows if "peer" in row]
    packages = [f"{name} {number}".strip() for name, number in versions.items() if name in {r["package"] for r in rows}]
    lines = [
        "## Summary",
        "",
        f"- {len(rows)} networks of {len(packages)} packages: {len(good)} cut exactly, {len(uncut)} with nothing "
        f"to cut exactly, {len(failed)} failed.",
        f"- {sum(row['params_free'] >= LITTLE for row in good)} have at least {LITTLE:.0%} of their parameters free.",
    ]
    if peers:
        runs = [peer for peer in peers if peer["outcome"] == "runs"]
        late = [peer for peer in peers if peer["outcome"] == "out of time"]
        lines.append(
            f"- Torch-Pruning was tried on {len(peers)} of them: its result runs for {len(runs)}, fails or has other "
            f"outputs for {len(peers) - len(runs) - len(late)}; {len(late)} ran out of time (40 s or 150 s, start "
            "included)."
        )
    lines += ["", f"Packages: {', '.join(packages)}."]
    if failed:
        lines += ["", "Failed:", "", *(f"- {title(row)}: {escaped(row['error'])}" for row in failed)]
    return "\n".join(lines)


def table(rows: list[Row]) -> str:
    """One line per network."""
    head = ["network", "parameters", "free", "gone", "MACs gone", "difference", "CPU s", "Torch-Pruning", "gone"]
    lines = ["## Networks", "", "| " + " | ".join(head) + " |", "|---" + "|---:" * 6 + "|---|---:|"]
    for row in rows:
        if "params_free" not in row:
            lines.append(f"| {title(row)} | | | | | failed | | | |")
            continue
        peer = row.get("peer", {})
        gone = f"{peer['params_removed']:.1%}" if "params_removed" in peer else ""
        cells = [
            title(row),
            f"{row['params']:,}",
            f"{row['params_free']:.1%}",
            f"{row['params_removed']:.1%}",
            f"{row['macs_removed']:.1%}",
            f"{row['difference']:.0e}" if row["outcome"] == "exact" else row["outcome"],
            f"{row['seconds']:.2f}",
            peer.get("outcome", ""),
            gone,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def reasons(rows: list[Row]) -> str:
    """Why parameters stay, where many do."""
    lines = ["## What stays, and why", "", f"Networks with less than {LITTLE:.0%} free: filters that stay."]
    for row in rows:
        if row.get("params_free", 1) < LITTLE:
            lines += ["", f"**{title(row)}** ({row['params_free']:.0%} free)", ""]
            if row["unused"]:
                lines.append(f"- never runs, and can be dropped: `{'`, `'.join(row['unused'][:3])}`")
            for entry in row["stays"][:3]:
                others = f" and {entry['layers'] - 1} more" if entry["layers"] > 1 else ""
                lines.append(f"- {entry['filters']}: {escaped(entry['reason'])} (`{entry['first']}`{others})")
    return "\n".join(lines)


def title(row: Row) -> str:
    return f"{row['package']} {row['name']}"
