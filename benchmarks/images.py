"""How fast photographs become batches, and a ResNet-50 trains on them, beside loops written by hand.

python benchmarks/images.py --photos FOLDER                       reading alone: ours beside torchvision's transforms
python benchmarks/images.py --photos FOLDER --device cuda         and Ticks, Tocks and evaluations of ResNet-50
python benchmarks/images.py --labelled FOLDER --weights FILE ...  and the top-1 of torchvision's mobilenet_v2, both ways

Photographs are all images below the folder; a pass has `--images` of them, some more than once. Labelled ones are in a
folder per class, whose name is the number of the class. Prints JSON; docs/performance.md is written from it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from importlib.metadata import version
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import secateur
from secateur.data.arrays import Arrays
from secateur.data.decode import gpu_decoder, read_image
from secateur.data.folders import IMAGES
from secateur.data.maps import compose
from secateur.data.photos import IMAGENET_MEAN, IMAGENET_STD, Photos
from secateur.data.views import Crops, ResizedCrops
from secateur.models.lookup import find_model
from secateur.runs.prune import pruning_phases
from secateur.runs.run import Run
from secateur.training.compiled import Compiled
from secateur.training.engine import Engine

BATCH = 256
FAST = Engine(precision="bf16", channels_last=True, compile="always")


class ByTorchvision(Dataset):
    """Photographs as tutorials read them."""

    def __init__(self, paths: list[str]) -> None:
        from torchvision.transforms import v2

        self.paths = paths
        self.transform = compose(v2.RandomResizedCrop(224), v2.RandomHorizontalFlip())

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Tensor:
        from PIL import Image

        with Image.open(self.paths[index]) as image:
            return self.transform(image.convert("RGB"))


def rate(batches: Iterable[Any], count: int) -> float:
    """Images per second of a pass over so many, starting and stopping included."""
    started = time.perf_counter()
    for _ in batches:
        pass
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return count / (time.perf_counter() - started)


def reading(paths: list[str], workers: int, device: torch.device, repeats: int) -> dict[str, float]:
    """Medians of both ways by turns; the first pass is left out."""
    ours = Photos(paths, [0] * len(paths), IMAGES, ResizedCrops(), 64, shuffle=True, workers=workers).to(device)
    theirs = DataLoader(ByTorchvision(paths), 64, shuffle=True, num_workers=workers)
    ways: dict[str, Iterable[Any]] = {"ours": ours, "DataLoader, Pillow, torchvision": theirs}
    if gpu_decoder(device) is not None:
        ways = {"ours, decoded by the GPU": replace(ours, batch_size=BATCH, channels_last=True)}
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats + 1):
        for name, batches in ways.items():
            found[name].append(rate(batches, len(paths)))
    return {name: median(rates[1:]) for name, rates in found.items()}


def fidelity(folder: Path, weights: Path | None, device: torch.device) -> dict[str, Any]:
    """How the fast way differs from Pillow's: in pixels, and in the top-1 of mobilenet_v2 in single precision."""
    files = [(str(path), int(path.parent.name)) for path in sorted(folder.glob("*/*")) if path.parent.name.isdigit()]
    paths, targets = [path for path, _ in files], [target for _, target in files]
    photos = Photos(paths, targets, IMAGES, Crops(), BATCH).to(device)
    model = find_model("torchvision:mobilenet_v2", weights=None).to(device).eval()
    if weights is not None:
        model.load_state_dict(torch.load(weights, map_location=device, weights_only=True))
    transform = by_pillow()
    right, same, differences = {"ours": 0, "Pillow": 0}, 0, []
    with torch.no_grad():
        for start, (images, labels) in enumerate(photos):
            some = paths[start * BATCH : (start + 1) * BATCH]
            reference = torch.stack([transform(read_image(path, IMAGES)) for path in some]).to(device)
            answers = {"ours": model(images).argmax(1), "Pillow": model(reference).argmax(1)}
            for name, answer in answers.items():
                right[name] += int((answer == labels).sum())
            same += int((answers["ours"] == answers["Pillow"]).sum())
            scale = 255 * torch.tensor(IMAGENET_STD, device=device)[:, None, None]
            differences.append(
                ((images - reference) * scale).abs().round().to(torch.uint8).flatten().bincount(minlength=256)
            )
    levels = torch.stack(differences).sum(0).double().cpu()
    share = levels.cumsum(0) / levels.sum()
    return {
        "images": len(paths),
        "top1": {name: 100 * count / len(paths) for name, count in right.items()} if weights is not None else None,
        "same class": 100 * same / len(paths),
        "mean difference": float((levels * torch.arange(256)).sum() / levels.sum()),
        "largest difference": int(levels.nonzero().max()),
        "within 1, 2, 4 and 8 levels": [round(100 * float(share[level]), 2) for level in (1, 2, 4, 8)],
    }


def by_pillow() -> Callable[[Any], Tensor]:
    """The view of a test, as torchvision computes it."""
    from torchvision.transforms import v2

    return compose(v2.Resize((256, 256)), v2.CenterCrop(224))


def resumes(photos: Photos) -> bool:
    """Whether a pass that starts in the middle has the same batches as one from the beginning."""
    torch.manual_seed(0)
    whole = [images for images, _ in photos]
    torch.manual_seed(0)
    middle = len(whole) // 2
    rest = [batch[0] for _, batch in photos.weighted_from(middle)]
    return len(rest) == len(whole) - middle and all(map(torch.equal, whole[middle:], rest))


class Either:
    """Batches of one source or the other, so that one captured step trains on both."""

    def __init__(self, source: Any) -> None:
        self.source, self.batch_size = source, BATCH

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.source)

    def shard(self, rank: int, world: int) -> Any:
        return self.source.shard(rank, world)


def on_device(count: int) -> Arrays:
    """Images of noise that are already there."""
    images = torch.randint(256, (count, 3, 224, 224), dtype=torch.uint8, device="cuda")
    labels = torch.randint(1000, (count,), device="cuda")
    numbers: dict[str, Any] = {"mean": IMAGENET_MEAN, "std": IMAGENET_STD, "channels_last": True, "drop_last": True}
    return Arrays(images, labels, BATCH, shuffle=True, **numbers)


def resnet50() -> nn.Module:
    torch.manual_seed(0)
    return find_model("torchvision:resnet50", weights=None).cuda()


def plain_steps(arrays: Arrays, compiled: bool) -> Callable[[], float]:
    """Images per second of a training loop as tutorials write it, in bf16 and channels-last."""
    torch.backends.cudnn.benchmark = True
    model = resnet50().to(memory_format=torch.channels_last).train()
    called: Any = torch.compile(model) if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)

    def epoch(batches: Iterable[Any]) -> int:
        count = 0
        for images, labels in batches:
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = F.cross_entropy(called(images), labels)
            loss.backward()
            optimizer.step()
            count += labels.numel()
        torch.cuda.synchronize()
        return count

    epoch(islice(arrays, 3))

    def timed() -> float:
        torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        return epoch(arrays) / (time.perf_counter() - started)

    return timed


def phases(arrays: Arrays, photos: Photos, repeats: int) -> dict[str, float]:
    """Images per second; whatever compiles or captures does so before anything is timed."""
    batches = Either(replace(arrays, images=arrays.images[: 4 * BATCH], labels=arrays.labels[: 4 * BATCH]))
    model = resnet50()
    graph = secateur.analyze(model, torch.randn(1, 3, 224, 224, device="cuda"), probe=False)
    options: dict[str, Any] = {"tick_removes": 0.002, "tick_data": 1.0, "tock_every": 1, "tock_epochs": 2 * repeats + 1}
    settings = secateur.TickTock.of(keep_macs=0.3, **options)
    run = Run(
        settings,
        pruning_phases(settings),
        model,
        secateur.Plan(graph, graph.all_kept()),
        secateur.classification(batches),
        engine=FAST,
        progress=lambda text: print(text, file=sys.stderr),
    )
    events = run.events()
    for _ in range(3):
        next(events)  # the start, a Tick and an epoch of a Tock
    plain = {name: plain_steps(arrays, name == "compiled") for name in ("eager", "compiled")}
    tests = {
        name: secateur.classification([], replace(source, shuffle=False))
        for name, source in (("device", replace(arrays, drop_last=False)), ("files", photos.unaugmented()))
    }
    evaluated = Compiled(resnet50().to(memory_format=torch.channels_last))
    small = secateur.classification([], replace(batches.source, shuffle=False))
    with torch.autocast("cuda", torch.bfloat16):
        small.metrics(evaluated)
    print("timing", file=sys.stderr)
    found = {f"plain loop, {name}": step() for name, step in plain.items()}
    for name, source, count in (("device", arrays, len(arrays) * BATCH), ("files", photos, len(photos.paths))):
        batches.source = source
        seconds = [next(events).seconds for _ in range(repeats)]
        found[f"Tock, {name}"] = count / median(seconds)
        with torch.autocast("cuda", torch.bfloat16):
            passes = []
            for _ in range(repeats):
                started = time.perf_counter()
                tests[name].metrics(evaluated)
                passes.append(count / (time.perf_counter() - started))
        found[f"evaluation, {name}"] = median(passes)
    batches.source = arrays
    found["Tick, device"] = (
        len(arrays) * BATCH / next(event.seconds for event in events if type(event).__name__ == "Tick")
    )
    return found


def memory() -> dict[str, float]:
    """Peak gigabytes of eight steps: a plain loop, and gates with captured steps."""
    arrays, found = on_device(8 * BATCH), {}
    for name in ("plain", "gates, captured"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        if name == "plain":
            plain_steps(arrays, compiled=False)()
        else:
            model = resnet50()
            graph = secateur.analyze(model, torch.randn(1, 3, 224, 224, device="cuda"), probe=False)
            settings = secateur.TickTock.of(keep_macs=0.3, tick_removes=0.002, tock_every=1, tock_epochs=1)
            whole = secateur.Plan(graph, graph.all_kept())
            engine = replace(FAST, compile="never")
            events = Run(
                settings, pruning_phases(settings), model, whole, secateur.classification(arrays), engine=engine
            ).events()
            for _ in range(3):
                next(events)
            events.close()
        found[name] = torch.cuda.max_memory_allocated() / 1e9
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=Path)
    parser.add_argument("--labelled", type=Path)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--images", type=int, default=2_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("-n", "--repeats", type=int, default=3)
    options = parser.parse_args()
    device = torch.device(options.device)
    hardware = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    found: dict[str, Any] = {"hardware": f"{hardware}, torch {version('torch')}"}
    if options.labelled:
        found["fidelity"] = fidelity(options.labelled, options.weights, device)
        print(json.dumps(found), flush=True)
    if options.photos:
        paths = list(islice(cycle(IMAGES.images_below(options.photos)), options.images))
        torch.set_num_threads(1)
        if options.device == "cuda":
            photos = Photos(
                paths, [0] * len(paths), IMAGES, Crops(random=True), BATCH, shuffle=True, channels_last=True
            )
            found["resumes"] = resumes(replace(photos, paths=paths[: 8 * BATCH]).to(device))
            found["memory"] = memory()
            print(json.dumps(found), flush=True)
            found["phases"] = phases(on_device(80 * BATCH), photos.to(device), options.repeats)
        found["reading"] = reading(paths, options.workers, device, options.repeats)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
