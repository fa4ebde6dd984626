"""The widths that a budget of time chooses, beside a ranking and beside all choices there are."""

from itertools import pairwise

import pytest
import torch
from timed_networks import EXAMPLE, GRAPHS, NETWORKS, Residual, chain, invented
from torch import Tensor

from secateur import Budget, ChannelGraph, Limits, Plan, Pruner
from secateur.pruning.selection import Target, best_widths, ranked, select
from secateur.pruning.widths import Times

NONE = torch.ones(0)
"""No branches."""


def importance(graph: ChannelGraph, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    by_group = torch.rand(len(graph.groups), generator=generator) ** 2
    return (torch.rand(graph.num_channels, generator=generator) * by_group[graph.group_of]).double()


@pytest.mark.parametrize("name", NETWORKS)
def test_times_of_widths_are_those_of_the_table(name: str) -> None:
    graph, table = GRAPHS[name], invented(NETWORKS[name](), EXAMPLE, 0, 4)
    times = Times(table, graph)
    for seed, share in enumerate((0.0, 0.3, 0.6, 0.9)):
        kept = Plan.random(graph, share, seed).kept
        widths = torch.bincount(graph.group_of[kept], minlength=len(graph.groups))
        assert times(widths, NONE) == pytest.approx(table.value(graph, kept))
        for group in range(len(graph.groups)):
            other = widths.clone()
            other[group] = 1
            both = times.along(group, widths, NONE, torch.tensor([1, int(widths[group])]))
            assert float(both[1] - both[0]) == pytest.approx(times(widths, NONE) - times(other, NONE), abs=1e-9)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", NETWORKS)
def test_no_less_is_kept_than_by_rank_and_nearly_the_most_there_is(name: str, seed: int) -> None:
    graph, table = GRAPHS[name], invented(NETWORKS[name](), EXAMPLE, seed, 4 if seed % 2 else 8)
    scores, floors = importance(graph, seed), Limits(multiple_of=4).floors(graph)
    target = Target(Budget(latency=(0.35, 0.5, 0.65, 0.8)[seed % 4]), graph, table)
    whole = graph.all_kept()
    widths, _ = best_widths(target, whole, scores, floors, 4)
    kept = select(graph, whole, scores, widths, multiple_of=4)
    assert target.met(kept)
    assert torch.equal(torch.bincount(graph.group_of[kept]), widths)
    sizes = torch.bincount(graph.group_of)
    assert bool(((widths % 4 == 0) | (widths == sizes)).all())
    assert bool((widths >= floors).all())
    worth = ranked(graph, whole, scores, "score_per_microsecond", table)
    by_rank = select(graph, whole, worth, floors, multiple_of=4, target=target)
    assert target.met(by_rank)
    assert float(scores[kept].sum()) >= float(scores[by_rank].sum()) - 1e-9
    if name != "resnet20":
        assert float(scores[kept].sum()) >= exhaustive(target, scores, floors) - 0.01 * float(scores.sum())


def exhaustive(target: Target, scores: Tensor, floors: Tensor) -> float:
    """The most importance of all widths in multiples of 4 within the budget, with times counted layer by layer."""
    graph, table = target.graph, target.table
    assert table is not None
    gains, choices = [], []
    for group, floor in zip(graph.groups, floors.tolist(), strict=True):
        ordered = scores[group.span].sort(descending=True).values
        widths = [width for width in range(4, group.size + 1, 4) if width >= floor]
        choices.append(torch.tensor(widths))
        gains.append(torch.stack([ordered[:width].sum() for width in widths]))
    every = torch.cartesian_prod(*choices).double()
    total = torch.zeros(len(every), dtype=torch.float64)
    for layer in table.layers:
        sides = []
        for axis, whole in zip(layer.axes, (layer.inputs[-1], layer.outputs[-1]), strict=True):
            channels = graph.axes.get((layer.name, axis)) if axis is not None else None
            side = torch.full((len(every),), float(whole))
            if channels is not None:
                on_axis = torch.bincount(graph.group_of[channels[channels >= 0]], minlength=len(graph.groups))
                per_channel = on_axis / torch.tensor([group.size for group in graph.groups])
                side = int((channels < 0).sum()) + every @ per_channel.double()
            sides.append(side)
        pairs, inverse = torch.unique(torch.stack(sides, 1), dim=0, return_inverse=True)
        total += torch.tensor([layer.at(*pair) for pair in pairs.tolist()], dtype=torch.float64)[inverse]
    allowed = total <= target.budget.share * target.whole
    return float(torch.cartesian_prod(*gains).sum(1)[allowed].max())


def test_a_budget_that_is_met_changes_nothing() -> None:
    graph, table = GRAPHS["chain"], invented(chain(), EXAMPLE, 0, 4)
    target = Target(Budget(latency=1.0), graph, table)
    scores, floors = importance(graph, 0), Limits().floors(graph)
    assert best_widths(target, graph.all_kept(), scores, floors, 1)[0].tolist() == [24, 40, 32, 48]


@pytest.mark.parametrize("options", [{}, {"fraction": 0.1}, {"step": 0.1}], ids=str)
def test_a_pruner_gets_there_at_once_or_step_by_step(options: dict[str, float]) -> None:
    torch.manual_seed(0)
    model = Residual()
    graph, table = GRAPHS["residual"], invented(model, EXAMPLE, 3, 8)
    pruner = Pruner(
        model, graph=graph, latency=table, rank="score_per_microsecond", score="l2", limits=Limits(multiple_of=4)
    )
    target, left = Target(Budget(latency=0.5), graph, table), [1.0]
    while not target.met(pruner.kept):
        removal = pruner.prune(budget=Budget(latency=0.5), **options)
        left.append(target.left(pruner.kept))
        assert left[-1] < left[-2]
        assert removal.met == target.met(pruner.kept)
    assert (len(left) == 2) == (not options)
    assert 0.4 < left[-1] <= 0.5
    if "step" in options:
        # A step ends with the group of channels that passes it.
        assert all(0.06 < before - after < 0.2 for before, after in pairwise(left[:-1]))
    assert pruner.finish()(EXAMPLE).shape == (1, 10)
