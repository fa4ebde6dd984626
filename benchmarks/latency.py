"""Time that pruning saves: by MACs, by MACs with aligned widths, by time, and by time with whole blocks.

python benchmarks/latency.py --networks torchvision:resnet50               through onnxruntime on the CPU
python benchmarks/latency.py --networks resnet56 --device cuda --batch 64  bf16, channels last
python benchmarks/latency.py --networks torchvision:resnet50 --device cuda --batch 64 --weights F --photos F

One JSON file for each network goes to results/latency; benchmarks/latency_page.py makes the pages from them.

weights, photos: as for benchmarks/pretrained.py; with them the network is trained, filters are ranked by their Taylor
score, and every cut network is repaired and tested.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from coverage_report import hardware
from pretrained import PACKAGES, Pretrained, load
from torch import Tensor, nn
from torchvision.transforms.v2 import functional as pictures

import secateur
from secateur.data.decode import read_photo
from secateur.data.folders import CLASS_FOLDERS
from secateur.errors import UnreachableBudget
from secateur.models.lookup import find_model
from secateur.pruning.latency import LatencyTable
from secateur.pruning.selection import Target, best_widths, check_reachable, ranked, select
from secateur.results.bench import Runner, runner
from secateur.timing import time_in_turn

OUT = Path(__file__).parent.parent / "results" / "latency"
SHARES = (0.75, 0.6, 0.45)
"""Of the MACs, or of the time."""
SCORED = 1000
"""Photographs that score and repair; the others test."""
REPAIRED = 512
"""Those of them that repair."""
BATCH = 100


def multiple_on(device: torch.device) -> int:
    """What widths are aligned to: onnxruntime computes 16 channels at a time where the CPU has AVX-512."""
    x86 = platform.machine() in ("x86_64", "AMD64")
    return 8 if device.type == "cuda" else 16 if x86 else 4


class Cutter:
    """A network, the importance of its channels and branches, and its times."""

    def __init__(self, graph: secateur.ChannelGraph, scores: Tensor, branches: Tensor, table: LatencyTable) -> None:
        self.graph, self.scores, self.branches, self.table = graph, scores, branches, table

    def by_macs(self, share: float, multiple: int) -> Tensor:
        whole, floors = self.graph.all_kept(), secateur.Limits(multiple_of=multiple).floors(self.graph)
        target = Target(secateur.Budget(macs=share), self.graph)
        check_reachable(target, floors)
        worth = ranked(self.graph, whole, self.scores, "score_per_mac")
        return select(self.graph, whole, worth, floors, multiple_of=multiple, target=target)

    def by_time(self, share: float, multiple: int, blocks: bool) -> Tensor:
        whole = self.graph.all_kept()
        limits = secateur.Limits(multiple_of=multiple, branches="always" if blocks else "never")
        target, floors = Target(secateur.Budget(latency=share), self.graph, self.table), limits.floors(self.graph)
        may_go = limits.removable(self.graph, None)
        check_reachable(target, floors, multiple, may_go)
        lost = {b.name: float(s) for b, s in zip(self.graph.branches, self.branches, strict=True) if b in may_go}
        widths, gone = best_widths(target, whole, self.scores, floors, multiple, lost)
        gone = dict.fromkeys(gone, 0.0)
        return select(self.graph, whole, self.scores, widths, multiple_of=multiple, branches=gone)

    def at_equal_time(self, share: float, multiple: int, blocks: bool) -> Tensor:
        """By time, as fast as the aligned network with that share of the MACs.

        Where that one is not faster than the whole network, that share of the time.
        """
        left = self.left(self.by_macs(share, multiple))
        return self.by_time(left if left < 0.98 else share, multiple, blocks)

    def left(self, kept: Tensor) -> float:
        """The share of the time, by the table."""
        return self.table.value(self.graph, kept) / self.table.value(self.graph, self.graph.all_kept())

    def cuts(self, multiple: int, shares: Sequence[float]) -> Iterator[tuple[str, float, Callable[[], Tensor]]]:
        """The ways to cut the network: what they are called, the share, and what is kept."""
        for share in shares:
            yield "macs", share, lambda share=share: self.by_macs(share, 1)
            yield "aligned", share, lambda share=share: self.by_macs(share, multiple)
            for kind, blocks in (("time", False), ("blocks", True)):
                yield kind, share, lambda share=share, blocks=blocks: self.at_equal_time(share, multiple, blocks)
            yield "budget", share, lambda share=share: self.by_time(share, multiple, True)


class Photographs:
    """Photographs as they are given to a network, some to score and repair with, the others to test."""

    def __init__(self, folder: Path, network: Pretrained, device: torch.device) -> None:
        paths = CLASS_FOLDERS.images_below(folder)
        order = torch.randperm(len(paths), generator=torch.Generator().manual_seed(0)).tolist()
        transform, as_it_is = network.transform(), replace(network, resize=network.size).transform()

        def read(number: int) -> Tensor:
            image: Any = read_photo(paths[number], CLASS_FOLDERS)
            image = image.movedim(2, 0) if isinstance(image, Tensor) else image
            fits = set(pictures.get_size(image)) == {network.size}
            return (as_it_is if fits else transform)(image)

        with ThreadPoolExecutor(8) as pool:
            images = torch.stack(list(pool.map(read, order)))
        self.images = images.to(device)
        self.labels = torch.tensor([int(Path(paths[n]).parent.name) for n in order], device=device)

    def some(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.images[:SCORED].split(BATCH), self.labels[:SCORED].split(BATCH), strict=True)

    @torch.inference_mode()
    def top1(self, model: nn.Module) -> float:
        """In percent of those that test."""
        images, labels = self.images[SCORED:], self.labels[SCORED:]
        found = [model(part).argmax(1) for part in images.split(BATCH)]
        return 100 * float((torch.cat(found) == labels).float().mean())


def importance(model: nn.Module, graph: secateur.ChannelGraph, photos: Photographs | None) -> tuple[Tensor, Tensor]:
    """The scores of channels and of branches: Taylor over photographs, or the L1 norm of filters."""
    pruner = secateur.Pruner(deepcopy(model), graph=graph, score="taylor" if photos is not None else "l1")
    for images, labels in photos.some() if photos is not None else ():
        pruner.model.zero_grad()
        F.cross_entropy(pruner.model(images), labels).backward()
        pruner.observe()
    scores = pruner.score.end().double()
    return scores, pruner.score.branches(scores, graph.all_kept())


def measure(name: str, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """All about one network."""
    torch.manual_seed(0)
    on_gpu, short = device.type == "cuda", name.rpartition(":")[2]
    trained = load(short, options.weights) if options.weights and short in PACKAGES else None
    model = (trained.model if trained is not None else find_model(name)).eval()
    size, batch = options.size, options.batch
    precision = torch.bfloat16 if on_gpu else torch.float32
    layout = torch.channels_last if on_gpu else torch.contiguous_format
    runners: list[Runner] = options.runners or (["captured", "eager"] if on_gpu else ["onnxruntime"])
    batched = torch.randn(batch, 3, size, size, device=device)
    graph = secateur.analyze(model, torch.randn(1, 3, size, size))
    photos = Photographs(options.photos, trained, device) if trained is not None else None
    started = time.perf_counter()
    where = options.tables / f"{device.type}_{batch}_{size}_{runners[0]}_{short}.json"
    if where.is_file():
        table = LatencyTable.from_dict(json.loads(where.read_text()))
    else:
        table = secateur.measure_latency(
            model.to(device),
            batched,
            precision=precision,
            channels_last=on_gpu,
            run=lambda network, call: runner(network, call, runners[0]),
            graph=graph,
            multiple_of=multiple_on(device),
            progress=lambda text: print(name, text, flush=True),
        )
        where.parent.mkdir(parents=True, exist_ok=True)
        where.write_text(json.dumps(table.to_dict()))
    print(f"{name}: times measured in {time.perf_counter() - started:.0f} s", flush=True)
    multiple = multiple_on(device)
    cutter = Cutter(graph, *importance(model.to(device), graph, photos), table)
    kept: dict[str, Tensor] = {"whole": graph.all_kept()}
    rows: dict[str, dict[str, Any]] = {"whole": {"kind": "whole", "share": 1.0}}
    missing = []
    for kind, share, cut in cutter.cuts(multiple, options.shares):
        try:
            kept[f"{kind} {share}"] = cut()
            rows[f"{kind} {share}"] = {"kind": kind, "share": share}
        except UnreachableBudget as error:
            missing.append(f"{kind} {share:.0%}: {str(error).partition('. ')[0]}")
    images = batched.to(precision).contiguous(memory_format=layout)
    networks = {}
    for label, row in rows.items():
        plan = secateur.Plan(graph, kept[label])
        row |= {
            "macs": plan.cost.macs / graph.macs,
            "params": plan.cost.params / graph.params,
            "kept": float(cutter.scores[kept[label]].sum() / cutter.scores.sum()),
            "branches": len(plan.without),
            "table": cutter.left(kept[label]),
        }
        network = secateur.shrink(model, plan)
        if photos is not None:
            if label != "whole":
                network = secateur.repair(model, plan, photos.some(), images=REPAIRED)
            row["top1"] = photos.top1(network)
            print(name, label, f"top-1 {row['top1']:.2f}", flush=True)
        networks[label] = network.to(device, precision).to(memory_format=layout)  # pyright: ignore
    model.to("cpu")
    for how in runners:
        chosen = networks
        if how == "compiled":
            chosen = {
                label: net for label, net in networks.items() if rows[label]["kind"] in ("whole", "aligned", "blocks")
            }
            chosen = {label: net for label, net in chosen.items() if rows[label]["share"] in (1.0, 0.6)}
        calls = {label: runner(network, images, how) for label, network in chosen.items()}
        seconds = time_in_turn(calls, device, options.repetitions)
        for label, values in seconds.items():
            quartiles = statistics.quantiles(values, n=4)
            rows[label].setdefault("ms", {})[how] = 1000 * quartiles[1]
            rows[label].setdefault("spread", {})[how] = (quartiles[2] - quartiles[0]) / 2 / quartiles[1]
        del calls
        print(
            name, how, {label: round(row["ms"][how], 3) for label, row in rows.items() if how in row["ms"]}, flush=True
        )
    where_run = f"{torch.cuda.get_device_name()}, {hardware()}" if on_gpu else hardware()
    return {
        "network": name,
        "weights": "trained" if trained is not None else "random",
        "where": where_run,
        "device": device.type,
        "batch": batch,
        "size": size,
        "multiple": multiple,
        "repetitions": options.repetitions,
        "tested": len(photos.labels) - SCORED if photos is not None else 0,
        "rows": list(rows.values()),
        "missing": missing,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", required=True, help="by name")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--batch", type=int, default=1, help="images at a time")
    parser.add_argument("--size", type=int, default=224, help="height and width of the images")
    parser.add_argument("--shares", nargs="+", type=float, default=SHARES, help="of the MACs, or of the time")
    parser.add_argument("--runners", nargs="+", help="ways to run; layers are timed as the first one runs")
    parser.add_argument("--repetitions", type=int, default=20, help="timed passes of each network")
    parser.add_argument("--weights", type=Path, help="folder of packages with trained weights")
    parser.add_argument("--photos", type=Path, help="folder of photographs by class")
    parser.add_argument("--tables", type=Path, default=OUT / "tables", help="where times of layers are kept")
    parser.add_argument("--out", type=Path, default=OUT, help="where the files go")
    options = parser.parse_args()
    if (options.weights is None) != (options.photos is None):
        parser.error("--weights and --photos go together")
    if options.runners and options.runners[0] == "compiled":
        parser.error("the first of --runners runs all networks, and only few are compiled")
    options.out.mkdir(parents=True, exist_ok=True)
    device = torch.device(options.device)
    for name in options.networks:
        found = measure(name, options, device)
        path = options.out / f"{device.type}_{options.batch}_{name.rpartition(':')[2]}.json"
        path.write_text(json.dumps(found, indent=1))
        print(f"written to {path}", flush=True)


if __name__ == "__main__":
    main()
