"""Plans are plain data, checked against the graph."""

import json

import pytest
import torch
from torch import nn

import secateur
from secateur import Plan

IMAGE = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def graph() -> secateur.ChannelGraph:
    model = nn.Sequential(
        nn.Conv2d(3, 10, 3), nn.BatchNorm2d(10), nn.Conv2d(10, 2, 3, bias=False), nn.BatchNorm2d(2), nn.Conv2d(2, 5, 1)
    )
    return secateur.analyze(model, IMAGE)


def test_keep_names_what_stays(graph: secateur.ChannelGraph) -> None:
    plan = Plan.keep(graph, {"0": [0, 9, 4]})
    assert plan.groups == {"0": [0, 4, 9]} == Plan.keep(graph, {"0": torch.tensor([4, 0, 9])}).groups
    assert plan.groups == Plan.keep(graph, {"0": list(torch.tensor([4, 0, 9]).numpy())}).groups
    assert list(plan.slices()) == [
        ("0.weight", 0, [1, 2, 3, 5, 6, 7, 8], "produces"),
        ("0.bias", 0, [1, 2, 3, 5, 6, 7, 8], "produces"),
        ("1.weight", 0, [1, 2, 3, 5, 6, 7, 8], "passes"),
        ("1.bias", 0, [1, 2, 3, 5, 6, 7, 8], "passes"),
        ("2.weight", 1, [1, 2, 3, 5, 6, 7, 8], "consumes"),
        ("1.running_mean", 0, [1, 2, 3, 5, 6, 7, 8], "passes"),
        ("1.running_var", 0, [1, 2, 3, 5, 6, 7, 8], "passes"),
    ]


def test_a_number_is_no_list_of_channels(graph: secateur.ChannelGraph) -> None:
    with pytest.raises(secateur.InvalidPlan, match="to keep of group '0' are a list of numbers, got 4"):
        Plan.keep(graph, {"0": 4})  # pyright: ignore


@pytest.mark.parametrize(("fraction", "left"), [(0.0, (10, 2)), (0.04, (9, 1)), (0.3, (7, 1)), (0.99, (1, 1))])
def test_drop_rounds_to_the_nearest_and_leaves_one(
    graph: secateur.ChannelGraph, fraction: float, left: tuple[int, int]
) -> None:
    plan = Plan.random(graph, fraction)
    assert (int(plan.kept[:10].sum()), int(plan.kept[10:].sum())) == left


def test_drop_is_the_same_for_the_same_seed(graph: secateur.ChannelGraph) -> None:
    assert Plan.random(graph, 0.5, seed=1).groups == Plan.random(graph, 0.5, seed=1).groups
    assert Plan.random(graph, 0.5, seed=1).groups != Plan.random(graph, 0.5, seed=2).groups


def test_json_there_and_back(graph: secateur.ChannelGraph) -> None:
    plan = Plan.random(graph, 0.5)
    assert json.loads(plan.to_json())["version"] == 2
    assert torch.equal(Plan.from_json(graph, plan.to_json()).kept, plan.kept)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"0": [10]}, "group '0' has channels 0 to 9, but the plan keeps 10"),
        ({"0": [-1]}, "but the plan keeps -1"),
        ({"0": [True]}, "are numbers, got a mask: pass mask.nonzero"),
        ({"0": [0, 2, 0]}, "keeps a channel of group '0' twice"),
        ({"0": torch.ones(10) > 0}, "are numbers, got a mask: pass mask.nonzero"),
        ({"0": []}, "would leave nothing of 0; keep at least one channel of group '0'"),
        ({"4": [0]}, "the channels of '4' must stay: each reaches the model's output"),
    ],
)
def test_illegal_plans_are_refused_with_names(graph: secateur.ChannelGraph, groups: dict, message: str) -> None:
    with pytest.raises(secateur.InvalidPlan, match=message):
        Plan.keep(graph, groups)


def test_an_unknown_group_suggests_the_nearest() -> None:
    model = nn.Sequential()
    model.add_module("stem", nn.Conv2d(3, 10, 3))
    model.add_module("head", nn.Conv2d(10, 2, 3))
    graph = secateur.analyze(model, IMAGE)
    with pytest.raises(secateur.InvalidSetting) as caught:
        Plan.keep(graph, {"stemm": [0]})
    assert "'stem'" in caught.value.remedy


def test_a_plan_does_not_follow_the_selection_it_was_made_from(graph: secateur.ChannelGraph) -> None:
    kept = graph.all_kept()
    plan = Plan(graph, kept)
    kept[0] = False
    assert bool(plan.kept.all())


def test_a_selection_that_empties_a_layer_is_refused(graph: secateur.ChannelGraph) -> None:
    kept = graph.all_kept()
    kept[:10] = False
    with pytest.raises(secateur.InvalidPlan, match=r"nothing of 0\.bias, 0\.weight, 1\.bias"):
        Plan(graph, kept)
    with pytest.raises(secateur.InvalidPlan, match="one boolean for each of the 12 channels"):
        Plan(graph, torch.ones(3, dtype=torch.bool))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "a plan is JSON, but"),
        ("[]", "this is not a plan"),
        ('{"format": "secateur-plan", "version": 99, "groups": {}}', "this plan has version 99"),
        ('{"format": "secateur-plan", "version": 1, "groups": {"0": {"size": 12, "kept": [0]}}}', "another network"),
        ('{"format": "secateur-plan", "version": 1, "groups": {"0": {"size": 10, "kept": "all"}}}', 'needs "size" and'),
        ('{"format": "secateur-plan", "version": 1, "groups": {"0": {"size": 10, "kept": [0.5]}}}', "keeps 0.5"),
    ],
)
def test_plans_from_elsewhere_are_checked(graph: secateur.ChannelGraph, text: str, message: str) -> None:
    with pytest.raises(secateur.InvalidPlan, match=message):
        Plan.from_json(graph, text)


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_a_fraction_out_of_range_is_refused(graph: secateur.ChannelGraph, fraction: float) -> None:
    with pytest.raises(secateur.InvalidPlan, match="at least 0 and below 1"):
        Plan.random(graph, fraction)


def test_a_concat_layer_may_lose_a_whole_branch_but_not_all() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1)
            self.head = nn.Conv2d(8, 2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.cat([self.left(x), self.right(x)], 1))

    graph = secateur.analyze(Two(), IMAGE)
    offsets = {
        g.name: next(m for m in g.members if m.tensor == "head.weight").indices[:, 0].tolist() for g in graph.groups
    }
    assert offsets == {"left": [0, 1, 2, 3], "right": [4, 5, 6, 7]}
    with pytest.raises(secateur.InvalidPlan, match="left"):
        Plan.keep(graph, {"left": []})
