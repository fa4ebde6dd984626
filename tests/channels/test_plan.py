"""Plans are plain data, checked against the graph."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import secateur
from secateur import Plan
from secateur.channels.plan import read_plan
from secateur.channels.reasons import Kind, Reason

PICTURE = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def graph() -> secateur.ChannelGraph:
    model = nn.Sequential(
        nn.Conv2d(3, 10, 3), nn.BatchNorm2d(10), nn.Conv2d(10, 2, 3, bias=False), nn.BatchNorm2d(2), nn.Conv2d(2, 5, 1)
    )
    return secateur.analyze(model, PICTURE)


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


@pytest.mark.parametrize(("fraction", "left"), [(0.0, (10, 2)), (0.04, (9, 1)), (0.3, (7, 1)), (0.99, (1, 1))])
def test_random_plans_round_to_the_nearest_and_leaves_one(
    graph: secateur.ChannelGraph, fraction: float, left: tuple[int, int]
) -> None:
    plan = Plan.random(graph, fraction)
    assert (int(plan.kept[:10].sum()), int(plan.kept[10:].sum())) == left


def test_random_plans_are_the_same_for_the_same_seed(graph: secateur.ChannelGraph) -> None:
    assert Plan.random(graph, 0.5, seed=1).groups == Plan.random(graph, 0.5, seed=1).groups
    assert Plan.random(graph, 0.5, seed=1).groups != Plan.random(graph, 0.5, seed=2).groups


def test_json_there_and_back(graph: secateur.ChannelGraph) -> None:
    plan = Plan.random(graph, 0.5)
    for source in (plan.to_json(), plan.to_json().encode(), plan.to_dict()):
        assert torch.equal(Plan.from_json(graph, source).kept, plan.kept)
        assert repr(read_plan(source).cuts) == repr(plan.cuts())


REFUSED: dict[str, tuple[dict[str, Any], str, Any, Any]] = {
    "a number": ({"0": 4}, "group '0'", 4, None),
    "an index that is too large": ({"0": [10]}, "group '0'", 10, "indices from 0 to 9"),
    "a negative index": ({"0": [-1]}, "group '0'", -1, "indices from 0 to 9"),
    "a fraction": ({"0": [0.5]}, "group '0'", 0.5, "indices from 0 to 9"),
    "a mask": ({"0": [True]}, "group '0'", None, "indices"),
    "a mask of torch": ({"0": torch.ones(10) > 0}, "group '0'", None, "indices"),
    "a channel twice": ({"0": [0, 2, 0]}, "group '0'", "[0, 2, 0]", None),
    "nothing": ({"0": []}, "leaves nothing of 0", None, None),
    "a layer that stays": ({"4": [0]}, "'4' must stay", Reason(Kind.OUTPUT), None),
    "an unknown group": ({"00": [0]}, "no group '00'", None, None),
}


@pytest.mark.parametrize("name", REFUSED)
def test_illegal_plans_are_refused(graph: secateur.ChannelGraph, name: str) -> None:
    groups, what, got, wanted = REFUSED[name]
    with pytest.raises(secateur.InvalidSetting) as caught:
        Plan.keep(graph, groups)
    error = caught.value
    assert what in error.what
    assert (error.got, error.wanted) == (got, wanted)


def changed(**values: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda data: {**data, **values}


DAMAGED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "not JSON": lambda data: "{",
    "too deep": lambda data: "[" * 100_000,
    "a list": lambda data: "[]",
    "another format": changed(format="other"),
    "another version": changed(version=1),
    "no groups": changed(groups=None),
    "another size": changed(groups={"0": {"size": 12, "kept": [0]}}),
    "no list of indices": changed(groups={"0": {"size": 10, "kept": "all"}}),
    "no whole numbers": changed(groups={"0": {"size": 10, "kept": [0.5]}}),
    "an index that is too large": changed(groups={"0": {"size": 10, "kept": [10]}}),
    "indices that do not rise": changed(groups={"0": {"size": 10, "kept": [3, 2]}}),
    "no cuts": lambda data: {key: value for key, value in data.items() if key != "cuts"},
    "a negative shape": changed(cuts={"tensors": {"0.weight": {"shape": [-1], "kept": {}}}, "sizes": []}),
    "an axis that is not there": changed(
        cuts={"tensors": {"0.weight": {"shape": [2], "kept": {"3": [0]}}}, "sizes": []}
    ),
    "too few sizes": changed(cuts={"tensors": {}, "sizes": [["0", "groups", None, 1]]}),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_plans_are_refused(graph: secateur.ChannelGraph, name: str) -> None:
    data = DAMAGED[name](Plan.random(graph, 0.5).to_dict())
    with pytest.raises(secateur.InvalidSetting):
        Plan.from_json(graph, data)


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_a_fraction_out_of_range_is_refused(graph: secateur.ChannelGraph, fraction: float) -> None:
    with pytest.raises(secateur.InvalidSetting) as caught:
        Plan.random(graph, fraction)
    assert caught.value.got is fraction


def test_a_plan_does_not_follow_the_selection_it_was_made_from(graph: secateur.ChannelGraph) -> None:
    kept = graph.all_kept()
    plan = Plan(graph, kept)
    kept[0] = False
    assert bool(plan.kept.all())


def test_a_selection_that_empties_a_layer_is_refused(graph: secateur.ChannelGraph) -> None:
    kept = graph.all_kept()
    kept[:10] = False
    with pytest.raises(secateur.InvalidSetting, match=r"nothing of 0\.bias, 0\.weight, 1\.bias"):
        Plan(graph, kept)
    with pytest.raises(secateur.InvalidSetting) as caught:
        Plan(graph, torch.ones(3, dtype=torch.bool))
    assert caught.value.wanted == "12 booleans"


@pytest.mark.parametrize("width", [2, 3])
def test_two_channels_are_left_where_the_code_drops_axes_of_size_one(width: int) -> None:
    class Squeezing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, width, 1), nn.Linear(width, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.conv(x).mean((2, 3), keepdim=True).squeeze())

    graph = secateur.analyze(Squeezing(), PICTURE.expand(2, -1, -1, -1))
    assert Plan.keep(graph, {"conv": [0, 1]}).shape("head.weight") == (2, 2)
    with pytest.raises(secateur.InvalidSetting) as caught:
        Plan.keep(graph, {"conv": [0]})
    assert (caught.value.got, caught.value.wanted) == (1, "at least 2")


def test_a_concat_layer_may_lose_a_whole_branch_but_not_all() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1)
            self.head = nn.Conv2d(8, 2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.cat([self.left(x), self.right(x)], 1))

    graph = secateur.analyze(Two(), PICTURE)
    offsets = {
        g.name: next(m for m in g.members if m.tensor == "head.weight").indices[:, 0].tolist() for g in graph.groups
    }
    assert offsets == {"left": [0, 1, 2, 3], "right": [4, 5, 6, 7]}
    with pytest.raises(secateur.InvalidSetting, match="left"):
        Plan.keep(graph, {"left": []})
