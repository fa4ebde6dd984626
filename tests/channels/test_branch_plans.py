"""Plans that remove branches: checked, saved, applied in steps, and with an optimizer."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

import secateur
from secateur import Plan
from secateur.channels.cuts import Cuts
from secateur.channels.shrink import cut_
from secateur.channels.subject import perturb_
from secateur.errors import InvalidSetting, SecateurError
from secateur.models.resnet_cifar import CifarResNet

PICTURE = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


class Sum(nn.Module):
    """A block with two addends of equal standing, perhaps with a sigmoid on the second."""

    def __init__(self, function: Callable[[Tensor], Tensor] = F.relu) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding=1)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) + self.function(self.two(x))


def with_sum(*function: Callable[[Tensor], Tensor]) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 1), Sum(*function), nn.Flatten(), nn.Linear(8 * 32 * 32, 2))


def test_where_either_addend_may_go_it_is_the_larger() -> None:
    (branch,) = secateur.analyze(with_sum(), PICTURE[:1]).branches
    sizes = {name: sum(p.numel() for p in with_sum()[1].get_submodule(name).parameters()) for name in ("one", "two")}
    assert branch.modules == [f"1.{max(sizes, key=lambda name: sizes[name])}"]


def test_names_and_lists_are_checked() -> None:
    graph = secateur.analyze(CifarResNet(14), PICTURE[:1])
    with pytest.raises(InvalidSetting, match=r"no branch 'stage1\.9'.*'stage1\.0'"):
        Plan.keep(graph, {}, without=["stage1.9"])
    with pytest.raises(InvalidSetting, match="not a list of names"):
        Plan.keep(graph, {}, without="stage1.0")
    with pytest.raises(InvalidSetting, match="not a list of names"):
        Plan(graph, graph.all_kept(), frozenset([1]))  # pyright: ignore
    stays = secateur.analyze(with_sum(torch.sigmoid), PICTURE[:1])
    with pytest.raises(InvalidSetting, match="the branch of '1' must stay: got a network without it differs"):
        Plan.keep(stays, {}, without=["1"])


def test_groups_within_a_branch_do_not_matter() -> None:
    graph = secateur.analyze(CifarResNet(14), PICTURE[:1])
    (inner,) = graph.branch("stage1.1").groups
    plan = Plan.keep(graph, {inner: [0]}, without=["stage1.1"])
    assert plan.groups == {}
    assert not plan.kept[graph.group(inner).span].any()
    assert plan.cost == Plan.keep(graph, {}, without=["stage1.1"]).cost == graph.cost(without=["stage1.1"])
    assert not any(tensor.startswith("stage1.1.") for tensor, *_ in plan.slices())
    kept = plan.kept
    assert Plan(graph, kept, plan.without).groups == {}
    assert Plan(graph, kept).without == plan.without


def test_a_plan_as_json() -> None:
    graph = secateur.analyze(CifarResNet(14), PICTURE[:1])
    plan = Plan.keep(graph, {"conv1": [0, 1, 5]}, without=["stage1.1", "stage3.0"])
    again = Plan.from_json(graph, plan.to_json())
    assert again.without == plan.without
    assert torch.equal(again.kept, plan.kept)
    assert repr(plan).endswith("2 branches removed)")
    assert str(plan).endswith("removed branches: stage1.1, stage3.0")
    whole = Plan.keep(graph, {})
    assert "branches" not in whole.to_dict()
    assert "blocks" not in whole.to_dict()["cuts"]
    assert whole.to_dict()["version"] == 2
    assert "removed" not in repr(whole)


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: plan.update(branches="stage1.1"),
        lambda plan: plan.update(branches=[1]),
        lambda plan: plan.pop("branches"),
        lambda plan: plan["cuts"].update(blocks=[{}]),
        lambda plan: plan["cuts"]["blocks"][0].update(block=3),
        lambda plan: plan["cuts"]["blocks"][0].update(tensors="all"),
        lambda plan: plan["cuts"]["blocks"][0].update(left=[["relu", "system", [], False]]),
        lambda plan: plan["cuts"]["blocks"][0].update(left=[["relu", "relu", ["rm"], False]]),
        lambda plan: plan["cuts"]["blocks"][0].update(left=[["relu", "relu", [1, 2, 3], False]]),
        lambda plan: plan["cuts"]["blocks"][0].update(left=[["forward", None, [], False]]),
    ],
)
def test_a_damaged_plan_is_refused(change: Callable[[dict], Any]) -> None:
    graph = secateur.analyze(CifarResNet(14), PICTURE[:1], probe=False)
    data = Plan.keep(graph, {}, without=["stage1.1"]).to_dict()
    change(data)
    with pytest.raises(InvalidSetting, match="damaged"):
        Plan.from_json(graph, data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block": "stage9"}, "is missing"),
        ({"left": [["conv9", None, [], False]]}, "no such child"),
        ({"left": [["conv1", None, [], True]]}, "no such child"),
        ({"left": [["conv1", None, [], False]]}, "other tensors"),
        ({"tensors": []}, "other tensors"),
    ],
)
def test_cuts_of_another_network_change_nothing(change: dict[str, Any], message: str) -> None:
    model = CifarResNet(14)
    graph = secateur.analyze(model, PICTURE[:1], probe=False)
    data = Plan.keep(graph, {"conv1": [0, 1, 5]}, without=["stage1.1"]).cuts().to_dict()
    data["blocks"][0].update(change)
    before = copy.deepcopy(model)
    with pytest.raises(InvalidSetting, match=message):
        cut_(model, Cuts.from_dict(data))
    assert repr(model) == repr(before)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_the_optimizer_lets_go(kind: type[torch.optim.Optimizer]) -> None:
    torch.manual_seed(0)
    model = CifarResNet(14)
    graph = secateur.analyze(model, PICTURE[:1])
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind(model.parameters(), lr=0.01, **options)

    def step() -> None:
        model(PICTURE).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    plan = Plan.keep(graph, {"conv1": range(7)}, without=["stage1.1", "stage2.0"])
    lost = [p for name, p in model.named_parameters() if name in plan.gone]
    assert secateur.shrink_(model, plan, optimizer) is model
    left = list(model.parameters())
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert [id(p) for p in held] == [id(p) for p in left]
    assert lost
    assert not any(p in optimizer.state for p in lost)
    weights = copy.deepcopy(model.state_dict())
    saved = copy.deepcopy(optimizer.state_dict())
    step()
    after = copy.deepcopy(model.state_dict())
    # The same as a new optimizer with the state of the parameters that are left.
    model.load_state_dict(weights)
    optimizer = kind(model.parameters(), lr=0.01, **options)
    optimizer.load_state_dict(saved)
    step()
    assert all(torch.equal(value, after[name]) for name, value in model.state_dict().items())


def test_since() -> None:
    model = CifarResNet(14).eval()
    perturb_(model)
    graph = secateur.analyze(model, PICTURE[:1])
    first = Plan.keep(graph, {"conv1": range(9)}, without=["stage2.1"])
    second = Plan.keep(graph, {"conv1": range(5)}, without=["stage2.1", "stage1.0"])
    small = secateur.shrink(model, second)
    steps = secateur.shrink_(secateur.shrink(model, first), second, since=first)
    assert repr(steps) == repr(small)
    assert torch.equal(steps(PICTURE), small(PICTURE))
    with pytest.raises(InvalidSetting, match=r"removed before: stage2\.1"):
        Plan.keep(graph, {"conv1": range(5)}).cuts(first)
    with pytest.raises(SecateurError):
        secateur.shrink_(secateur.shrink(model, first), second)


def test_training_goes_on_in_place_activations_and_modes() -> None:
    """The activation that is left does not write into what the block is given, which others read."""
    model = torchvision.models.resnet18(weights=None, num_classes=4)
    graph = secateur.analyze(model, PICTURE[:1])
    small = secateur.shrink(model.train(), Plan.keep(graph, {}, without=["layer1.0", "layer2.0"]))
    assert not small.layer1[0].relu.inplace
    assert model.layer1[0].relu.inplace
    assert all(module.training for module in small.modules())
    x = torch.randn(2, 64, 8, 8)
    before = x.clone()
    small.layer1[0](x)
    assert torch.equal(x, before)
    small(PICTURE).sum().backward()
    assert all(p.grad is not None for p in small.parameters())
    assert all(not module.training for module in secateur.shrink(model.eval(), Plan.keep(graph, {})).modules())
