"""Time and memory of one repair: ResNet-50 at 224 pixels, random weights, a fifth of its channels removed.

python benchmarks/repair_speed.py --device cuda
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Iterator
from typing import Any

import torch

from secateur import Plan, analyze, repair
from secateur.models.lookup import find_model
from secateur.pruning import repair as module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="torchvision:resnet50")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, default=224)
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.manual_seed(0)
    model = find_model(options.network).eval().to(device)
    images = torch.randn(options.images, 3, options.size, options.size).to(device)
    plan = Plan.random(analyze(model, images[:1]), 0.2)

    def allocated(peak: bool) -> float:
        """GiB; of a CPU only the peak of the process is known."""
        if device.type == "cuda":
            return (torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()) / 2**30
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

    before, held = allocated(peak=False), [0.0]
    with torch.no_grad():
        model(images[: options.batch])
    print(f"a forward pass of {options.batch} images: {allocated(peak=True) - before:.2f} GiB")
    run = module.side_by_side

    def watched(*given: Any) -> Iterator[Any]:
        for pairs in run(*given):
            held.append(allocated(peak=False))
            yield pairs

    module.side_by_side = watched  # pyright: ignore
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    repair(model, plan, images.split(options.batch), images=options.images)
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    print(
        f"a repair with {options.images} images: {seconds:.1f} s, {allocated(peak=True) - before:.2f} GiB at its peak"
    )
    if device.type == "cuda":
        print(f"of these, held by all batches while they wait at a layer: {max(held) - before:.2f} GiB")


if __name__ == "__main__":
    main()
