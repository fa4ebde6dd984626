"""The oracle on random networks with gates: masked by gates, cut with them or zeroed by hand, they do the same."""

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import seed as fix_seed
from hypothesis import strategies as st
from networks import KINDS, NETWORKS, Network, every_option, inputs
from oracle import TOLERANCE, outputs, randomize_, set_mode, tensors_of
from torch import Tensor, nn

import secateur
from secateur import ChannelGraph, InvalidModel, Plan, Pruner
from secateur.channels.verify import mask_
from secateur.pruning.gates import Gates

SETTINGS = settings(
    database=None,
    deadline=None,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
)
EXAMPLE = inputs()


def assert_same(model: nn.Module, other: nn.Module, what: str) -> None:
    for mode in ("eval", "train"):
        expected, got = (outputs(copy.deepcopy(m), EXAMPLE, mode) for m in (model, other))
        for a, b in zip(expected, got, strict=True):
            gap, scale = float((a - b).abs().max()), float(a.abs().max())
            assert gap <= TOLERANCE * max(scale, 1e-3), f"{what}: differ by {gap:.1e} of {scale:.1e} in {mode} mode"


def random_kept(graph: ChannelGraph, seed: int, share: float, whole: set[str]) -> Tensor:
    """Each channel goes with this probability, but none of the groups named."""
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(graph.num_channels, generator=generator) >= share
    for group in graph.groups:
        stay = group.size if group.name in whole else group.at_least
        kept[group.start + torch.randperm(group.size, generator=generator)[:stay]] = True
    return kept


def check(network: Network, seed: int, share: float) -> int:
    """Gate a network, mask and cut it at random; the number of channels that gates can switch off."""
    randomize_(network, seed)
    graph = secateur.analyze(network, EXAMPLE, probe=False)
    gated = copy.deepcopy(network)
    try:
        gates = secateur.insert_gates_(gated, graph)
    except InvalidModel:
        assert all(group.size == group.at_least or group.name in graph.ungated for group in graph.groups)
        return 0
    assert_same(network, gated, "inserting gates")
    loose = {group.name for group in graph.groups if gates.loose(group)}
    for whole in (set(graph.ungated) | loose, set(graph.ungated)):
        kept = random_kept(graph, seed, share, whole)
        masked = mask_(copy.deepcopy(network), Plan(graph, kept))
        cut = copy.deepcopy(gated)
        its_gates = Gates(cut, graph)
        its_gates.mask_(kept)
        if whole >= loose:
            assert_same(masked, cut, "masks of gates")
        its_gates.cut_(kept)
        assert_same(masked, cut, "cutting with gates")
        secateur.merge_gates_(cut)
        small = secateur.shrink(network, Plan(graph, kept))
        assert_same(small, cut, "merging")
        assert [(n, t.shape) for n, t in cut.state_dict().items()] == [
            (n, t.shape) for n, t in small.state_dict().items()
        ]
    return graph.num_channels - sum(group.size for group in graph.groups if group.name in graph.ungated)


def run(num_networks: int) -> None:
    """Draw this many different networks and check them; most must have had something to cut."""
    cut: dict[str, int] = {}

    def draw(network: Network, seed: int, share: float) -> None:
        note(repr(network))
        cut[repr(network)] = check(network, seed, share)

    number = 0
    while len(cut) < num_networks:
        # Many short runs give more different networks than a long one, see the properties of plain networks.
        number += 1
        strategies = NETWORKS, st.integers(0, 1000), st.floats(0.1, 0.9)
        fix_seed(number)(settings(SETTINGS, max_examples=8)(given(*strategies)(draw)))()
    assert sum(channels >= 8 for channels in cut.values()) > 0.5 * len(cut)


def test_some_networks() -> None:
    run(4)


@pytest.mark.slow
def test_four_hundred_networks() -> None:
    run(400)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_option(kind: str) -> None:
    """Every block, in the middle of a network, with every option."""
    for option, network in every_option(kind):
        check(network, option, 0.3)


# Removed channels that are left as zeros to fill up widths: trained so, and cut in the end, nothing has changed.

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


def check_filled(network: Network, seed: int, make: Make) -> int:
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
    with pytest.raises(InvalidModel):
        pruner.finish()


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_in_every_block(kind: str) -> None:
    option, network = next(iter(every_option(kind)))
    filled = check_filled(network, option, sgd)
    assert filled or kind == "pixels"  # there every group is whole, or cut at once


@pytest.mark.slow
@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("kind", KINDS)
def test_zeros_in_every_option(kind: str, make: Make) -> None:
    for option, network in every_option(kind):
        check_filled(network, option, make)
