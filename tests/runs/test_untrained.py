"""A network that has learned nothing is not pruned in silence."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import secateur
from secateur.runs.phases import looks_random
from secateur.training.task import classification

SETTINGS = secateur.TickTock.one_shot(keep_macs=0.7, finetune_epochs=0)


def network(classes: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes)
    )


class Answers(nn.Module):
    """Gives the first so many of 100 images their class, and all others the next one."""

    def __init__(self, labels: Tensor, right: int) -> None:
        super().__init__()
        self.layers = network(int(labels.max()) + 1)
        said = torch.where(torch.arange(len(labels)) < right, labels, (labels + 1) % (int(labels.max()) + 1))
        self.register_buffer("said", nn.functional.one_hot(said).float())

    def forward(self, images: Tensor) -> Tensor:
        scores = self.layers(images)
        return scores + 100 * self.said if len(images) == 100 and not self.training else scores


def warnings_of(model: nn.Module, train: Sequence[Any], test: Sequence[Any] | None) -> list[str]:
    said: list[Any] = []
    task = secateur.classification(train, test)
    secateur.prune(model, torch.randn(1, 1, 6, 6), task, settings=SETTINGS, progress=said.append)
    places = [i for i, line in enumerate(said) if isinstance(line, str) and line.startswith("warning: ")]
    ticks = [i for i, line in enumerate(said) if isinstance(line, secateur.Event) and line.name.startswith("Tick")]
    assert all(place < min(ticks) for place in places)  # before anything is removed
    return [said[place] for place in places]


@pytest.mark.parametrize(
    ("labels", "right", "warns"),
    [
        (torch.arange(100) % 10, 5, True),
        (torch.arange(100) % 10, 15, True),  # one and a half times chance
        (torch.arange(100) % 10, 16, False),
        (torch.arange(100) % 2, 55, True),
        (torch.arange(100) % 2, 60, False),
        ((torch.arange(100) < 20).long(), 80, True),  # four fifths are of one class
        ((torch.arange(100) < 20).long(), 90, False),
    ],
)
def test_accuracy_near_chance(labels: Tensor, right: int, warns: bool) -> None:
    model = Answers(labels, right)
    batch = [(torch.randn(100, 1, 6, 6), labels)]
    with torch.no_grad():
        model.train()(batch[0][0])  # batch norms that have seen data
    found = warnings_of(model, [(torch.randn(50, 1, 6, 6), labels[:50])], batch)
    assert bool(found) == warns
    if warns:
        chance = 100 * int(torch.bincount(labels).max()) // 100
        assert f"the accuracy of {right}% is near chance" in found[0]
        assert f"gives {chance}%" in found[0]
        assert "train it first" in found[0]


def test_random_weights_without_test_data() -> None:
    batch = [(torch.randn(20, 1, 6, 6), torch.arange(20) % 2)]
    model = network(2)
    assert looks_random(model)
    (found,) = warnings_of(model, batch, None)
    assert "random" in found
    assert "train it first" in found
    with torch.no_grad():
        model.train()(batch[0][0])
    assert not looks_random(model)
    assert warnings_of(model, batch, None) == []


def test_networks_without_statistics_are_not_judged_by_them() -> None:
    assert not looks_random(nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8, track_running_stats=False)))


def test_training_needs_no_warning() -> None:
    said: list[Any] = []
    task = secateur.classification([(torch.randn(20, 1, 6, 6), torch.arange(20) % 2)])
    secateur.train(network(2), torch.randn(1, 1, 6, 6), task, epochs=1, progress=said.append)
    assert not [line for line in said if isinstance(line, str) and "warning" in line]


def test_chance_is_known_once_something_was_tested() -> None:
    labels = torch.tensor([0, 0, 0, 1])
    task = classification([], [(torch.randn(4, 1, 6, 6), labels)])
    assert task.chance is not None
    assert task.chance() is None
    task.metrics(network(2))
    assert task.chance() == 75.0
