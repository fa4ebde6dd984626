"""Whole branches that go by their scores: alone, beside channels, and by a budget of time."""

import copy
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from blocks import WEAK, Block, Blocks, graph, weak
from small import batches
from timed_networks import invented
from torch import Tensor, nn

import secateur
from secateur import Budget, ChannelGraph, Limits, Plan, Pruner, Score
from secateur.errors import UnreachableBudget
from secateur.pruning.scores import Oracle
from secateur.pruning.selection import Target, best_widths, count_filters, select
from secateur.pruning.widths import Times

ALWAYS = Limits(branches="always", min_ratio=0.0)
IMAGE = torch.rand(1, 2, 6, 6, dtype=torch.float64)


def observed(net: nn.Module, limits: Limits = ALWAYS, **options: Any) -> tuple[Pruner, torch.optim.Optimizer]:
    """A Pruner that has seen some batches, and an optimizer that has made steps with them."""
    pruner = Pruner(net, graph=graph(), limits=limits, **options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    observe(pruner, optimizer)
    return pruner, optimizer


def observe(pruner: Pruner, optimizer: torch.optim.Optimizer) -> None:
    for images, labels in batches():
        optimizer.zero_grad()
        F.cross_entropy(pruner.model(images), labels).backward()
        pruner.observe()
        optimizer.step()


def test_the_score_of_a_branch_is_that_of_the_gates_on_its_addend() -> None:
    net = weak().eval()
    pruner = Pruner(net, graph=graph())
    wanted = torch.zeros(3, 8, dtype=torch.float64)
    for images, labels in batches():
        net.zero_grad()
        F.cross_entropy(net(images), labels).backward()
        pruner.observe()
        # The same by a factor of one on each channel of the addend.
        plain, factors = weak().eval(), []
        for block in plain.blocks:
            factor = torch.ones(8, 1, 1, dtype=torch.float64, requires_grad=True)
            block.last.register_forward_hook(lambda module, args, output, factor=factor: output * factor)
            factors.append(factor)
        F.cross_entropy(plain(images), labels).backward()
        wanted += torch.stack([f.grad[:, 0, 0].abs() for f in factors if f.grad is not None])
    found = pruner.score.branches(pruner.score.end(), pruner.kept)
    torch.testing.assert_close(found, wanted.sum(1))


@pytest.mark.parametrize(
    "score", ["taylor", "fisher", "slim", "pcnn", "apoz", "l1", "l2", "fpgm", "residual", "measured", "random"]
)
def test_every_score_has_one_for_branches(score: str) -> None:
    pruner, optimizer = observed(weak(), score=score)
    channels = pruner.score.end()
    found = pruner.score.branches(channels, pruner.kept)
    assert found.shape == (3,)
    assert bool((found >= 0).all())
    if score in ("l1", "l2", "fpgm", "residual", "measured", "random"):  # of the filters of its own
        inside = [graph().within(branch) for branch in graph().branches]
        torch.testing.assert_close(found, torch.stack([channels[own].sum() for own in inside]).double())
    removal = pruner.prune(budget=Budget(macs=0.5), optimizer=optimizer)
    assert removal.met


def test_a_score_of_ones_own_ranks_branches_by_their_channels() -> None:
    class Mine(Score):
        def end(self) -> Tensor:
            return torch.arange(self.gates.graph.num_channels).double()

    pruner = Pruner(weak(), graph=graph(), score=Mine(), limits=ALWAYS)
    found = pruner.score.branches(pruner.score.end(), pruner.kept)
    wanted = [torch.arange(g.start, g.start + g.size).sum() for g in map(graph().group, inner())]
    assert found.tolist() == [float(each) for each in wanted]


def inner() -> list[str]:
    return [branch.groups[0] for branch in graph().branches]


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("budget", [Budget(macs=0.3), Budget(params=0.3), Budget(filters=0.45)], ids=str)
def test_branches_that_hardly_matter_go_first(budget: Budget, cut: bool) -> None:
    net = weak()
    pruner, optimizer = observed(net)
    removal = pruner.prune(budget=budget, optimizer=optimizer, cut=cut)
    assert set(removal.branches) == set(WEAK) == pruner.plan.without
    assert removal.met
    for name in WEAK:
        assert isinstance(net.get_submodule(name), nn.Sequential)
        assert [type(child) for child in net.get_submodule(name).children()] == [nn.ReLU]
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in net.parameters()}
    observe(pruner, optimizer)  # it goes on training
    before = pruner.model(batches()[0][0])
    plan, model = pruner.plan, pruner.finish()
    torch.testing.assert_close(model(batches()[0][0]), before)
    assert secateur.analyze(model, IMAGE).cost() == plan.cost == removal.cost
    filters = sum(m.out_channels for m in model.modules() if isinstance(m, nn.Conv2d))
    assert pruner.filters == filters + model.head.out_features  # pyright: ignore
    assert bool(secateur.verify(weak(), plan, IMAGE))


def test_the_removed_network_is_the_one_with_zeros() -> None:
    net = weak().eval()
    pruner, optimizer = observed(net)
    whole = secateur.merge_gates_(copy.deepcopy(net))
    removal = pruner.prune(0.45, Budget(macs=0.6), optimizer=optimizer)
    assert removal.branches
    with torch.no_grad():
        for name in removal.branches:
            last = whole.get_submodule(f"{name}.last")
            last.weight.zero_(), last.bias.zero_()  # pyright: ignore
    masked = Plan(graph(), pruner.kept)
    secateur.channels.verify.mask_(whole, masked)
    torch.testing.assert_close(pruner.finish().eval()(batches()[0][0]), whole.eval()(batches()[0][0]))


def test_a_pruner_continues_from_its_state() -> None:
    one, optimizer = observed(weak())
    one.prune(budget=Budget(macs=0.4), optimizer=optimizer)
    observe(one, optimizer)
    state, tensors = copy.deepcopy(one.state_dict()), copy.deepcopy(one.model.state_dict())
    other = Pruner(weak(seed=1), graph=graph(), limits=ALWAYS)
    other.load_state_dict(state)
    other.model.load_state_dict(tensors)
    assert other.plan.without == one.plan.without != frozenset()
    removals = [pruner.prune(budget=Budget(macs=0.25)) for pruner in (one, other)]
    assert removals[0] == removals[1]
    for a, b in zip(one.finish().parameters(), other.finish().parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("limits", "budget"),
    [
        (Limits(), Budget(macs=0.55)),
        (Limits(branches="never"), Budget(macs=0.55)),
        (Limits(branches="always", at_least={"blocks.*": 1}), Budget(macs=0.55)),
        (Limits(branches="always", at_least={"blocks.?.first": 0.2}), Budget(macs=0.55)),
    ],
    ids=["auto", "never", "all held", "named"],
)
def test_branches_stay_unless_they_may_go(limits: Limits, budget: Budget) -> None:
    pruner, optimizer = observed(weak(), limits)
    assert not pruner.prune(budget=budget, optimizer=optimizer).branches


def test_a_budget_that_only_branches_can_meet() -> None:
    floors = {"min_ratio": 0.5}
    with pytest.raises(UnreachableBudget):
        observed(weak(), Limits(**floors))[0].prune(budget=Budget(macs=0.2))
    pruner, optimizer = observed(weak(), Limits(branches="always", **floors))
    removal = pruner.prune(budget=Budget(macs=0.2), optimizer=optimizer)
    assert removal.met
    assert set(WEAK) == set(removal.branches)


def test_the_table_of_times_knows_branches() -> None:
    table = invented(Blocks().double(), IMAGE, 0, 4)
    times = Times(table, graph(), graph().branches)
    for seed, stays in enumerate(product((0, 1), repeat=3)):
        gone = [branch.name for branch, here in zip(graph().branches, stays, strict=True) if not here]
        kept = Plan(graph(), Plan.random(graph(), 0.3, seed).kept, frozenset(gone)).kept
        widths = torch.bincount(graph().group_of[kept], minlength=len(graph().groups))
        assert times(widths, torch.tensor(stays)) == pytest.approx(table.value(graph(), kept))
        for number in range(3):
            other = torch.tensor([here if place != number else 0 for place, here in enumerate(stays)])
            difference = times(widths, torch.tensor(stays)) - times(widths, other)
            assert difference == pytest.approx(stays[number] * times.of_branch(number, widths))


@pytest.mark.parametrize("seed", range(4))
def test_nearly_the_most_importance_of_all_widths_and_branches(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    table = invented(Blocks().double(), IMAGE, seed, 4)
    by_group = torch.rand(len(graph().groups), generator=generator)
    scores = (torch.rand(graph().num_channels, generator=generator) * by_group[graph().group_of]).double()
    lost = {branch.name: 6 * float(torch.rand((), generator=generator)) for branch in graph().branches}
    limits = Limits(multiple_of=4, min_ratio=0.25)
    target = Target(Budget(latency=(0.3, 0.45, 0.6, 0.8)[seed % 4]), graph(), table)
    floors, whole = limits.floors(graph()), graph().all_kept()
    widths, gone = best_widths(target, whole, scores, floors, 4, lost)
    kept = select(graph(), whole, scores, widths, multiple_of=4, branches=dict.fromkeys(gone, 0.0))
    assert graph().without(kept) == set(gone)
    assert target.met(kept)
    best = max(
        lost_and_kept(choice, scores, lost)
        for choice in choices(floors, lost)
        if target.met(choice_kept(choice, scores))
    )
    found = {group.name: int(kept[group.span].sum()) for group in graph().groups}
    assert lost_and_kept((found, set(gone)), scores, lost) >= best - 0.01 * float(scores.sum())


Choice = tuple[dict[str, int], set[str]]


def choices(floors: Tensor, lost: dict[str, float]) -> list[Choice]:
    widths = [
        [(group.name, width) for width in range(4, group.size + 1, 4) if width >= floor]
        for group, floor in zip(graph().groups, floors.tolist(), strict=True)
    ]
    gone = [{name for name, go in zip(lost, goes, strict=True) if go} for goes in product((0, 1), repeat=len(lost))]
    return [(dict(each), branches) for each in product(*widths) for branches in gone]


def choice_kept(choice: Choice, scores: Tensor) -> Tensor:
    widths, gone = choice
    kept = graph().all_kept()
    for group in graph().groups:
        order = scores[group.span].argsort(descending=True)
        kept[group.start + order[widths[group.name] :]] = False
    return Plan(graph(), kept, frozenset(gone)).kept


def lost_and_kept(choice: Choice, scores: Tensor, lost: dict[str, float]) -> float:
    """All importance without what is lost, with a branch or with channels."""
    widths, gone = choice
    inside = {name for branch in graph().branches if branch.name in gone for name in branch.groups}
    channels = sum(
        float(scores[group.span].sort(descending=True).values[widths[group.name] :].sum())
        for group in graph().groups
        if group.name not in inside
    )
    return float(scores.sum()) - channels - sum(lost[name] for name in gone)


@pytest.mark.parametrize("options", [{}, {"step": 0.1}, {"fraction": 0.2}], ids=str)
def test_a_budget_of_time_takes_branches(options: dict[str, float]) -> None:
    net = weak()
    table = invented(Blocks().double(), IMAGE, 1, 4)
    limits = Limits(multiple_of=4)
    pruner, optimizer = observed(net, limits, latency=table, rank="score_per_microsecond")
    target, went = Target(Budget(latency=0.45), graph(), table), list[str]()
    while not target.met(pruner.kept):
        removal = pruner.prune(budget=Budget(latency=0.45), optimizer=optimizer, **options)
        went += removal.branches
        observe(pruner, optimizer)
    assert set(WEAK) <= set(went) == pruner.plan.without
    assert len(went) == len(set(went))
    assert pruner.finish()(IMAGE).shape == (1, 4)


def test_what_follows_a_removed_branch_is_repaired() -> None:
    torch.manual_seed(0)
    net = Blocks().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for _ in range(8):
        for images, labels in batches():
            optimizer.zero_grad()
            F.cross_entropy(net(images), labels).backward()
            optimizer.step()
    net.eval()
    plan = Plan.keep(graph(), {inner()[2]: range(10)}, without=["blocks.1"])
    images = torch.cat([images for images, _ in batches()])
    notes: list[str] = []
    repaired = secateur.repair(net, plan, [images], note=notes.append)
    held = batches(6)[-1][0]
    with torch.no_grad():
        errors = [float((each(held) - net(held)).norm()) for each in (repaired, secateur.shrink(net, plan))]
    assert errors[0] < 0.8 * errors[1]
    assert not any("orders" in note for note in notes)
    assert not torch.equal(repaired.get_parameter("blocks.2.first.weight"), net.get_parameter("blocks.2.first.weight"))


def test_filters_of_a_network_without_branches_are_counted() -> None:
    plan = Plan.keep(graph(), {}, without=["blocks.0"])
    small = secateur.shrink(weak(), plan)
    filters = sum(m.weight.shape[0] for m in small.modules() if isinstance(m, (nn.Conv2d, nn.Linear)))
    assert count_filters(graph(), plan.kept) == filters


class Nested(nn.Module):
    """A sum around two blocks and a layer behind them, as in networks for super-resolution."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(8, 12), Block(8, 8))
        self.tail = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.tail(self.blocks(x))


def nested() -> tuple[nn.Module, ChannelGraph]:
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), Nested(), nn.Conv2d(8, 4, 1)
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()
    return net, secateur.analyze(net, IMAGE)


def test_branches_within_a_branch_do_not_take_it_along() -> None:
    net, nested_graph = nested()
    inner, outer = ["2.blocks.0", "2.blocks.1"], "2"
    assert {branch.name for branch in nested_graph.branches} == {*inner, outer}
    plan = Plan.keep(nested_graph, {}, without=inner)
    assert plan.without == set(inner)
    assert Plan(nested_graph, plan.kept).without == set(inner)
    small = secateur.shrink(net, plan)
    assert isinstance(small.get_submodule("2"), Nested)
    assert secateur.analyze(small, IMAGE).cost() == plan.cost
    whole = Plan.keep(nested_graph, {}, without=[outer])
    assert secateur.analyze(secateur.shrink(net, whole), IMAGE).cost() == whole.cost
    assert [branch.name for branch in ALWAYS.removable(nested_graph, None)] == inner


class PreActivated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first = nn.BatchNorm2d(8), nn.Conv2d(8, 12, 3, padding=1, bias=False)
        self.inner, self.second = nn.BatchNorm2d(12), nn.Conv2d(12, 8, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.relu(self.inner(self.first(torch.relu(self.norm(x))))))


def test_gates_before_the_last_layer_do_not_score_a_branch() -> None:
    torch.manual_seed(0)
    blocks = PreActivated(), PreActivated()
    layers = nn.Conv2d(2, 8, 3, padding=1), *blocks, nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    net = nn.Sequential(*layers, nn.Linear(8, 4)).double()
    found = secateur.analyze(net, IMAGE)
    assert [branch.gate for branch in found.branches] == [None, None]
    pruner = Pruner(net, graph=found, limits=ALWAYS)
    F.cross_entropy(net(batches()[0][0]), batches()[0][1]).backward()
    pruner.observe()
    channels = pruner.score.end()
    own = [channels[found.within(branch)].sum() for branch in found.branches]
    torch.testing.assert_close(pruner.score.branches(channels, pruner.kept), torch.stack(own))


def test_what_has_an_infinite_score_stays() -> None:
    table = invented(Blocks().double(), IMAGE, 1, 4)
    target = Target(Budget(latency=0.7), graph(), table)
    scores = torch.rand(graph().num_channels, generator=torch.Generator().manual_seed(0)).double()
    group = graph().group(graph().branch("blocks.0").groups[0])
    scores[group.span] = torch.inf
    lost = {"blocks.0": torch.inf, "blocks.1": 1.0, "blocks.2": 1.0}
    widths, gone = best_widths(target, graph().all_kept(), scores, Limits().floors(graph()), 4, lost)
    assert "blocks.0" not in gone
    assert int(widths[graph().groups.index(group)]) == group.size


def test_a_network_whose_gates_have_all_gone_with_their_branches() -> None:
    torch.manual_seed(0)
    net = Blocks().double()
    held = secateur.analyze(net, IMAGE, ignore=["stem"])
    pruner = Pruner(net, graph=held, limits=ALWAYS)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    observe(pruner, optimizer)
    least = Plan.keep(held, {}, without=[branch.name for branch in held.branches]).cost.macs / held.macs
    removal = pruner.prune(budget=Budget(macs=least), optimizer=optimizer)
    assert len(removal.branches) == 3
    assert removal.met
    assert not pruner.gates.merged
    assert pruner.finish()(IMAGE).shape == (1, 4)


def test_an_oracle_goes_on_after_a_branch_has_gone() -> None:
    net = weak().eval()
    images, labels = batches()[0]
    pruner = Pruner(net, graph=graph(), limits=ALWAYS, score=Oracle(lambda m: F.cross_entropy(m(images), labels)))
    first = pruner.prune(budget=Budget(macs=0.4))
    assert first.branches
    assert pruner.prune(budget=Budget(macs=0.3)).met
