"""Removed channels that are left as zeros to fill up widths: trained so, and cut in the end, nothing has changed."""

import copy
from collections.abc import Callable

import pytest
import torch
from networks import KINDS, Network, every_option, inputs
from oracle import outputs, randomize_, set_mode, tensors_of
from torch import Tensor, nn

import secateur
from secateur import InvalidModel, Plan, Pruner

EXAMPLE = inputs()
Make = Callable[[nn.Module], torch.optim.Optimizer]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, hold: Callable[[], None], steps: int = 4) -> None:
    set_mode(model, "train")
    for _ in range(steps):
        optimizer.zero_grad()
        given = (t.clone() if isinstance(t, Tensor) else t for t in EXAMPLE)
        sum(t.square().mean() for t in tensors_of(model(*given)) if t.is_floating_point()).backward()
        hold()
        optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=0.1, nesterov=True)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, eps=1e-3)


def masked_pruner(network: nn.Module) -> Pruner | None:
    """Every second channel is masked, where masks hold."""
    graph = secateur.analyze(network, EXAMPLE, probe=False)
    try:
        pruner = Pruner(network, graph=graph)
    except InvalidModel:
        return None
    kept = graph.all_kept()
    for group in graph.groups:
        if group.name not in graph.ungated and not pruner.gates.loose(group):
            kept[group.start + max(1, group.at_least) : group.start + group.size : 2] = False
    pruner.kept = kept
    pruner.gates.mask_(kept)
    return pruner


def check(network: Network, seed: int, make: Make) -> int:
    """How many channels were left as zeros while both were trained."""
    randomize_(network, seed)
    small = copy.deepcopy(network)
    pruner = masked_pruner(network)
    if pruner is None:
        return 0
    secateur.shrink_(small, Plan(pruner.graph, pruner.kept))
    pruner.cut_(multiple_of=4)
    pruner.merge_()
    filled = int((pruner.gates.present.kept & ~pruner.kept).sum())
    train(network, make(network), pruner.hold_)
    train(small, make(small), lambda: None)
    pruner.finish()
    assert pruner.finish() is network  # once more does nothing
    left, wanted = ([(n, t.shape) for n, t in model.state_dict().items()] for model in (network, small))
    assert left == wanted
    for mode in ("train", "eval"):
        for a, b in zip(outputs(small, EXAMPLE, mode), outputs(network, EXAMPLE, mode), strict=True):
            torch.testing.assert_close(b, a, rtol=1e-8, atol=1e-8)
    return filled


def test_training_that_does_not_hold_them_is_noticed() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(2, 9, 3), nn.BatchNorm2d(9), nn.SiLU(), nn.Conv2d(9, 2, 1)).double()
    images = torch.randn(4, 2, 6, 6, dtype=torch.float64)
    pruner = Pruner(network, images)
    pruner.kept[4:] = False
    pruner.gates.mask_(pruner.kept)
    pruner.merge_()
    optimizer = sgd(network)
    network(images).square().mean().backward()
    optimizer.step()
    with pytest.raises(InvalidModel, match=r"training has woken channels that were removed: call hold_\(\)"):
        pruner.finish()


@pytest.mark.parametrize("kind", KINDS)
def test_every_block(kind: str) -> None:
    option, network = next(iter(every_option(kind)))
    filled = check(network, option, sgd)
    assert filled or kind == "pixels"  # there every group is whole, or cut at once


@pytest.mark.slow
@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("kind", KINDS)
def test_every_option(kind: str, make: Make) -> None:
    for option, network in every_option(kind):
        check(network, option, make)
