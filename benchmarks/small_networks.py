"""Three small networks on a CPU, pruned to 40% of their MACs: ResNet and VGG with batch norm, an FCN without.

python benchmarks/small_networks.py                3 seeds, into docs/small_networks.md
python benchmarks/small_networks.py --seeds 1      printed only
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import torch.nn.functional as F
from coverage_report import hardware
from torch import Tensor, nn

import secateur
from secateur.data.arrays import Arrays
from secateur.data.digits import digits
from secateur.models.fcn import bilinear
from secateur.models.resnet_cifar import CifarResNet
from secateur.models.vgg_cifar import CifarVgg

DOCS = Path(__file__).parent.parent / "docs"
SEEDS, SHARE, EPOCHS = 3, 0.4, 8
BACKGROUND = 10
METHOD = """Each network is trained for 8 epochs on scikit-learn's digits, pruned by Tick-Tock to 40% of its MACs and
fine-tuned for 8 more. The FCN has four convolutions without batch norm, whose gates sit on the filters, and names the
digit of every inked pixel in pictures of two digits; its number is the mean IoU over ten digits and the background,
the others' is accuracy. In percent on the test images, of the last epoch; mean and standard deviation over seeds."""


class SmallFcn(nn.Module):
    """Scores for every pixel at half the resolution, upsampled by a fixed transposed convolution."""

    def __init__(self, num_classes: int = 11) -> None:
        super().__init__()
        widths = (1, 24, 24, 48, 48)
        self.convolutions = nn.ModuleList(nn.Conv2d(*pair, 3, padding=1) for pair in pairwise(widths))
        self.score = nn.Conv2d(widths[-1], num_classes, 1)
        self.register_buffer("upsampling", bilinear(4).expand(num_classes, 1, 4, 4).clone())
        for layer in self.convolutions:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")  # pyright: ignore

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.convolutions):
            x = F.relu(layer(x))
            if number == 1:
                x = F.max_pool2d(x, 2)
        x = self.score(x)
        return F.conv_transpose2d(x, self.upsampling, stride=2, padding=1, groups=x.shape[1])  # pyright: ignore


@dataclass(frozen=True)
class Case:
    """A network, its data and its loss."""

    build: Callable[[], nn.Module]
    task: Callable[[], secateur.Task]
    example: tuple[int, ...]
    lr: float = 0.1


def larger() -> secateur.Task:
    """Digits of 16x16 pixels, which VGG halves four times."""
    train, test = (replace(d, images=d.images.repeat_interleave(2, 2).repeat_interleave(2, 3)) for d in digits())
    return secateur.classification(replace(train, crop=2), test)


def pairs() -> secateur.Task:
    """Two digits side by side, and for every pixel which digit its ink is of."""

    def joined(data: Arrays, seed: int) -> Arrays:
        other = torch.randperm(data.labels.numel(), generator=torch.Generator().manual_seed(seed))
        ink = torch.where(data.images[:, 0] > 0.5, data.labels[:, None, None], BACKGROUND)
        images = torch.cat([data.images, data.images[other]], 3)
        labels = torch.cat([ink, ink[other]], 2)
        return Arrays(images, labels, data.batch_size, shuffle=data.shuffle)

    train, test = digits()
    return secateur.segmentation(joined(train, 0), joined(test, 1), num_classes=11)


CASES = {
    "ResNet-8, width 1/2": Case(
        lambda: CifarResNet(8, in_channels=1, width=0.5), lambda: secateur.classification(*digits()), (1, 1, 8, 8), 0.2
    ),
    "VGG-16-M, width 1/8": Case(lambda: CifarVgg(in_channels=1, width=0.125), larger, (1, 1, 16, 16)),
    "FCN without batch norm": Case(SmallFcn, pairs, (1, 1, 8, 16), 0.3),
}
SETTINGS = secateur.TickTock.of(
    keep_macs=SHARE,
    tick_removes=0.12,
    tock_every=4,
    tock_epochs=2,
    tock_lr=2e-2,
    finetune_epochs=EPOCHS,
    finetune_lr=5e-2,
)


def run(case: Case, seed: int) -> secateur.Result:
    """Train, then prune and fine-tune."""
    torch.manual_seed(seed)
    model, task = case.build(), case.task()
    example = torch.randn(case.example)
    trained = secateur.train(model, example, task, epochs=EPOCHS, lr=case.lr, lr_low=1e-2, seed=seed).model
    return secateur.prune(trained, example, task, settings=SETTINGS.but(seed=seed))


def row(name: str, results: list[secateur.Result]) -> str:
    def cell(values: list[float]) -> str:
        return f"{mean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")

    before = [next(iter(result.metrics_before.values())) for result in results]
    after = [next(iter(result.metrics.values())) for result in results]
    macs = mean(result.after.macs / result.before.macs for result in results)
    params = mean(result.after.params / result.before.params for result in results)
    return f"| {name} | {macs:.1%} | {params:.1%} | {cell(before)} | {cell(after)} |"


def report(results: dict[str, list[secateur.Result]], seeds: int) -> str:
    return "\n".join(
        [
            "# Small networks on a CPU",
            "",
            f"Made by `make small` (`python benchmarks/small_networks.py`) on {hardware()}; n = {seeds} seeds.",
            "",
            METHOD,
            "",
            "| network | MACs left | parameters left | before | after |",
            "|---|---|---|---|---|",
            *(row(name, values) for name, values in results.items()),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many runs of each network")
    options = parser.parse_args()
    results: dict[str, list[Any]] = {name: [] for name in CASES}
    for name, case in CASES.items():
        for seed in range(options.seeds):
            results[name].append(run(case, seed))
            print(row(name, results[name][-1:]), flush=True)
    text = report(results, options.seeds)
    if options.seeds == SEEDS:
        (DOCS / "small_networks.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
