"""Which channels go, against a slow selection in plain Python."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import secateur
from secateur import ChannelGraph, ChannelGroup, Member, Pruner
from secateur.channels.cost import CostRow
from secateur.channels.groups import FrozenChannels
from secateur.channels.labels import Role
from secateur.models.resnet_cifar import CifarResNet
from secateur.pruning.scores import Score
from secateur.pruning.selection import Budget, Limits, check_reachable, ranked, select

IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
SETTINGS = settings(database=None, deadline=None, suppress_health_check=list(HealthCheck), max_examples=200)


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
    frozen = (FrozenChannels("head", name, 0, torch.arange(5), "reaches the model's output"),)
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
    whole = plain_cost(graph, budget.kind, [True] * len(kept)) if budget else 0
    while budget is None or plain_cost(graph, budget.kind, kept) > (budget.share + 1e-9) * whole:
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
    limits = Limits(draw(st.integers(1, 3)), draw(st.sampled_from([0.0, 0.1, 0.3, 0.5])), multiple)
    worth = [float(draw(st.integers(0, 6))) for _ in range(graph.num_channels)]
    kept = [True] * graph.num_channels
    if draw(st.booleans()):
        kept = slow_select(graph, kept, worth[::-1], limits.floors(graph).tolist(), multiple, 6, None)
    quota = draw(st.none() | st.integers(0, 20))
    budget = draw(st.none() | st.builds(Budget, st.sampled_from(["macs", "params", "filters"]), st.floats(0.05, 1)))
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
        budget=problem["budget"],
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
    graph, budget = problem["graph"], problem["budget"] or Budget("macs", 0.5)
    worth = random.sample(range(graph.num_channels), graph.num_channels)
    floors = torch.ones(len(graph.groups), dtype=torch.long)
    kept = graph.all_kept()
    try:
        check_reachable(graph, budget, floors)
    except secateur.UnreachableBudget:
        return
    result = select(graph, kept, torch.tensor(worth, dtype=torch.float64), floors, budget=budget)
    allowed = (budget.share + 1e-9) * plain_cost(graph, budget.kind, kept.tolist())
    assert plain_cost(graph, budget.kind, result.tolist()) <= allowed
    gone = (~result).nonzero()[:, 0].tolist()
    if gone:
        result[max(gone, key=lambda channel: worth[channel])] = True
        assert plain_cost(graph, budget.kind, result.tolist()) > allowed


def test_a_budget_that_is_a_whole_number_is_met_by_it() -> None:
    graph = make_graph([95], [1])
    result = select(graph, graph.all_kept(), torch.arange(95.0), torch.tensor([1]), budget=Budget("filters", 0.29))
    assert int(result.sum()) + 5 == 29


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


def test_floors_of_unknown_layers_and_out_of_range_are_refused() -> None:
    graph = make_graph([10, 4], [1, 1])
    with pytest.raises(secateur.UnknownName, match="no layer with removable channels 'layer7'; did you mean 'layer"):
        Limits(at_least={"layer7": 2}).floors(graph)
    for wrong in ({"min_channels": 0}, {"multiple_of": 0}, {"min_ratio": 1.5}, {"min_ratio": float("nan")}):
        with pytest.raises(secateur.InvalidSetting):
            Limits(**wrong)
    for value in (-1, 1.5, float("nan"), float("inf"), "all", None):
        with pytest.raises(secateur.InvalidSetting, match=rf"a share of them \(0\.5\), got {value!r}"):
            Limits(at_least={"layer0": value}).floors(graph)  # pyright: ignore


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
        budget = Budget(kind, 0.4)
        result = select(graph, graph.all_kept(), worth, floors, budget=budget)
        allowed = 0.4 * plain_cost(graph, kind, [True] * 100_000)
        assert plain_cost(graph, kind, result.tolist()) <= allowed
        last = int(torch.where(result, -1.0, worth).argmax())
        assert bool((worth[result] > worth[last]).all()), "no floor holds here: all that stay are worth more"
        result[last] = True
        assert plain_cost(graph, kind, result.tolist()) > allowed


@pytest.mark.parametrize("power", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("rank", ["score_per_mac", "score_per_param"])
def test_ranks_per_cost_use_what_each_channel_saves_as_the_network_stands(rank: Any, power: float) -> None:
    graph = secateur.analyze(CifarResNet(8, width=0.25), IMAGES, probe=False)
    kept = secateur.Plan.random(graph, 0.3, seed=3).kept
    scores = torch.rand(graph.num_channels, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    value = ranked(graph, kept, scores, rank, power=power)

    def cost(keep: torch.Tensor) -> int:
        return graph.cost(keep).macs if rank == "score_per_mac" else graph.cost(keep).params

    for channel in kept.nonzero()[:, 0].tolist():
        less = kept.clone()
        less[channel] = False
        assert float(value[channel]) == pytest.approx(float(scores[channel]) / (cost(kept) - cost(less)) ** power)


class Fixed(Score):
    def end(self) -> torch.Tensor:
        return torch.arange(self.gates.graph.num_channels).flip(0).double()


@pytest.mark.parametrize("multiple", [2, 4])
def test_widths_of_a_real_network_are_multiples_or_whole(multiple: int) -> None:
    pruner = Pruner(CifarResNet(8, width=0.4), IMAGES, score=Fixed(), multiple_of=multiple)
    for _ in range(3):
        before, filters = pruner.filters, pruner.filters - sum(f.size for f in pruner.graph.frozen)
        removal = pruner.prune(fraction=0.2)
        assert before - pruner.filters == removal.filters <= max(round(0.2 * filters), 3 * multiple)
        for group in pruner.graph.groups:
            width = int(pruner.kept[group.span].sum())
            assert width == group.size or width % multiple == 0


def test_layers_in_groups_are_wide_by_multiples_and_get_narrower() -> None:
    body = nn.Conv2d(3, 32, 1), nn.ReLU(), nn.Conv2d(32, 32, 3, groups=8), nn.ReLU(), nn.Conv2d(32, 32, 1), nn.ReLU()
    pruner = Pruner(nn.Sequential(*body, nn.Conv2d(32, 2, 1)), IMAGES, score=Fixed(), multiple_of=8)
    pruner.prune(keep_macs=0.3)
    layers = [layer for layer in pruner.finish() if isinstance(layer, nn.Conv2d)]
    widths = [layer.out_channels for layer in layers[:-1]]
    assert all(width < 32 and width % 8 == 0 for width in widths), widths
    assert layers[1].groups == widths[1] // 4


def test_inputs_are_multiples_too_behind_a_shuffle_of_pixels() -> None:
    body = nn.Conv2d(3, 128, 3), nn.PixelShuffle(2), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Conv2d(32, 2, 1)
    pruner = Pruner(nn.Sequential(*body), IMAGES, score=Fixed(), multiple_of=8)
    pruner.prune(keep_macs=0.25)
    layers = [layer for layer in pruner.finish() if isinstance(layer, nn.Conv2d)]
    assert layers[0].out_channels < 128
    assert all(layer.in_channels % 8 == 0 for layer in layers[1:])


@pytest.mark.parametrize("kind", ["macs", "params", "filters"])
def test_a_pruner_lands_on_its_budget_and_stops_there(kind: str) -> None:
    pruner = Pruner(CifarResNet(8, width=0.5), IMAGES, score=Fixed(), ignore=["stage1*"])
    floors = {g.name: max(1, g.size // 10) for g in pruner.graph.groups}
    assert not any("stage1" in layer for group in pruner.graph.groups for layer in group.layers)
    met = False
    while not met:
        removal = pruner.prune(fraction=0.05, **{f"keep_{kind}": 0.6})
        assert removal.filters
        met = removal.met
    assert pruner.prune(fraction=0.05, **{f"keep_{kind}": 0.6}).filters == 0
    total = {"macs": pruner.graph.macs, "params": pruner.graph.params, "filters": pruner.graph.num_filters}[kind]
    left = {"macs": pruner.cost.macs, "params": pruner.cost.params, "filters": pruner.filters}[kind]
    assert 0.55 * total < left <= 0.6 * total
    assert all(int(pruner.kept[g.start : g.start + g.size].sum()) >= floors[g.name] for g in pruner.graph.groups)


def check_untouched(pruner: Pruner, call: Callable[[], Any], error: type[Exception], message: str) -> None:
    state, kept = copy.deepcopy(pruner.model.state_dict()), pruner.kept.clone()
    with pytest.raises(error, match=message):
        call()
    now = pruner.model.state_dict()
    assert list(now) == list(state)
    assert all(torch.equal(now[name], state[name]) for name in state)
    assert torch.equal(pruner.kept, kept)


def small_pruner(score: Any = "taylor", **options: Any) -> Pruner:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 1), nn.Conv2d(6, 2, 1))
    return Pruner(model, IMAGES, score=score, **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fraction": 0}, "above 0 and at most 1, got 0"),
        ({"fraction": 1.5}, "above 0 and at most 1, got 1.5"),
        ({"fraction": float("nan")}, "got nan"),
        ({}, "say how much to prune"),
        ({"keep_macs": 0.5, "keep_params": 0.5}, "one budget at a time: got keep_macs and keep_params"),
        ({"keep_macs": 1.2}, "keep_macs is a share, above 0 and at most 1, got 1.2"),
        ({"keep_filters": 0}, "keep_filters is a share"),
        ({"fraction": 0.5}, "the score has seen no gradient"),
    ],
)
def test_wrong_arguments_change_nothing(arguments: dict[str, float], message: str) -> None:
    pruner = small_pruner()
    check_untouched(pruner, lambda: pruner.prune(**arguments), secateur.InvalidSetting, message)


def test_a_wrong_optimizer_score_or_order_of_calls_changes_nothing() -> None:
    pruner = small_pruner()
    check_untouched(pruner, pruner.observe, secateur.InvalidSetting, "no gate has a gradient")
    phis = {id(phi) for phi in pruner.gates.phis}
    optimizer = torch.optim.SGD([p for p in pruner.model.parameters() if id(p) not in phis], lr=0.1)
    pruner.model(IMAGES).square().mean().backward()
    pruner.observe()
    lacking = lambda: pruner.prune(fraction=0.5, optimizer=optimizer)  # noqa: E731
    check_untouched(pruner, lacking, secateur.InvalidOptimizer, r"lacks 2 gates, '1\.gate_phi' first")

    with pytest.raises(secateur.UnknownName, match="no rank 'score_per_macs'; did you mean 'score_per_mac'"):
        small_pruner(rank="score_per_macs")


class Given(Score):
    """Gives what it was given."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def end(self) -> torch.Tensor:
        return self.values


@pytest.mark.parametrize(
    ("values", "got"),
    [
        ([0.5] * 14, "got list;"),
        (None, "got NoneType;"),
        (torch.rand(13), r"got Tensor of torch\.float32 and shape \(13,\);"),
        (torch.rand(14, 1), r"shape \(14, 1\);"),
        (torch.rand(14).to(torch.complex64), "complex64"),
        (torch.arange(14.0).div(0), "NaN for 1 of the 14 channels"),
    ],
)
def test_what_is_no_score_is_told_by_name(values: Any, got: str) -> None:
    pruner = small_pruner(Given(values))
    check_untouched(pruner, lambda: pruner.prune(0.5), secateur.InvalidSetting, f"score Given .*{got}")


@pytest.mark.parametrize(
    "change", [torch.Tensor.half, torch.Tensor.long, lambda t: t.requires_grad_(), lambda t: t - 99]
)
def test_scores_are_numbers_of_any_kind(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    pruner = small_pruner(Given(change(torch.arange(14.0))))
    pruner.prune(fraction=0.2)
    assert pruner.kept.tolist() == [False] * 3 + [True] * 11


def test_negative_scores_cannot_be_divided_by_what_is_saved() -> None:
    pruner = small_pruner(Given(torch.arange(14.0) - 3), rank="score_per_mac")
    check_untouched(pruner, lambda: pruner.prune(0.5), secateur.InvalidSetting, "rank=score_per_mac .* scores, as -3: ")


def test_a_score_without_an_end_is_named() -> None:
    with pytest.raises(NotImplementedError, match="Score does not say what channels are worth"):
        small_pruner(Score()).prune(0.5)


def test_an_unreachable_budget_says_how_far_it_goes_and_why() -> None:
    pruner = small_pruner(Fixed(), min_ratio=0.5)
    message = (
        r"keep_filters=0\.3 cannot be reached: with every group at its floor 56\.2% of the filters are left.* keeps "
    )
    check_untouched(pruner, lambda: pruner.prune(keep_filters=0.3), secateur.UnreachableBudget, message + "4 of 8")
    held = small_pruner(Fixed(), at_least={"*": 1.0})
    check_untouched(held, lambda: held.prune(keep_filters=0.3), secateur.UnreachableBudget, "or at_least$")
    bare = small_pruner(Fixed(), min_ratio=0.0)
    bare_end = "Remedy: keep more; nothing else can be removed$"
    check_untouched(bare, lambda: bare.prune(keep_filters=0.1), secateur.UnreachableBudget, bare_end)
    assert pruner.prune(keep_filters=0.57).met
    assert [int(pruner.kept[:8].sum()), int(pruner.kept[8:].sum())] == [4, 3]
