"""Which channels go, against a slow selection in plain Python."""

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from secateur import Budget, ChannelGraph, InvalidSetting, Limits, Plan, UnreachableBudget, analyze
from secateur.channels.cost import CostRow
from secateur.channels.groups import ChannelGroup, FrozenChannels, Member
from secateur.channels.labels import Role
from secateur.channels.reasons import Kind, Reason
from secateur.models.resnet_cifar import CifarResNet
from secateur.pruning.selection import Target, check_reachable, ranked, select

IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
SETTINGS = settings(database=None, deadline=None, suppress_health_check=list(HealthCheck), max_examples=60)


def make_graph(sizes: list[int], filters: list[int], at_least: int = 1) -> ChannelGraph:
    """A chain of layers, each a group whose channels have so many filters, with a last one of 5 that stays."""
    groups, rows, shapes, axes, roles = [], [], {}, {}, {}
    start, before = 0, None
    for number, (size, each) in enumerate(zip([*sizes, 5], [*filters, 1], strict=True)):
        last = number == len(sizes)
        channels = None if last else torch.arange(start, start + size)
        name = f"layer{number}.weight"
        shapes[name] = (size, 3 if before is None else before.numel())
        for axis, (part, role) in enumerate(((channels, Role.PRODUCES), (before, Role.CONSUMES))):
            if part is not None:
                axes[name, axis], roles[name, axis] = part, role
        rows.append(CostRow(name, "conv", number + 1, shapes[name], (channels, before)))
        if not last:
            member = Member(name, 0, "produces", torch.arange(size * each).view(size, each))
            groups.append(ChannelGroup(f"layer{number}", start, size, (member,), at_least, each, None))
        start, before = start + size, channels
    frozen = (FrozenChannels("head", name, 0, torch.arange(5), Reason(Kind.OUTPUT)),)
    sizes_rows = tuple(CostRow(r.name, "weight", 1, r.sizes, r.channels) for r in rows)
    return ChannelGraph(
        tuple(groups), frozen, shapes, axes, roles, (), tuple(rows), sizes_rows, (), {}, (name,), "a chain"
    )


def plain_cost(graph: ChannelGraph, kind: str, kept: list[bool]) -> int:
    """What is left of the chain, counted by hand."""
    widths = [sum(kept[g.start : g.start + g.size]) for g in graph.groups]
    if kind == "filters":
        return 5 + sum(width * group.filters_per_channel for width, group in zip(widths, graph.groups, strict=True))
    pairs = zip([3, *widths], [*widths, 5], strict=True)
    return sum((number + 1 if kind == "macs" else 1) * a * b for number, (a, b) in enumerate(pairs))


def in_channels(group: ChannelGroup, multiple: int) -> int:
    """The fewest channels whose filters are a multiple."""
    return next(n for n in range(1, multiple + 1) if n * group.filters_per_channel % multiple == 0)


def slow_select(
    graph: ChannelGraph,
    kept: list[bool],
    worth: list[float],
    floors: list[int],
    multiple: int,
    quota: int | None,
    budget: Budget | None,
) -> list[bool]:
    """Again and again, the least worthy step of all groups; the first group where several are."""
    kept, used, steps = list(kept), 0, 0
    whole = plain_cost(graph, budget.counts, [True] * len(kept)) if budget else 0
    while budget is None or plain_cost(graph, budget.counts, kept) > (budget.share + 1e-9) * whole:
        choices = []
        for group, floor in zip(graph.groups, floors, strict=True):
            left = [c for c in range(group.start, group.start + group.size) if kept[c]]
            step_size = in_channels(group, multiple)
            target = (len(left) - 1) // step_size * step_size
            if target >= floor:
                step = sorted(left, key=lambda c: (worth[c], c))[: len(left) - target]
                choices.append((sum(worth[c] for c in step) / len(step), group.start, step, group.filters_per_channel))
        if not choices:
            break
        _, _, step, each = min(choices)
        used += each * len(step)
        if quota is not None and used > quota and steps:
            break
        steps += 1
        for channel in step:
            kept[channel] = False
    return kept


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    graph = make_graph(sizes, [draw(st.integers(1, 3)) for _ in sizes])
    multiple = draw(st.sampled_from([1, 1, 2, 4]))
    limits = Limits(
        min_channels=draw(st.integers(1, 3)),
        min_ratio=draw(st.sampled_from([0.0, 0.1, 0.3, 0.5])),
        multiple_of=multiple,
    )
    worth = [float(draw(st.integers(0, 6))) for _ in range(graph.num_channels)]
    kept = [True] * graph.num_channels
    if draw(st.booleans()):
        kept = slow_select(graph, kept, worth[::-1], limits.floors(graph).tolist(), multiple, 6, None)
    quota = draw(st.none() | st.integers(0, 20))
    share, counts = draw(st.floats(0.05, 1)), draw(st.sampled_from([None, "macs", "params", "filters"]))
    budget = Budget(**{counts: share}) if counts else None
    return {"graph": graph, "limits": limits, "worth": worth, "kept": kept, "quota": quota, "budget": budget}


def fast_select(problem: dict[str, Any]) -> torch.Tensor:
    graph, limits = problem["graph"], problem["limits"]
    return select(
        graph,
        torch.tensor(problem["kept"]),
        torch.tensor(problem["worth"], dtype=torch.float64),
        limits.floors(graph),
        multiple_of=limits.multiple_of,
        quota=problem["quota"],
        target=Target(problem["budget"], graph) if problem["budget"] else None,
    )


@SETTINGS
@given(problems())
def test_selection_is_that_of_the_slow_one(problem: dict[str, Any]) -> None:
    graph, limits = problem["graph"], problem["limits"]
    low = max(limits.min_channels, 1)
    multiple = limits.multiple_of
    floors = [
        min(g.size, math.ceil(max(low, math.floor(limits.min_ratio * g.size)) / step) * step)
        for g, step in ((g, in_channels(g, multiple)) for g in graph.groups)
    ]
    assert limits.floors(graph).tolist() == floors
    expected = slow_select(
        graph, problem["kept"], problem["worth"], floors, multiple, problem["quota"], problem["budget"]
    )
    result = fast_select(problem)
    assert result.tolist() == expected
    for group in graph.groups:
        width = int(result[group.span].sum())
        assert width == group.size or width * group.filters_per_channel % multiple == 0


@SETTINGS
@given(problems(), st.randoms(use_true_random=False))
def test_a_budget_is_met_and_the_last_channel_was_needed(problem: dict[str, Any], random: Any) -> None:
    graph, budget = problem["graph"], problem["budget"] or Budget(macs=0.5)
    worth = random.sample(range(graph.num_channels), graph.num_channels)
    floors = torch.ones(len(graph.groups), dtype=torch.long)
    kept = graph.all_kept()
    try:
        check_reachable(Target(budget, graph), floors)
    except UnreachableBudget:
        return
    result = select(graph, kept, torch.tensor(worth, dtype=torch.float64), floors, target=Target(budget, graph))
    allowed = (budget.share + 1e-9) * plain_cost(graph, budget.counts, kept.tolist())
    assert plain_cost(graph, budget.counts, result.tolist()) <= allowed
    gone = (~result).nonzero()[:, 0].tolist()
    if gone:
        result[max(gone, key=lambda channel: worth[channel])] = True
        assert plain_cost(graph, budget.counts, result.tolist()) > allowed


def test_a_budget_that_is_a_whole_number_is_met_by_it() -> None:
    graph = make_graph([95], [1])
    target = Target(Budget(filters=0.29), graph)
    result = select(graph, graph.all_kept(), torch.arange(95.0), torch.tensor([1]), target=target)
    assert int(result.sum()) + 5 == 29
    assert (target.value(result), target.left(result)) == (29, 0.29)


@pytest.mark.parametrize(
    ("limits", "floors"),
    [
        (Limits(), [1, 1, 2]),
        (Limits(min_channels=3), [3, 3, 3]),
        (Limits(min_ratio=0.5), [5, 2, 10]),
        (Limits(min_ratio=0.35), [3, 1, 7]),
        (Limits(min_ratio=1.0), [10, 4, 20]),
        (Limits(min_channels=8), [8, 4, 8]),
        (Limits(multiple_of=8), [8, 4, 8]),
        (Limits(min_ratio=0.5, multiple_of=3), [6, 3, 12]),
        (Limits(at_least={"layer0": 6}), [6, 1, 2]),
        (Limits(at_least={"layer0": 0.55}), [6, 1, 2]),
        (Limits(at_least={"layer*": 1.0}), [10, 4, 20]),
        (Limits(at_least={"layer*": 1}), [1, 1, 2]),
        (Limits(at_least={"layer[12]": 0.5, "layer2": 12}), [1, 2, 12]),
        (Limits(at_least={"layer1": 50}), [1, 4, 2]),
        (Limits(at_least={"layer0": 6.0}), [6, 1, 2]),
    ],
)
def test_floors(limits: Limits, floors: list[int]) -> None:
    assert limits.floors(make_graph([10, 4, 20], [1, 1, 1])).tolist() == floors


@pytest.mark.parametrize("value", [-1, 1.5, float("nan"), float("inf"), "all", None])
def test_a_floor_that_is_neither_number_nor_share(value: Any) -> None:
    with pytest.raises(InvalidSetting) as caught:
        Limits(at_least={"layer0": value}).floors(make_graph([10, 4], [1, 1]))
    assert caught.value.got == repr(value)


@pytest.mark.parametrize(
    "wrong", [{"min_channels": 0}, {"multiple_of": 0}, {"min_ratio": 1.5}, {"min_ratio": float("nan")}], ids=str
)
def test_limits_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting):
        Limits(**wrong)


def test_a_floor_of_an_unknown_layer() -> None:
    with pytest.raises(InvalidSetting) as caught:
        Limits(at_least={"layer7": 2}).floors(make_graph([10, 4], [1, 1]))
    assert "layer0" in str(caught.value.remedy)


def test_a_quota_counts_filters_and_takes_one_step_at_least() -> None:
    graph = make_graph([4, 4], [3, 1])
    worth = torch.tensor([0.0, 1, 2, 9, 0.5, 1.5, 2.5, 9], dtype=torch.float64)

    def gone(quota: int) -> list[int]:
        result = select(graph, graph.all_kept(), worth, torch.tensor([1, 1]), quota=quota)
        return (~result).nonzero()[:, 0].tolist()

    assert [gone(quota) for quota in (0, 3, 4, 6, 7, 8)] == [[0], [0], [0, 4], [0, 4], [0, 1, 4], [0, 1, 4, 5]]


def test_ties_fall_in_order() -> None:
    graph = make_graph([5, 5], [1, 1])
    result = select(graph, graph.all_kept(), torch.zeros(10).double(), torch.tensor([2, 2]), quota=4)
    assert (~result).nonzero()[:, 0].tolist() == [0, 1, 2, 5]


def test_a_hundred_thousand_channels() -> None:
    graph = make_graph([500] * 200, [1 + number % 3 for number in range(200)])
    worth = torch.rand(100_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    floors = Limits().floors(graph)
    for kind in ("macs", "params", "filters"):
        target = Target(Budget(**{kind: 0.4}), graph)
        result = select(graph, graph.all_kept(), worth, floors, target=target)
        allowed = 0.4 * plain_cost(graph, kind, [True] * 100_000)
        assert plain_cost(graph, kind, result.tolist()) <= allowed
        last = int(torch.where(result, -1.0, worth).argmax())
        assert bool((worth[result] > worth[last]).all()), "no floor holds here: all that stay are worth more"
        result[last] = True
        assert plain_cost(graph, kind, result.tolist()) > allowed


@pytest.mark.parametrize("power", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("rank", ["score_per_mac", "score_per_param"])
def test_ranks_per_cost_use_what_each_channel_saves_as_the_network_stands(rank: Any, power: float) -> None:
    graph = analyze(CifarResNet(8, width=0.25), IMAGES, probe=False)
    kept = Plan.random(graph, 0.3, seed=3).kept
    scores = torch.rand(graph.num_channels, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    value = ranked(graph, kept, scores, rank, power=power)

    def cost(keep: torch.Tensor) -> int:
        return graph.cost(keep).macs if rank == "score_per_mac" else graph.cost(keep).params

    for channel in kept.nonzero()[:, 0].tolist():
        less = kept.clone()
        less[channel] = False
        assert float(value[channel]) == pytest.approx(float(scores[channel]) / (cost(kept) - cost(less)) ** power)


@pytest.mark.parametrize(("device", "x86", "multiple"), [("cuda", False, 8), ("cpu", True, 8), ("cpu", False, 1)])
def test_widths_that_the_device_likes(device: str, x86: bool, multiple: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secateur.pruning.settings.is_x86", lambda: x86)
    assert Limits().on(device).multiple == multiple
    assert Limits(multiple_of=2).on(device).multiple == 2
