"""Cut every network of networks.json and check that masked and shrunk are the same function.

    python benchmarks/coverage.py                       every network, each in a process of its own
    python benchmarks/coverage.py --only 'resnet*'      some of them, merged into what is there
    python benchmarks/coverage.py --resume              those without a result

Writes docs/coverage.json (the data) and docs/coverage.md (the tables). The check is made by hand, from the plan's
slices, with nothing of Secateur's own comparison.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import coverage_report
import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves, tree_map

import secateur
from secateur.models.lookup import example_for, find_model

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
SOURCES = {"timm": "timm", "pytorchcv": "pytorchcv.model_provider"}
SEED = 0
FRACTION = 0.3
"""Of every group, removed at random."""
ENOUGH = 0.3
"""Of the parameters; a network that loses less is tried again with the channels that are cut inexactly."""
LARGE = 150_000_000
"""Parameters above which a network is compared in single precision."""
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Of the difference between masked and shrunk, relative to the largest value of each output."""

Row = dict[str, Any]


# One network, in its own process.


def measure(network: Row, inexact: bool) -> Row:
    """Analyse, cut and compare one network; what goes wrong is part of the result."""
    row: Row = {"family": network["family"], "name": network["name"], "mode": "inexact" if inexact else "exact"}
    torch.set_num_threads(1)
    try:
        model, example = build(network)
        row["params"] = count_params(model)
        row["memory_before_mb"] = peak_memory()
        secateur.analyze(nn.Conv2d(1, 1, 1), torch.zeros(1, 1, 1, 1))  # what only the first analysis pays for
        _, row["seconds_without_probe"] = timed(lambda: secateur.analyze(model, example, inexact=inexact, probe=False))
        graph, row["seconds"] = timed(lambda: secateur.analyze(model, example, inexact=inexact))
        row["memory_mb"] = peak_memory()
        row |= describe(model, graph)
        plan = secateur.Plan.random(graph, FRACTION, SEED)
        row["params_removed"] = 1 - plan.cost.params / graph.params
        row["macs_removed"] = 1 - plan.cost.macs / max(1, graph.macs)
        row |= compare(model, plan, example, network["family"] == "tv_det")
    except Exception as error:  # a network that fails is a row like any other
        row |= {"outcome": "failed", "error": shorten(f"{type(error).__name__}: {error}", 300)}
    return {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in row.items()}


def build(network: Row) -> tuple[nn.Module, Any]:
    """The network with random weights and statistics, in evaluation mode, and an input for it."""
    torch.manual_seed(SEED)
    source = SOURCES.get(network["family"], "torchvision")
    model = find_model(f"{source}:{network['name']}", **network["kwargs"]).eval()
    example = example_for(model, tuple(network["input"]))
    randomise_(model, example)
    return model, example


@torch.no_grad()
def randomise_(model: nn.Module, example: Any) -> None:
    """Leave nothing constant that could hide a wrong cut: zero branches, small layer scales, fresh batch norms.

    The random statistics are of the scale of what each norm sees, so that values neither vanish nor explode.
    """
    for parameter in model.parameters():
        if bool((parameter == parameter.flatten()[0]).all()):
            # Of either sign: values that all add up would drown a small difference.
            parameter.uniform_(0.1, 0.5).mul_(torch.randint_like(parameter, 2) * 2 - 1)
    for buffer in model.buffers():
        if buffer.dim() == 1 and buffer.dtype == torch.long and not bool(buffer.any()):
            buffer.copy_(torch.randperm(len(buffer)))  # which channels to take: else all would be the first
    handles = {}

    def rescale(norm: Any, inputs: tuple[Tensor, ...]) -> None:
        handles.pop(norm).remove()
        scale = inputs[0].square().mean().clamp_min(1e-12)
        norm.running_mean.mul_(scale.sqrt())
        norm.running_var.mul_(scale)

    for norm in model.modules():
        # Whatever keeps running statistics: batch norms and their frozen look-alikes.
        if isinstance(getattr(norm, "running_mean", None), Tensor):
            norm.running_mean.normal_(0, 0.3)
            norm.running_var.uniform_(0.5, 1.5)
            if isinstance(norm.weight, Tensor):
                norm.weight.uniform_(0.5, 1.5)
                norm.bias.normal_(0, 0.3)
            handles[norm] = norm.register_forward_pre_hook(rescale)
    call(model, example)
    for handle in handles.values():
        handle.remove()


def call(model: nn.Module, example: Any) -> Any:
    """Run the model on a copy of a tensor, or of a tuple of arguments: some models write into their input.

    Some draw noise, too, which is the same in every call.
    """
    torch.manual_seed(SEED)
    example = tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, example)
    return model(*example) if isinstance(example, tuple) else model(example)


def describe(model: nn.Module, graph: secateur.ChannelGraph) -> Row:
    """How much of the network can be removed, and why the rest must stay."""
    convolutions = free = 0
    for name, module in model.named_modules():
        axis = 1 if getattr(module, "transposed", False) else 0
        if isinstance(module, _ConvNd) and f"{name}.weight" in graph.shapes:
            convolutions += module.weight.shape[axis]
            channels = graph.axes.get((f"{name}.weight", axis))
            free += 0 if channels is None else int((channels >= 0).sum())
    stays: dict[str, Row] = {}
    for frozen in graph.frozen:
        entry = stays.setdefault(plain(str(frozen.reason)), {"filters": 0, "layers": []})
        entry["filters"] += frozen.size
        entry["layers"].append(frozen.name)
    return {
        "macs": graph.macs,
        "groups": len(graph.groups),
        "filters": graph.num_filters,
        "free_filters": graph.num_free_filters,
        "convolution_filters": convolutions,
        "free_convolution_filters": free,
        "stays": [
            {"reason": reason, "filters": entry["filters"], "layers": len(entry["layers"]), "first": entry["layers"][0]}
            for reason, entry in sorted(stays.items(), key=lambda item: -item[1]["filters"])
        ],
        "notes": [shorten(note, 200) for note in graph.notes],
    }


def compare(model: nn.Module, plan: secateur.Plan, example: Any, detector: bool) -> Row:
    """Masked against shrunk: the largest difference, and whether it is small enough for what was compared."""
    dtype = torch.float32 if count_params(model) > LARGE or not runs_in_double(model, example) else torch.float64
    model, example = model.to(dtype), cast(example, dtype)
    whole = outputs(model, example, detector)
    masked = outputs(mask(model, plan), example, detector)
    shrunk_model = secateur.shrink(model, plan)
    shrunk = outputs(shrunk_model, example, detector)
    row: Row = {"dtype": str(dtype).removeprefix("torch."), "compared": sum(tensor.numel() for tensor in masked)}
    shapes = [[tuple(tensor.shape) for tensor in tensors] for tensors in (whole, masked, shrunk)]
    if shapes[1] != shapes[2] or (shapes[0] != shapes[2] and not detector):
        return row | {"outcome": "failed", "error": f"output shapes {shapes[2]} instead of {shapes[1]}"}
    if not all(bool(tensor.isfinite().all()) for tensor in (*masked, *shrunk)):
        return row | {"outcome": "failed", "error": "the outputs are not finite"}
    row["difference"] = relative_difference(masked, shrunk)
    # A detector may look at other boxes once it is masked: an effect beyond measure.
    row["effect"] = relative_difference(whole, masked) if shapes[0] == shapes[1] else 1.0
    tolerance = TOLERANCES[dtype]
    if count_params(shrunk_model) != plan.cost.params:
        error = f"{count_params(shrunk_model)} parameters are left, the plan has {plan.cost.params}"
    elif not masked or not all(tensor.numel() for tensor in masked):
        error = "an output is empty: nothing to compare"
    elif not plan.exact:
        return row | {"outcome": "inexact"}
    elif not row["difference"] <= tolerance:
        error = f"masked and shrunk differ by {row['difference']:.1e}"
    elif not plan.groups:
        return row | {"outcome": "uncut"}
    elif not row["effect"] > tolerance:
        error = "masking changes nothing: the comparison is empty"
    else:
        return row | {"outcome": "exact"}
    return row | {"outcome": "failed", "error": error}


def cast(example: Any, dtype: torch.dtype) -> Any:
    """The example with its fractions in that precision."""

    def change(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return tree_map(change, example)


@torch.no_grad()
def runs_in_double(model: nn.Module, example: Any) -> bool:
    """Whether the code leaves the precision to its input."""
    try:
        call(copy.deepcopy(model).double(), cast(example, torch.float64))
    except RuntimeError:
        return False
    return True


@torch.no_grad()
def mask(model: nn.Module, plan: secateur.Plan) -> nn.Module:
    """A copy with zeros in every slice that the plan removes, but for those that only consume."""
    masked = copy.deepcopy(model)
    tensors = {**dict(masked.named_buffers()), **dict(masked.named_parameters())}
    for name, axis, removed, role in plan.slices():
        if role != "consumes":
            tensors[name].index_fill_(axis, torch.tensor(removed), 0)
    return masked


@torch.no_grad()
def outputs(model: nn.Module, example: Any, detector: bool) -> list[Tensor]:
    """Every tensor that the model returns; of a detector, what its heads return, before boxes are chosen."""
    if not detector:
        return [tensor for tensor in tree_leaves(call(model, example)) if isinstance(tensor, Tensor)]
    with recorded(list(heads(model))) as found:
        call(model, example)
    return found


def heads(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of a detector that answer: of siblings the predictors, or where there are none the heads."""
    for parent in model.modules():
        for kind in ("Predictor", "Head"):
            found = [child for child in parent.children() if type(child).__name__.endswith(kind)]
            yield from found
            if found:
                break


@contextmanager
def recorded(modules: list[nn.Module]) -> Iterator[list[Tensor]]:
    """A list that collects what these modules return, in order."""
    found: list[Tensor] = []

    def record(module: nn.Module, inputs: Any, output: Any) -> None:
        found.extend(tensor.clone() for tensor in tree_leaves(output) if isinstance(tensor, Tensor))

    handles = [module.register_forward_hook(record) for module in modules]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def relative_difference(expected: list[Tensor], got: list[Tensor]) -> float:
    """The largest difference of any two values, relative to the largest value of their tensor."""
    pairs = [(a, b) for a, b in zip(expected, got, strict=True) if a.numel()]
    return max((float((a - b).abs().max() / a.abs().max().clamp_min(1e-30)) for a, b in pairs), default=0.0)


def count_params(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """The result and the CPU seconds it took."""
    start = time.process_time()
    return work(), time.process_time() - start


def peak_memory() -> float:
    """The most memory this process has held so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def plain(reason: str) -> str:
    """A reason without the places and numbers that differ from layer to layer, short enough for a table."""
    reason = re.sub(r" \(in [\w.]+\)", "", reason)
    reason = re.sub(r": [\dx]+, made .*", "", reason)
    reason = re.sub(r"(uses a fixed size: \w+): .* at (\S+\.py:\d+)", r"\1 at \2", reason)
    reason = re.sub(r"changes the result by [\d.]+e[-+]\d+", "changes the result", reason)
    return shorten(reason, 160)


def shorten(text: str, length: int) -> str:
    """The text in one line, its middle left out where it is too long."""
    text = " ".join(text.split())
    half = (length - 5) // 2
    return text if len(text) <= length else f"{text[:half]} ... {text[-half:]}"


# All networks.


def run(network: Row, inexact: bool, timeout: float) -> Row:
    """Measure a network in a process of its own, which may run out of time or memory."""
    command = [sys.executable, "-W", "ignore", __file__, "--worker", *(["--inexact"] if inexact else [])]
    failed = {"family": network["family"], "name": network["name"], "mode": "inexact" if inexact else "exact"}
    failed["outcome"] = "failed"
    try:
        done = subprocess.run(
            command,
            input=json.dumps(network),
            capture_output=True,
            text=True,
            timeout=timeout,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    except subprocess.TimeoutExpired:
        return {**failed, "error": f"takes more than {timeout:.0f} s"}
    if done.returncode:
        return {**failed, "error": shorten(f"exit status {done.returncode}: {done.stderr}", 300)}
    return json.loads(done.stdout.splitlines()[-1])


def cover(network: Row, timeout: float) -> list[Row]:
    """One row for the exact cut, and one for the inexact cut where the exact one leaves much and that one less."""
    exact = run(network, False, timeout)
    if exact["outcome"] == "failed" or exact["params_removed"] >= ENOUGH:
        return [exact]
    inexact = run(network, True, timeout)
    if inexact["outcome"] in ("exact", "uncut") or inexact.get("params_removed", 1) <= exact["params_removed"]:
        return [exact]
    return [exact, inexact]


def load(path: Path) -> list[Row]:
    return json.loads(path.read_text())["rows"] if path.exists() else []


def save(path: Path, rows: list[Row]) -> None:
    """One line per row, so that two versions can be compared."""
    rows.sort(key=lambda row: (row["family"], row["name"], row["mode"]))
    setting = {"fraction": FRACTION, "seed": SEED, "hardware": coverage_report.hardware()}
    lines = ",\n".join(json.dumps(row) for row in rows)
    path.write_text(json.dumps(setting)[:-1] + f', "rows": [\n{lines}\n]}}\n')


def progress(rows: list[Row], done: int, total: int) -> str:
    """What came of one network, in a line."""
    row = rows[0]
    start = f"[{done}/{total}] {row['family']} {row['name']}: "
    if row["outcome"] == "failed":
        return start + f"FAILED {row['error']}"
    text = f"{row['outcome']} {row['difference']:.1e}, {row['params_removed']:.0%} of the parameters removed"
    text += f" ({rows[1].get('params_removed', 0):.0%} inexactly)" if len(rows) > 1 else ""
    return start + text + f", {row['seconds']:.1f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="networks whose name, or family/name, matches")
    parser.add_argument("--limit", type=int, help="at most so many networks")
    parser.add_argument("--resume", action="store_true", help="only networks without a result")
    parser.add_argument("--jobs", type=int, default=1, help="networks at a time, one core each")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one network")
    parser.add_argument("--output", type=Path, default=DOCS, help="folder of coverage.json and coverage.md")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--inexact", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(measure(json.load(sys.stdin), options.inexact)))
        return

    networks = json.loads((HERE / "networks.json").read_text())
    listed = [(network["family"], network["name"]) for network in networks]
    path = options.output / "coverage.json"
    rows = [row for row in load(path) if (row["family"], row["name"]) in listed]
    covered = {(row["family"], row["name"]) for row in rows}
    chosen = [
        network
        for network, key in zip(networks, listed, strict=True)
        if (fnmatchcase(network["name"], options.only) or fnmatchcase("/".join(key), options.only))
        and not (options.resume and key in covered)
    ][: options.limit]
    options.output.mkdir(exist_ok=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        for done, new in enumerate(pool.map(lambda network: cover(network, options.timeout), chosen), 1):
            key = new[0]["family"], new[0]["name"]
            rows = [row for row in rows if (row["family"], row["name"]) != key] + new
            save(path, rows)
            print(progress(new, done, len(chosen)), file=sys.stderr, flush=True)
    (options.output / "coverage.md").write_text(coverage_report.markdown(networks, rows, FRACTION, SEED, ENOUGH))


if __name__ == "__main__":
    main()
