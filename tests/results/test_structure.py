"""Channels of every layer before and after: compared with the modules themselves."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import DenseNet, ResNet, mobilenet_v2, mobilenet_v3_small, shufflenet_v2_x0_5, squeezenet1_1
from torchvision.models.resnet import Bottleneck

import secateur
from secateur import ChannelGraph, Event, Plan, analyze, classification, shrink
from secateur.models.fcn import Fcn32s
from secateur.models.resnet_cifar import CifarResNet
from secateur.results.structure import Layer, Structure, layers_after, read_structure


class Branches(nn.Module):
    """Concatenation, grouped and depthwise convolutions, linear layers, and one that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 4, 1)
        self.grouped = nn.Conv2d(12, 24, 3, padding=1, groups=4)
        self.again = nn.Conv2d(24, 24, 1)
        self.depthwise = nn.Conv2d(24, 48, 3, padding=1, groups=24)
        self.hidden, self.last = nn.Linear(48, 20), nn.Linear(20, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([torch.relu(self.one(x)), torch.relu(self.other(x))], 1)
        x = torch.relu(self.grouped(x))
        x = torch.relu(self.again(torch.relu(self.again(x))))
        x = torch.relu(self.depthwise(x)).mean((2, 3))
        return self.last(torch.relu(self.hidden(x)))


def transposed(groups: int, out: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.ReLU(),
        nn.ConvTranspose2d(8, out, 3, groups=groups),
        nn.ReLU(),
        nn.Conv2d(out, 2, 1),
    )


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "densenet": lambda: DenseNet(growth_rate=8, block_config=(2, 2, 1, 1), num_init_features=8, num_classes=5),
    "shufflenet": shufflenet_v2_x0_5,
    "mobilenet_v2": lambda: mobilenet_v2(width_mult=0.5),
    "mobilenet_v3": lambda: mobilenet_v3_small(),
    "resnext": lambda: ResNet(Bottleneck, [1, 1, 2, 1], num_classes=5, groups=8, width_per_group=4),
    "squeezenet": squeezenet1_1,
    "resnet20": lambda: CifarResNet(20),
    "padded": lambda: CifarResNet(8, shortcut="pad"),
    "fcn": lambda: Fcn32s(width=0.03),
    "branches": Branches,
    "transposed": transposed(1, 12),
    "transposed depthwise": transposed(8, 8),
}


def random_plan(graph: ChannelGraph, seed: int) -> Plan:
    """Any number of channels of every group."""
    generator = torch.Generator().manual_seed(seed)
    kept = graph.all_kept()
    for group in graph.groups:
        count = int(torch.randint(group.at_least, group.size + 1, (1,), generator=generator))
        chosen = torch.randperm(group.size, generator=generator)[count:]
        kept[group.start + chosen] = False
    return Plan(graph, kept)


def removed_by(plan: Plan) -> dict[str, int]:
    return {group.name: group.size - len(plan.groups.get(group.name, range(group.size))) for group in plan.graph.groups}


def width(module: nn.Module) -> int:
    return module.out_features if isinstance(module, nn.Linear) else module.out_channels  # pyright: ignore


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    kinds = (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}


@pytest.mark.parametrize("name", NETWORKS)
def test_layers_are_as_wide_as_the_modules(name: str) -> None:
    torch.manual_seed(0)
    model = NETWORKS[name]().eval()
    graph = analyze(model, torch.randn(1, 3, 64, 64), probe=False)
    whole = layers_of(model)
    for seed in range(3):
        plan = random_plan(graph, seed)
        found = {layer.name: layer for layer in layers_after(graph.widths, removed_by(plan))}
        cut = layers_of(shrink(model, plan))
        assert {key: (layer.before, layer.after) for key, layer in found.items()} == {
            key: (width(whole[key]), width(cut[key])) for key in found
        }
        # No layer that has become narrower is left out.
        assert {key for key in whole if width(cut[key]) < width(whole[key])} <= set(found)


def test_layers_stand_in_the_order_in_which_they_run() -> None:
    graph = analyze(CifarResNet(8), torch.randn(1, 3, 32, 32), probe=False)
    names = [name for name, *_ in graph.widths]
    assert names[:4] == ["conv1", "stage1.0.conv1", "stage1.0.conv2", "stage2.0.conv1"]
    assert "fc" not in names


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 12, 3),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.Conv2d(12, 16, 3, groups=4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 3),
    )


@pytest.fixture
def task() -> secateur.Task:
    data = [(torch.randn(8, 1, 8, 8), torch.arange(8) % 3) for _ in range(2)]
    return classification(data, data)


def test_a_run_in_progress_is_known_by_its_events(task: secateur.Task, tmp_path: Path) -> None:
    filters, kinds = [], []

    def check(event: Any) -> None:
        if isinstance(event, Event) and event.name != "Finished":
            kinds.append(type(event).__name__)
            filters.append(event.filters)
            layers = read_structure(tmp_path / "run").layers
            assert sum(layer.before - layer.after for layer in layers) == filters[0] - event.filters

    values = {"keep_macs": 0.4, "tick_removes": 0.1, "tock_every": 2, "tock_epochs": 1, "finetune_epochs": 1}
    model, example = small(), torch.randn(1, 1, 8, 8)
    result = secateur.prune(model, example, task, folder=tmp_path / "run", progress=check, **values)
    assert kinds[0] == "Start"
    assert kinds.count("Tick") > 2
    assert not (tmp_path / "run" / "result").exists()
    structure = read_structure(tmp_path / "run")
    whole, cut = layers_of(model), layers_of(result.model)
    assert structure.title == str(tmp_path / "run")
    assert structure.layers == [Layer(name, width(whole[name]), width(cut[name])) for name in ("0", "3")]
    assert any(layer.after < layer.before for layer in structure.layers)
    secateur.save(result, tmp_path / "saved")
    assert read_structure(tmp_path / "saved").layers == structure.layers


def test_as_text() -> None:
    structure = Structure("runs/one", [Layer("conv", 64, 16), Layer("a.longer.name", 8, 8)])
    assert str(structure) == (
        "runs/one\n"
        "layer          before   after   left\n"
        "conv               64      16    25%\n"
        "a.longer.name       8       8   100%"
    )
    assert structure.to_dict() == {
        "title": "runs/one",
        "layers": [
            {"name": "conv", "before": 64, "after": 16},
            {"name": "a.longer.name", "before": 8, "after": 8},
        ],
    }
