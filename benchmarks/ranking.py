"""Which score ranks channels most like the oracle does: Spearman correlation on a small network.

python benchmarks/ranking.py                   5 seeds, into docs/ranking.md
python benchmarks/ranking.py --seeds 2         printed only
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean

import torch
import torch.nn.functional as F
from coverage_report import hardware
from sklearn.datasets import load_digits
from torch import Tensor, nn

from secateur import analyze, insert_gates_
from secateur.pruning.scores import Oracle, Random, Score, make_score

DOCS = Path(__file__).parent.parent / "docs"
SEEDS = 5
METHOD = """Spearman rank correlation, mean (least to greatest) over seeds. A plain network of four convolutions with
batch norm, 96 channels, is trained for 10 epochs on scikit-learn's digits. The oracle is the size of the change of the
loss on held-out images when a channel is zeroed; all channels of the network are one ranking. Scores see the training
set in batches of 64 with nothing trained, once with batch norm in training mode, as in a Tick, and once in evaluation
mode; so does the oracle see the held-out images."""
NAMES = ("taylor", "slim", "l1", "l2", "fpgm", "apoz", "pcnn", "random")
MODES = ("train", "eval")
BATCH = 64
EPOCHS = 10
HELD_OUT = 384


def network() -> nn.Sequential:
    def block(inner: int, outer: int) -> list[nn.Module]:
        return [nn.Conv2d(inner, outer, 3, padding=1, bias=False), nn.BatchNorm2d(outer), nn.ReLU()]

    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)]
    return nn.Sequential(*block(1, 16), *block(16, 16), nn.MaxPool2d(2), *block(16, 32), *block(32, 32), *head)


def digits(seed: int) -> tuple[Tensor, Tensor]:
    """Images and labels, shuffled."""
    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8)
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(seed))
    return ((pixels - pixels.mean()) / pixels.std())[order], torch.tensor(labels)[order]


def train(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    for _ in range(EPOCHS):
        for part in torch.randperm(len(images)).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(images[part]), labels[part]).backward()
            optimizer.step()
        schedule.step()


def ranks(values: Tensor) -> Tensor:
    """From 1, with ties averaged."""
    _, place, counts = torch.unique(values, return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1) / 2)[place].double()


def spearman(values: Tensor, others: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([ranks(values), ranks(others)]))[0, 1])


def correlations(seed: int) -> tuple[float, dict[str, float]]:
    """Accuracy of one network on the held-out images, and for score, its mode and the oracle's the correlation."""
    torch.manual_seed(seed)
    images, labels = digits(seed)
    held_images, held_labels = images[:HELD_OUT], labels[:HELD_OUT]
    images, labels = images[HELD_OUT:], labels[HELD_OUT:]
    model = network()
    train(model, images, labels)
    model.eval()
    with torch.no_grad():
        accuracy = float((model(held_images).argmax(1) == held_labels).float().mean())
    graph = analyze(model, images[:1])
    gates = insert_gates_(model, graph)
    statistics = [tensor.clone() for tensor in model.buffers()]

    def loss(model: nn.Module) -> Tensor:
        parts = zip(held_images.split(BATCH), held_labels.split(BATCH), strict=True)
        return sum((F.cross_entropy(model(a), b) for a, b in parts), torch.zeros(()))

    oracles, found = {}, {}
    for mode in MODES:
        oracle = Oracle(loss)
        oracle.begin(gates)
        model.train(mode == "train")
        oracles[mode] = oracle.end()
        restore_(model, statistics)
    for mode in MODES:
        scores: dict[str, Score] = {name: Random(seed) if name == "random" else make_score(name) for name in NAMES}
        for score in scores.values():
            score.begin(gates)
        model.train(mode == "train")
        for part in torch.randperm(len(images)).split(BATCH):
            model.zero_grad()
            F.cross_entropy(model(images[part]), labels[part]).backward()
            for score in scores.values():
                score.observe()
        for name, score in scores.items():
            values = score.end()
            for judge, truth in oracles.items():
                found[f"{name}/{mode}/{judge}"] = spearman(values, truth)
            score.close()
        restore_(model, statistics)
    return accuracy, found


@torch.no_grad()
def restore_(model: nn.Module, statistics: list[Tensor]) -> None:
    for tensor, before in zip(model.buffers(), statistics, strict=True):
        tensor.copy_(before)


def report(results: list[dict[str, float]]) -> str:
    """Mean, least and greatest over the seeds."""
    lines = [f"| score | its batch norm | {' | '.join(f'oracle in {mode} mode' for mode in MODES)} |"]
    lines.append("|---|---|---:|---:|")
    for name in NAMES:
        for mode in MODES if name in ("taylor", "pcnn", "apoz") else MODES[:1]:
            cells = []
            for judge in MODES:
                values = [result[f"{name}/{mode}/{judge}"] for result in results]
                cells.append(f"{mean(values):.2f} ({min(values):.2f} to {max(values):.2f})")
            shown = mode if name in ("taylor", "pcnn", "apoz") else "-"
            lines.append(f"| {name} | {shown} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many networks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measured value there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs = [correlations(seed) for seed in range(options.seeds)]
    accuracies = [accuracy for accuracy, _ in runs]
    page = f"""# Which score ranks like the oracle

Made by `make ranking` (`python benchmarks/ranking.py`) on {hardware()}; n = {options.seeds} seeds.

{METHOD}
Held-out accuracy {min(accuracies):.3f} to {max(accuracies):.3f}.

{report([found for _, found in runs])}
"""
    print(page)
    if options.seeds == SEEDS:
        (DOCS / "ranking.md").write_text(page)
    if options.json:
        data = [{"seed": seed, "accuracy": accuracy, **found} for seed, (accuracy, found) in enumerate(runs)]
        options.json.write_text(json.dumps({"hardware": hardware(), "runs": data}, indent=1) + "\n")


if __name__ == "__main__":
    main()
