"""Cut networks of many packages, and check that masked and shrunk are the same function.

    python benchmarks/packages.py                     every network, each in a process of its own
    python benchmarks/packages.py --only 'monai/*'    some of them, merged into what is there
    python benchmarks/packages.py --resume            those without a result
    python benchmarks/packages.py --peers             what Torch-Pruning makes of those that have one

Writes docs/networks.json (the data) and docs/networks.md (the page). A network whose package is not installed is left
out. The check is that of coverage.py.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path
from typing import Any

import coverage
import packages_report
import torch
from packages_list import NETWORKS, Network
from torch import nn

import secateur

DOCS = Path(__file__).parent.parent / "docs"
FRACTION = coverage.FRACTION
Row = dict[str, Any]


def build(network: Network) -> tuple[nn.Module, Any]:
    """The network without pretrained weights, in evaluation mode, and an input for it."""
    torch.manual_seed(coverage.SEED)
    names: dict[str, Any] = {"torch": torch, "nn": nn, "x": torch.randn(1, 3, 64, 64)}
    with redirect_stdout(sys.stderr):
        exec(network.imports, names)
        model = eval(network.build, names)
        example = eval(network.example, names)
        model.eval()
        coverage.randomise_(model, example)
    return model, example


def measure(network: Network) -> Row:
    """Analyse, cut and compare one network; what goes wrong is part of the result."""
    row: Row = {"package": network.package, "name": network.name}
    torch.set_num_threads(1)
    try:
        model, example = build(network)
    except ImportError as error:
        return row | {"outcome": "missing", "error": str(error)}
    except Exception as error:
        return row | {"outcome": "not built", "error": coverage.shorten(f"{type(error).__name__}: {error}", 300)}
    try:
        row["params"] = coverage.count_params(model)
        secateur.analyze(nn.Conv2d(1, 1, 1), torch.zeros(1, 1, 1, 1))  # what only the first analysis pays for
        graph, row["seconds"] = coverage.timed(lambda: secateur.analyze(model, example))
        row |= coverage.describe(model, graph)
        row["unused"] = list(graph.unused)
        free = secateur.Plan(graph, _one_of_each(graph))
        row["params_free"] = 1 - free.cost.params / graph.params
        plan = secateur.Plan.random(graph, FRACTION, coverage.SEED)
        row["params_removed"] = 1 - plan.cost.params / graph.params
        row["macs_removed"] = 1 - plan.cost.macs / max(1, graph.macs)
        row |= coverage.compare(model, plan, example, False)
    except Exception as error:  # a network that fails is a row like any other
        row |= {"outcome": "failed", "error": coverage.shorten(f"{type(error).__name__}: {error}", 300)}
    return {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in row.items()}


def _one_of_each(graph: secateur.ChannelGraph) -> torch.Tensor:
    """The fewest channels that can be kept."""
    kept = torch.zeros(graph.num_channels, dtype=torch.bool)
    for group in graph.groups:
        kept[group.start : group.start + min(group.at_least, group.size)] = True
    return kept


def measure_peer(network: Network) -> Row:
    """What Torch-Pruning removes of 30% of every group, and whether its result runs; the last layers are excluded."""
    import torch_pruning

    torch.set_num_threads(1)
    model, example = build(network)
    graph = secateur.analyze(model, example, probe=False)
    last = [model.get_submodule(name.rpartition(".")[0]) for name in graph.final]
    before, whole = coverage.count_params(model), coverage.outputs(model, example, False)
    try:
        importance = torch_pruning.importance.RandomImportance()
        pruner = torch_pruning.pruner.BasePruner(
            model, example, importance, pruning_ratio=FRACTION, ignored_layers=[m for m in last if _has_weight(m)]
        )
        _, seconds = coverage.timed(pruner.step)
        shapes = [[tuple(t.shape) for t in tensors] for tensors in (whole, coverage.outputs(model, example, False))]
    except Exception as error:
        return {"outcome": "failed", "error": coverage.shorten(f"{type(error).__name__}: {error}", 160)}
    if shapes[0] != shapes[1]:
        return {"outcome": "other outputs"}
    return {
        "outcome": "runs",
        "params_removed": round(1 - coverage.count_params(model) / before, 4),
        "seconds": seconds,
    }


def _has_weight(module: nn.Module) -> bool:
    return isinstance(getattr(module, "weight", None), torch.Tensor)


def _in_process(network: Network, task: str, timeout: float) -> Row:
    """Measure a network in a process of its own, which may run out of time or memory."""
    command = [sys.executable, "-W", "ignore", __file__, task, f"{network.package}/{network.name}"]
    named: Row = {} if task == "--peer" else {"package": network.package, "name": network.name}
    failed = {**named, "outcome": "failed"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    except subprocess.TimeoutExpired:
        return {**failed, "outcome": "out of time", "error": f"takes more than {timeout:.0f} s"}
    if done.returncode:
        return {**failed, "error": coverage.shorten(f"exit status {done.returncode}: {done.stderr}", 300)}
    return json.loads(done.stdout.splitlines()[-1])


def save(path: Path, rows: list[Row]) -> None:
    """One line per row, so that two versions can be compared."""
    rows.sort(key=lambda row: (row["package"].lower(), row["name"].lower()))
    lines = ",\n".join(json.dumps(row) for row in rows)
    path.write_text(f'{{"fraction": {FRACTION}, "rows": [\n{lines}\n]}}\n')


def versions(rows: list[Row]) -> dict[str, str]:
    """Of the packages, as far as they are installed."""
    found = {}
    for package in sorted({row["package"] for row in rows}, key=str.lower):
        try:
            found[package] = version(package)
        except Exception:
            found[package] = ""
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="networks whose package/name matches")
    parser.add_argument("--resume", action="store_true", help="only networks without a result")
    parser.add_argument("--jobs", type=int, default=1, help="networks at a time, one core each")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one network")
    parser.add_argument("--peers", action="store_true", help="run Torch-Pruning on the networks with a result")
    parser.add_argument("--worker", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--peer", metavar="NAME", help=argparse.SUPPRESS)
    options = parser.parse_args()
    listed = {f"{network.package}/{network.name}": network for network in NETWORKS}
    if options.worker or options.peer:
        work = measure(listed[options.worker]) if options.worker else measure_peer(listed[options.peer])
        print(json.dumps(work))
        return
    path = DOCS / "networks.json"
    rows = [row for row in coverage.load(path) if f"{row['package']}/{row['name']}" in listed]
    known = {f"{row['package']}/{row['name']}": row for row in rows}
    chosen = [key for key in listed if fnmatchcase(key, options.only) and not (options.resume and key in known)]
    if options.peers:
        chosen = [key for key in chosen if "difference" in known.get(key, ()) and "peer" not in known[key]]

    def run(key: str) -> Row:
        if options.peers:
            return known[key] | {"peer": _in_process(listed[key], "--peer", options.timeout)}
        return _in_process(listed[key], "--worker", options.timeout)

    with ThreadPoolExecutor(options.jobs) as pool:
        for done, (key, new) in enumerate(zip(chosen, pool.map(run, chosen), strict=True), 1):
            if new["outcome"] == "missing":
                continue
            known[key] = new
            rows = list(known.values())
            save(path, rows)
            short = {k: new.get(k) for k in ("outcome", "error", "params_free", "params_removed", "seconds", "peer")}
            print(f"[{done}/{len(chosen)}] {key}: {short}", file=sys.stderr, flush=True)
    (DOCS / "networks.md").write_text(packages_report.markdown(rows, versions(rows), FRACTION))


if __name__ == "__main__":
    main()
