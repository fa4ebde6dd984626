"""The oracle on random networks: for any legal plan, masked and shrunk are the same function and cost what is said."""

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import seed as fix_seed
from hypothesis import strategies as st
from networks import KINDS, NETWORKS, Block, Network, every_option, inputs
from oracle import assert_exact, random_plan, randomize_, real_cost

import secateur
from secateur import Plan

SETTINGS = settings(
    database=None,
    deadline=None,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
)
EXAMPLE = inputs()


FREE = {
    "chain": [24, 24, 24, 24, 24, 24, 16, 16],  # the last two with sigmoid and softplus
    "activation": [16, 16, 16, 16, 16, 16, 8, 8],
    "preactivation": [24],
    "residual": [24],
    "split": [16, 16, 12, 12, 16, 16],
    "shuffle": [12],
    "depthwise": [16],
    "grouped": [12, 16],  # whole groups, positions
    "transposed": [24, 16, 12],
    "squeeze_excite": [24],
    "shared": [16],
    "pixels": [24, 18],
    "move": [16],
    "written": [24, 24, 24],
    "unpooled": [16, 16],  # the convolution gives what its input was
    "tokens": [24],
    "functional": [24],
    "scale": [16, 16, 16, 8, 16, 16, 16, 16],  # a value per place wakes the channels up
    "mixing": [8],
    "dimensions": [24],
    "concat": [16],
    "add": [16],
    "padded": [10],  # four channels meet the padding, in pairs
}
"""Removable channels for each option, found by hand: a stem of 4, a chain of 8, the block of 8, and a chain of 4."""


def check(network: Network, seed: int, share: float, probe: bool) -> int:
    """Cut a network at random in two ways; the number of channels that could be removed."""
    randomize_(network, seed)
    graph = secateur.analyze(network, EXAMPLE, probe=probe)
    assert_costs(network, graph, seed)
    for plan in (Plan.random(graph, share, seed), random_plan(graph, seed, share)):
        assert_exact(network, plan, EXAMPLE)
    return graph.num_channels


def assert_costs(network: Network, graph: secateur.ChannelGraph, seed: int) -> None:
    """The whole network, and what one channel saves, against torch's own count."""
    macs, parameters = real_cost(network, EXAMPLE)
    assert (graph.macs, graph.params) == (macs, parameters)
    fewer_macs, fewer_parameters = graph.savings()
    generator = torch.Generator().manual_seed(seed)
    candidates = [group.start + index for group in graph.groups if group.size > 1 for index in range(group.size)]
    for number in torch.randperm(len(candidates), generator=generator)[:2].tolist():
        channel = candidates[number]
        kept = graph.all_kept()
        kept[channel] = False
        left = real_cost(secateur.shrink(network, Plan(graph, kept)), EXAMPLE)
        assert left == (macs - fewer_macs[channel], parameters - fewer_parameters[channel])


def run(num_networks: int) -> None:
    """Draw this many different networks and check them; most must have had something to cut."""
    cut: dict[str, int] = {}

    def draw(network: Network, seed: int, share: float, probe: bool) -> None:
        note(repr(network))
        cut[repr(network)] = check(network, seed, share, probe=False)
        if probe:
            check(network, seed, share, probe=True)

    number = 0
    while len(cut) < num_networks:
        # Hypothesis soon varies what it has drawn before: many short runs give more different networks than a long one.
        number += 1
        strategies = NETWORKS, st.integers(0, 1000), st.floats(0.1, 0.9), st.integers(0, 3).map(lambda n: n == 1)
        fix_seed(number)(settings(SETTINGS, max_examples=8)(given(*strategies)(draw)))()
    assert sum(channels > 8 for channels in cut.values()) > 0.4 * len(cut)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_leaves_channels(kind: str) -> None:
    """Freezing everything would be exact, too: so many channels are free."""
    found = []
    for option in range(len(FREE[kind])):
        network = Network([Block("chain", 8), Block(kind, 8, option=option), Block("chain", 4)], 0)
        found.append(secateur.analyze(network.double(), EXAMPLE, probe=False).num_channels)
    assert found == FREE[kind]


def test_some_networks() -> None:
    run(8)


@pytest.mark.slow
def test_six_hundred_networks() -> None:
    run(600)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_option(kind: str) -> None:
    """Every block, in the middle of a network, with every option."""
    for option, network in every_option(kind):
        check(network, option, 0.3, probe=option % 2 == 0)
