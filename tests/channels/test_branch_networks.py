"""Branches of networks that people use, alone, all together, and with channels."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torchvision
from branched import PICTURE, names, scrambled, zeroed
from torch import nn

import secateur
from secateur import Plan
from secateur.channels.cuts import Cuts
from secateur.channels.shrink import cut_, tensors_of
from secateur.models.resnet_cifar import CifarResNet


def tv(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(torchvision.models, name)(weights=None, num_classes=7, **options)


def tm(name: str) -> Callable[[], nn.Module]:
    return lambda: timm.create_model(name, num_classes=7)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "resnet18": (tv("resnet18"), [f"layer{i}.{j}" for i in range(1, 5) for j in range(2)]),
    "resnet50": (
        tv("resnet50", width_per_group=16),
        [f"layer{i}.{j}" for i, n in zip(range(1, 5), (3, 4, 6, 3), strict=True) for j in range(n)],
    ),
    "mobilenet_v2": (tv("mobilenet_v2"), [f"features.{i}" for i in (3, 5, 6, 8, 9, 10, 12, 13, 15, 16)]),
    "efficientnet_b0": (
        tv("efficientnet_b0", stochastic_depth_prob=0.0),
        [f"features.{i}" for i in ("2.1", "3.1", "4.1", "4.2", "5.1", "5.2", "6.1", "6.2", "6.3")],
    ),
    "regnet_y_400mf": (
        tv("regnet_y_400mf"),
        [f"trunk_output.block{i}.block{i}-{j}" for i, n in enumerate((1, 3, 6, 6), 1) for j in range(n)],
    ),
    "convnext_tiny": (
        tv("convnext_tiny", stochastic_depth_prob=0.0),
        [f"features.{i}.{j}" for i, n in zip((1, 3, 5, 7), (3, 3, 9, 3), strict=True) for j in range(n)],
    ),
    "densenet121": (tv("densenet121"), []),
    "cifar": (lambda: CifarResNet(20), [f"stage{i}.{j}" for i in (1, 2, 3) for j in range(3)]),
    "cifar, padded": (lambda: CifarResNet(14, shortcut="pad"), [f"stage{i}.{j}" for i in (1, 2, 3) for j in range(2)]),
    "timm resnet10t": (tm("resnet10t"), [f"layer{i}.0" for i in range(1, 5)]),
    "timm seresnet18": (tm("legacy_seresnet18"), [f"layer{i}.{j}" for i in range(1, 5) for j in range(2)]),
    "timm efficientnet_lite0": (
        tm("efficientnet_lite0"),
        [f"blocks.{i}" for i in ("1.1", "2.1", "3.1", "3.2", "4.1", "4.2", "5.1", "5.2", "5.3")],
    ),
    "timm vit": (tm("vit_tiny_patch16_224"), []),
}


EVERY_DAY = {"cifar", "cifar, padded", "timm resnet10t"}


@pytest.mark.parametrize("name", [n if n in EVERY_DAY else pytest.param(n, marks=pytest.mark.slow) for n in NETWORKS])
def test_known_networks(name: str) -> None:
    make, expected = NETWORKS[name]
    torch.manual_seed(0)
    model = scrambled(make()).eval()
    x = torch.randn(2, 3, 224, 224) if "vit" in name else PICTURE
    graph = secateur.analyze(model, x[:1])
    assert [each for each in names(graph) if "#" not in each] == expected
    chosen = random.Random(0).sample(graph.branches, min(3, len(graph.branches)))
    for each in chosen:
        plan = Plan.keep(graph, {}, without=[each.name])
        small = secateur.shrink(model, plan)
        assert plan.cost.params == sum(p.numel() for p in small.parameters())
        assert plan.cost == secateur.analyze(small, x[:1], probe=False).cost()
        with torch.no_grad():
            got = small.eval()(x)
        torch.testing.assert_close(got, zeroed(model, graph, each.name, x), atol=1e-5, rtol=1e-4)
    everything = Plan.keep(graph, {}, without=expected)
    assert secateur.verify(model, everything, x).agrees
    assert not set(everything.gone) & set(tensors_of(secateur.shrink(model, everything)))


@pytest.mark.slow
def test_random_plans_of_channels_and_branches() -> None:
    torch.manual_seed(1)
    for make in (tv("resnet18"), tv("mobilenet_v2"), lambda: CifarResNet(14, shortcut="pad")):
        model = scrambled(make())
        graph = secateur.analyze(model, PICTURE[:1])
        for seed in range(3):
            chance, blocks = random.Random(seed), set[str]()
            without = []
            for each in chance.sample(graph.branches, len(graph.branches) // 2):
                without += [] if each.block in blocks else [each.name]
                blocks.add(each.block)
            plan = Plan(graph, Plan.random(graph, 0.4, seed).kept, frozenset(without))
            result = secateur.verify(model, plan, PICTURE)
            assert result.exact
            assert result.agrees
            small = secateur.shrink(model, plan)
            assert plan.cost == secateur.analyze(small, PICTURE[:1], probe=False).cost()
            assert plan.cost.params == sum(p.numel() for p in small.parameters())
            again = cut_(copy.deepcopy(model), Cuts.from_dict(plan.cuts().to_dict()))
            assert torch.equal(again.eval()(PICTURE), small.eval()(PICTURE))
