"""What INT8 does to whole and to pruned networks: accuracy, time and size through onnxruntime.

python benchmarks/quantize.py --cifar FOLDER --resnet56 FILE --photos FOLDER --mobilenet FILE --runs FOLDER

resnet56: weights of ResNet-56 for CIFAR-10. mobilenet: weights of torchvision's MobileNetV2. photos: folders of
photographs, named after ImageNet's classes, 0 to 999; of each class two are for pruning and calibration, and the next
two for testing. runs: where pruned networks and numbers are kept; networks that are there are not pruned again, and
the page has the numbers of all. --networks resnet56 measures that one only, and --networks alone only times again.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from coverage_report import hardware
from torch import Tensor, nn

import secateur
from secateur.data.cifar import cifar10
from secateur.data.folders import CLASS_FOLDERS
from secateur.data.photos import Photos
from secateur.data.views import Crops
from secateur.models.lookup import find_model
from secateur.models.weights import load_weights_
from secateur.results.export import export_onnx, fold_batchnorm
from secateur.results.quantize import METHODS, OnnxNetwork, export_int8
from secateur.timing import time_in_turn

PAGE = Path(__file__).parent.parent / "docs" / "quantized.md"
SEED, REPETITIONS = 0, 200
ENDINGS = {"fp32": "onnx", "INT8": "minmax.onnx"}
HEAD = """# INT8 after pruning

Made by `benchmarks/quantize.py` on {where}, onnxruntime {runtime};
seed {seed}, n = 1 run each. The networks are pruned [without training](howto/repair.md), and
[quantised](howto/quantize.md) with 512 training images and `minmax`. ResNet-56 on CIFAR-10 starts from the weights of
the paper's authors, MobileNetV2 on photographs of ImageNet's validation set from torchvision's; to save time, it is
scored with {tick_images} images and repaired with {repair}.

Accuracy is top-1 in percent on the first test images, with its standard error. Times are medians of n = {repetitions}
images one at a time, the networks of one kind by turns, in {threads} threads, on a machine that others used too. "Same
class" is the share of the test images that get the class that the unquantised network gives them.

| network | MACs | numbers | accuracy | same class | ms per image | faster | MB | test images |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""
WAYS = """
## How the range of an activation is chosen

Accuracy after quantisation by each `--int8-method`, on the same test images.

| network | MACs | before | {methods} |
| --- | --- | --- |{lines}
"""


@dataclass(frozen=True)
class Case:
    name: str
    title: str
    share: float
    size: int
    settings: dict[str, int]
    """Of pruning, where they are not the defaults."""


CASES = {
    "resnet56": Case("resnet56", "ResNet-56", 0.5, 32, {}),
    "mobilenet": Case("torchvision:mobilenet_v2", "MobileNetV2", 0.8, 224, {"tick_images": 512, "repair": 256}),
}


def task_of(key: str, options: argparse.Namespace) -> tuple[secateur.Task, int]:
    """The task, with some of the test images, and their number."""
    count = options.images
    if key == "resnet56":
        train, test = cifar10(options.cifar)
        test = replace(test, images=test.images[:count], labels=test.labels[:count])
        return secateur.classification(train, test), len(test.labels)
    train, test = (photos(options.photos, first, shuffle=first == 0) for first in (0, 2))
    test = replace(test, paths=test.paths[:count], targets=(test.targets or [])[:count])
    return secateur.classification(train, test), len(test.paths)


def photos(folder: Path, first: int, *, shuffle: bool) -> Photos:
    """Two photographs of each class, in an order that mixes the classes."""
    found = [(path, int(each.name)) for each in folder.iterdir() for path in sorted(each.iterdir())[first : first + 2]]
    found.sort(key=lambda pair: pair[0].name)
    return Photos([str(path) for path, _ in found], [c for _, c in found], CLASS_FOLDERS, Crops(), 32, shuffle=shuffle)


def prune(model: nn.Module, example: Tensor, task: secateur.Task, case: Case) -> secateur.Result:
    settings = secateur.TickTock.of(keep_macs=case.share, seed=SEED).without_training().but(**case.settings)
    return secateur.prune(model, example, replace(task, evaluate=None), settings=settings, progress=print)


def measure(key: str, options: argparse.Namespace) -> dict[str, Any]:
    """Accuracies of the whole and the pruned network by every method; writes their ONNX files."""
    case = CASES[key]
    task, count = task_of(key, options)
    example = torch.randn(1, 3, case.size, case.size)
    whole, folder = find_model(case.name), options.runs / key
    load_weights_(whole, getattr(options, key))
    if not folder.exists():
        secateur.save(prune(whole.eval(), example, task, case), folder)
    networks = {"100%": whole.eval(), f"{case.share:.0%}": secateur.load(folder, build=partial(find_model, case.name))}
    found: dict[str, dict[str, Any]] = {}
    for label, model in networks.items():
        plain = options.runs / f"{key}-{label}.onnx"
        export_onnx(fold_batchnorm(model, example)[0], example, plain)
        found[label] = {}
        for method in METHODS:
            path = plain.with_suffix(f".{method}.onnx")
            one = export_int8(model, example, task, path, method=method, seed=SEED)  # pyright: ignore
            print(key, label, method, one, sep="\n", flush=True)
            found[label][method] = {
                "before": one.before["accuracy"],
                "after": one.after["accuracy"],
                "agreement": one.agreement,
            }
    return {"count": count, "found": found}


def rows_of(key: str, measured: dict[str, Any], runs: Path) -> tuple[list[str], list[str]]:
    """Rows of the table of networks, which are timed here by turns, and of the table of methods."""
    case, count = CASES[key], measured["count"]
    files = {(label, kind): f"{key}-{label}.{end}" for label in measured["found"] for kind, end in ENDINGS.items()}
    image = torch.randn(1, 3, case.size, case.size)
    calls = {each: partial(OnnxNetwork(runs / file), image) for each, file in files.items()}
    seconds = time_in_turn(calls, torch.device("cpu"), REPETITIONS)
    first, *_ = (statistics.median(times) for times in seconds.values())
    rows, ways = [], []
    for (label, kind), times in seconds.items():
        one, taken = measured["found"][label]["minmax"], statistics.median(times)
        right = one["before" if kind == "fp32" else "after"]
        error = (right * (100 - right) / count) ** 0.5
        same = "" if kind == "fp32" else f"{one['agreement']:.1f}"
        size = (runs / files[label, kind]).stat().st_size / 1e6
        rows.append(
            f"| {case.title} | {label} | {kind} | {right:.1f} ± {error:.1f} | {same} | {1000 * taken:.2f} | "
            f"{first / taken:.2f}x | {size:.2f} | {count} |"
        )
    for label, found in measured["found"].items():
        numbers = [found["minmax"]["before"], *(found[method]["after"] for method in METHODS)]
        ways.append(f"| {case.title} | {label} | {' | '.join(f'{number:.1f}' for number in numbers)} |")
    return rows, ways


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("cifar", "resnet56", "photos", "mobilenet", "runs"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--images", type=int, default=1000, help="test images at most")
    parser.add_argument("--networks", nargs="*", default=list(CASES))
    parser.add_argument("--page", type=Path, default=PAGE, help="where the page goes")
    options = parser.parse_args()
    torch.manual_seed(SEED)
    for key in options.networks:
        (options.runs / f"{key}.json").write_text(json.dumps(measure(key, options)))
    tables = [
        rows_of(key, json.loads(path.read_text()), options.runs)
        for key in CASES
        if (path := options.runs / f"{key}.json").is_file()
    ]
    rows, ways = ([line for part in parts for line in part] for parts in zip(*tables, strict=True))
    head = HEAD.format(
        where=hardware(),
        runtime=onnxruntime.__version__,
        seed=SEED,
        repetitions=REPETITIONS,
        threads=torch.get_num_threads(),
        **CASES["mobilenet"].settings,
    )
    methods = WAYS.format(methods=" | ".join(METHODS), lines=" --- |" * len(METHODS))
    options.page.write_text(head + "\n".join(rows) + "\n" + methods + "\n".join(ways) + "\n")


if __name__ == "__main__":
    main()
