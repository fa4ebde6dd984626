"""Modules that never run are found, said first, and dropped on request."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import secateur
from secateur.channels.shrink import tensors_of
from secateur.errors import InvalidModel, InvalidSetting
from secateur.files import write_tensors

PICTURE = torch.rand(2, 3, 8, 8)


class Spare(nn.Module):
    """Has a stage and an entry of a list that never run."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 1)
        self.stages = nn.ModuleList([nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)])
        self.spare = nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16))
        self.last = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.stages[0](self.first(x)))


class InTraining(Spare):
    def forward(self, x: Tensor) -> Any:
        features = self.first(x)
        return (self.last(features), self.spare(features)) if self.training else self.last(self.stages[0](features))


class FailsInTraining(Spare):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            raise ValueError("no targets")
        return super().forward(x)


class Asks(Spare):
    """Needs what it does not run."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * len(self.spare)


class Shared(Spare):
    """Uses the weight of a module that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Sequential(nn.Conv2d(8, 8, 1))  # pyright: ignore

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.spare[0].weight
        return self.last(self.stages[0](nn.functional.conv2d(self.first(x), weight)))


def test_the_outermost_modules_are_named() -> None:
    graph = secateur.analyze(Spare(), PICTURE)
    assert graph.unused == ("stages.1", "spare")
    assert graph.to_dict()["unused"] == ["stages.1", "spare"]


def test_they_are_said_first() -> None:
    first, remedy, total, *rest = str(secateur.analyze(Spare(), PICTURE)).splitlines()
    # 72 of stages.1, 1168 of the convolution and 32 of the norm of spare; 32 + 72 + 18 of the others.
    assert first == "Never runs: 3 layers with 24 filters and 91% of the parameters, in stages.1, spare"
    assert "secateur.drop_unused_(model, graph)" in remedy
    assert total.startswith("Input 2x3x8x8")
    assert not any("is not used" in line for line in rest)


def test_a_network_without_any_says_nothing() -> None:
    graph = secateur.analyze(nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 2, 1)), PICTURE)
    assert graph.unused == ()
    assert str(graph).startswith("Input ")


@pytest.mark.parametrize(
    ("kind", "unused"), [(InTraining, ("stages.1",)), (FailsInTraining, ()), (Shared, ("stages.1",))]
)
def test_what_may_run_is_not_named(kind: type[nn.Module], unused: tuple[str, ...]) -> None:
    assert secateur.analyze(kind(), PICTURE).unused == unused


def test_dropping_changes_nothing_but_the_size() -> None:
    model = Spare()
    expected, before = model(PICTURE), dict(model.named_parameters())
    graph = secateur.analyze(model, PICTURE)
    assert secateur.drop_unused_(model, graph) is model
    assert torch.equal(model(PICTURE), expected)
    assert {name for name, _ in model.named_parameters()} == {
        name for name in before if not name.startswith(("spare.", "stages.1."))
    }
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    again = secateur.analyze(model, PICTURE)
    assert again.unused == ()
    assert not again.partial
    assert [group.name for group in again.groups] == [group.name for group in graph.groups]
    with pytest.raises(InvalidSetting):
        secateur.drop_unused_(model, graph)


def test_what_the_code_needs_stays() -> None:
    model = Asks()
    graph = secateur.analyze(model, PICTURE)
    assert "spare" in graph.unused
    before = list(model.state_dict())
    with pytest.raises(InvalidModel):
        secateur.drop_unused_(model, graph)
    assert list(model.state_dict()) == before


def test_a_result_without_them_is_loaded_with_a_builder_that_drops_them(tmp_path: Any) -> None:
    def build() -> nn.Module:
        model = Spare()
        return secateur.drop_unused_(model, secateur.analyze(model, PICTURE, probe=False))

    model = build()
    graph = secateur.analyze(model, PICTURE)
    plan = secateur.Plan.random(graph, 0.5)
    smaller = secateur.shrink(model, plan).eval()
    (tmp_path / "plan.json").write_text(plan.to_json())
    write_tensors(tmp_path / "model.safetensors", tensors_of(smaller))
    loaded = secateur.load(tmp_path, build=build)
    assert torch.equal(loaded(PICTURE), smaller(PICTURE))
