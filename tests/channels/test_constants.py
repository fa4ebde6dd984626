"""Code that reads a constant does not depend on values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import secateur
from secateur.channels.example import Example
from secateur.channels.probe import Probe
from secateur.channels.subject import DoesNotRun, Subject

PICTURE = torch.rand(1, 3, 8, 8)
NOTE = "the code depends on values"


class Reads(nn.Module):
    """Reads a number from a tensor that is a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 2, 1)
        self.strides: Any = torch.tensor([2.0, 4.0])

    def keep(self, x: Tensor) -> None:
        """What the pass leaves behind."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for stride in self.strides:
            x = x * x.new_full((1,), stride)
        self.keep(x)
        return self.last(x)


class Rebinds(Reads):
    def keep(self, x: Tensor) -> None:
        self.strides = x.mean((0, 2, 3))[:2]


class Writes(Reads):
    def keep(self, x: Tensor) -> None:
        self.strides[0] = x.mean()


class FromInput(Reads):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) * x.new_full((1,), float(x.mean())))


class FromBuffer(Reads):
    def __init__(self) -> None:
        super().__init__()
        del self.strides
        self.register_buffer("strides", torch.tensor([2.0, 4.0]))


class Mixed(Reads):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) * x.new_full((1,), self.strides[0] * x.mean()))


def test_a_constant_is_not_a_value() -> None:
    graph = secateur.analyze(Reads(), PICTURE)
    assert [group.name for group in graph.groups] == ["first"]
    assert not graph.notes
    assert not graph.partial


@pytest.mark.parametrize("kind", [Rebinds, Writes, FromInput, FromBuffer, Mixed])
def test_what_a_pass_or_training_may_change_is_one(kind: type[Reads]) -> None:
    graph = secateur.analyze(kind(), PICTURE)
    assert any(note.startswith(NOTE) for note in graph.notes)


def test_the_attribute_is_left_as_it_was() -> None:
    model = Rebinds()
    kept = model.strides
    secateur.analyze(model, PICTURE)
    assert model.strides is kept
    assert kept.tolist() == [2.0, 4.0]


class Inverts(nn.Module):
    """Fails on zeros, not because of a size."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        gram = x.flatten(2) @ x.flatten(2).transpose(1, 2)
        return self.last(x) * torch.linalg.inv(gram.mean((1, 2)).view(1, 1, 1)).view(1, 1, 1, 1)


class Views(Inverts):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).view(1, 8, 8, 8))


def subject_of(model: nn.Module) -> tuple[Subject, secateur.ChannelGraph]:
    graph = secateur.analyze(model, PICTURE, probe=False)
    return Subject(model.eval(), {"eval": [Example.of(PICTURE)]}, reads_values=False), graph


@pytest.mark.parametrize(("model", "certain"), [(Inverts(), False), (Views(), True)])
def test_only_errors_of_sizes_are_certain_without_the_arithmetic(model: nn.Module, certain: bool) -> None:
    subject, graph = subject_of(model)
    plan = secateur.Plan.random(graph, 0.5)
    with pytest.raises(DoesNotRun) as raised:
        subject.runs_of(plan)
    assert raised.value.certain is certain
    failure = Probe(subject, graph, print).runs(plan)
    assert (failure is not None) is certain


def test_the_same_cuts_are_tried_once() -> None:
    class Counts(Reads):
        passes = 0

        def keep(self, x: Tensor) -> None:
            Counts.passes += 1

    subject, graph = subject_of(Counts())
    before, plan = Counts.passes, secateur.Plan.keep(graph, {"first": [0, 1, 2]})
    assert Probe(subject, graph, print).runs(plan) is None
    assert Counts.passes == before + 1
    assert Probe(subject, graph, print).runs(secateur.Plan.keep(graph, {"first": [0, 1, 2]})) is None
    assert Counts.passes == before + 1
    assert Probe(subject, graph, print).runs(secateur.Plan.keep(graph, {"first": [0, 1, 3]})) is None
    assert Counts.passes == before + 2
