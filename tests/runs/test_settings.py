"""Settings of a run: the paper's values as defaults, flat names, and what is refused."""

import json
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import secateur
from secateur import Budget, Engine, InvalidSetting, Learning, Limits, Schedule, Ticks, TickTock, Tocks, Training
from secateur.pruning.filter_scores import FilterScore
from secateur.settings import InvalidField


def test_the_defaults_are_the_papers() -> None:
    settings = TickTock(budget=Budget(macs=0.4))
    ticks, tocks, learning = settings.ticks, settings.tocks, settings.learning
    assert (ticks.removes, ticks.lr, ticks.epochs, ticks.data) == (0.01, 1e-3, 1, 1.0)
    assert (tocks.every, tocks.epochs, tocks.lr_low, tocks.lr, tocks.first) == (10, 10, 1e-3, 1e-2, False)
    assert (tocks.sparsity, learning.momentum, learning.weight_decay) == (1e-3, 0.9, 1e-4)
    assert (settings.finetune.epochs, settings.finetune.lr_low, settings.finetune.lr) == (40, 1e-3, 1e-2)
    assert (settings.limits.min_channels, settings.limits.min_ratio) == (1, 0.1)


def test_groups_and_flat_names_are_the_same_settings() -> None:
    grouped = TickTock(
        budget=Budget(params=0.3),
        limits=Limits(multiple_of=8),
        ticks=Ticks(removes=0.05),
        tocks=Tocks(every=3, lr=0.1),
        finetune=Schedule(epochs=7),
        learning=Learning(optimizer="adamw"),
        seed=3,
    )
    flat = {"keep_params": 0.3, "multiple_of": 8, "tick_removes": 0.05, "tock_every": 3, "tock_lr": 0.1}
    assert TickTock.of(**flat, finetune_epochs=7, optimizer="adamw", seed=3) == grouped
    assert {**flat, "finetune_epochs": 7, "seed": 3}.items() <= grouped.to_dict().items()
    assert TickTock.of(**grouped.to_dict()) == grouped
    assert Training.of(**Training.of(epochs=3, ema=0.5).to_dict()) == Training.of(epochs=3, ema=0.5)


def test_presets_and_changes() -> None:
    assert TickTock.one_shot(keep_macs=0.2).ticks.removes == 1.0
    changed = TickTock.tick_only(keep_macs=0.2, tick_removes=0.05).but(seed=3)
    assert changed == TickTock.of(keep_macs=0.2, tock_every=0, tick_removes=0.05, seed=3)
    assert changed.but(keep_params=0.5).budget == Budget(params=0.5)  # another budget takes its place


WRONG: list[tuple[dict[str, Any], Any]] = [
    ({"keep_macs": 1.5}, 1.5),
    ({"keep_filters": 0.0}, 0.0),
    ({"tick_removes": 0.0}, 0.0),
    ({"tick_data": 1.1}, 1.1),
    ({"tock_epochs": 0}, 0),
    ({"tock_every": -1}, -1),
    ({"tick_per_class": 0}, 0),
    ({"multiple_of": 10**20}, 10**20),
    ({"latency_batch": 10**20}, 10**20),
    ({"latency_batch": 10**7}, 10**7),
    ({"tock_epochs": 1.5}, "1.5"),
    ({"keep_macs": "0.5"}, "'0.5'"),
    ({"keep_macs": True}, "True"),
    ({"tick_lr": float("nan")}, "nan"),
    ({"finetune_lr": float("inf")}, "inf"),
    ({"distill_temperature": 0}, 0),
    ({"distill": 1.1}, 1.1),
    ({"ema": -0.1}, -0.1),
    ({"tick_removes": None}, "None"),
    ({"tick_per_class": "9"}, "'9'"),
    ({"optimizer": None}, "None"),
    ({"nesterov": "no"}, "'no'"),
    ({"at_least": 3}, "3"),
    ({"tock_milestones": 0.5}, "0.5"),
    ({"finetune_milestones": (0.5, 1.5)}, (0.5, 1.5)),
    ({"finetune_divide": 0}, 0),
    ({"tock_lr": "high"}, "'high'"),
    ({"tock_lr": (0.1, 0.2)}, "(0.1, 0.2)"),
    ({"tock_lr_low": -0.1}, -0.1),
    ({"finetune_lr_low": 0.1}, 0.1),  # above the highest
    ({"seed": 2**64}, 2**64),
    ({"seed": -1}, -1),
    ({"retrain_epochs": -1}, -1),
    ({"latency_batch": 0}, 0),
    ({"rank": "size"}, "'size'"),
    ({"cut": "never"}, "'never'"),
]


@pytest.mark.parametrize(("values", "got"), WRONG, ids=str)
def test_wrong_values_are_refused_by_flat_name(values: dict[str, Any], got: Any) -> None:
    with pytest.raises(InvalidField) as caught:
        TickTock.of(**({} if "keep_filters" in values else {"keep_macs": 0.5}) | values)
    assert (caught.value.name, caught.value.got) == (next(iter(values)), got)
    assert caught.value.wanted


@pytest.mark.parametrize(
    ("values", "got"),
    [
        ({"precision": "fp8"}, "'fp8'"),
        ({"accumulate": "4"}, "'4'"),
        ({"graphs": 1}, "1"),
        ({"accumulate": 0}, 0),
        ({"checkpoint_steps": 0}, 0),
        ({"clip_norm": 0.0}, 0.0),
        ({"clip_norm": float("nan")}, "nan"),
    ],
    ids=str,
)
def test_wrong_values_of_the_engine(values: dict[str, Any], got: Any) -> None:
    with pytest.raises(InvalidField) as caught:
        Engine(**values)
    assert (caught.value.name, caught.value.got) == (next(iter(values)), got)


def test_one_budget_is_needed_and_names_must_exist() -> None:
    with pytest.raises(InvalidSetting) as none:
        TickTock()
    assert "keep_macs" in str(none.value.wanted)
    with pytest.raises(InvalidSetting) as several:
        TickTock.of(keep_macs=0.5, keep_params=0.5)
    assert several.value.got == "macs and params"
    for make in (TickTock.of, TickTock.of(keep_macs=0.5).but):
        with pytest.raises(InvalidSetting) as unknown:
            make(tick_remove=0.1)
        assert "tick_removes" in str(unknown.value.remedy)


def test_numbers_of_numpy_are_plain_data() -> None:
    settings = TickTock.of(keep_macs=numpy.float32(0.5), seed=numpy.int64(3), tock_milestones=[0.5])
    told = json.loads(json.dumps(settings.to_dict()))
    assert (told["keep_macs"], told["seed"], told["tock_milestones"]) == (0.5, 3, [0.5])


class Powered(FilterScore):
    """A score with settings of its own, and a count that is none of them."""

    def __init__(self, power: float, layers: tuple[str, ...] = (), weigh: Any = None) -> None:
        self.power, self._layers, self.weigh = power, layers, weigh
        self.calls = 0

    def worth(self, rows: Tensor) -> Tensor:
        self.calls += 1
        return rows.abs().pow(self.power).sum(1)


@dataclass(eq=False)
class Scaled(FilterScore):
    by: float = 2.0

    def worth(self, rows: Tensor) -> Tensor:
        return self.by * rows.abs().sum(1)


def test_instances_of_a_score_are_told_apart() -> None:
    class Mine(secateur.Score):
        pass

    given = (Mine(), Powered(2, ("fc",)), Powered(3.0, weigh=torch.ones(1)), Scaled(), Scaled(0.5))
    assert [TickTock.of(keep_macs=0.5, score=score).to_dict()["score"] for score in given] == [
        "Mine",
        "Powered(power=2, layers=('fc',), weigh=None)",
        "Powered(power=3.0, layers=())",
        "Scaled(by=2.0)",
        "Scaled(by=0.5)",
    ]
