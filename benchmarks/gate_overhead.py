"""What gates cost: the time of a training step with them beside one without.

python benchmarks/gate_overhead.py [--pairs 15]

ResNet-20 at 32 x 32, batch 64, one thread. A step is forward, loss, backward and SGD; with gates also `observe` and the
L1 term, as in a Tock. The contestants take turns. A Tick trains only gates and the last layer; it is for information.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F
from coverage_report import hardware
from torch import Tensor, nn

from secateur import Pruner
from secateur.models.resnet_cifar import resnet20

GOAL = 1.10


def plain_step(images: Tensor, labels: Tensor) -> Callable[[], None]:
    model = resnet20()
    return step_of(model, images, labels)


def gated_step(images: Tensor, labels: Tensor, tick: bool) -> Callable[[], None]:
    model = resnet20()
    pruner = Pruner(model, images[:1])
    if tick:
        trained = {id(phi) for phi in pruner.gates.phis}
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(id(parameter) in trained or name in pruner.graph.final)

    def note() -> None:
        pruner.observe()
        if not tick:
            pruner.add_l1_(1e-3)

    return step_of(model, images, labels, note)


def step_of(
    model: nn.Module, images: Tensor, labels: Tensor, note: Callable[[], None] = lambda: None
) -> Callable[[], None]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.01, momentum=0.9, weight_decay=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        note()
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15, help="repetitions of each")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, labels = torch.randn(64, 3, 32, 32), torch.randint(10, (64,))
    steps = {
        "plain": plain_step(images, labels),
        "gated": gated_step(images, labels, tick=False),
        "tick": gated_step(images, labels, tick=True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(options.pairs + 2):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if repeat >= 2:
                seconds[name].append(time.perf_counter() - start)
    medians = {name: median(values) for name, values in seconds.items()}
    print(f"{hardware()}; one thread; pairs n = {options.pairs}; medians")
    for name, value in medians.items():
        print(f"{name:6} {1000 * value:7.1f} ms   {value / medians['plain']:.3f} of plain")
    each = median(g / p for g, p in zip(seconds["gated"], seconds["plain"], strict=True))
    print(
        f"gated / plain {medians['gated'] / medians['plain']:.3f} (median of pairs {each:.3f}), goal at most {GOAL:.2f}"
    )


if __name__ == "__main__":
    main()
