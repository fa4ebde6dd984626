"""Settings: the paper's values, and what is refused."""

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from small import SIZE, batches, prepared, quick
from torch import Tensor, nn

import secateur
from secateur import InvalidModel, InvalidSetting, InvalidTask, Task, TickTock, UnknownName, UnreachableBudget
from secateur.pruning.scores import OfFilters


def test_the_defaults_are_the_papers() -> None:
    settings = TickTock(keep_macs=0.4)
    assert (settings.tick_removes, settings.tick_lr, settings.tick_epochs, settings.tick_data) == (0.01, 1e-3, 1, 1.0)
    assert (settings.ticks_per_tock, settings.tock_epochs, settings.tock_lr) == (10, 10, (1e-3, 1e-2))
    assert (settings.sparsity, settings.momentum, settings.weight_decay) == (1e-3, 0.9, 1e-4)
    assert (settings.finetune_epochs, settings.finetune_lr) == (40, (1e-3, 1e-2))
    assert (settings.min_channels, settings.min_ratio, settings.tock_first) == (1, 0.1, False)


def test_presets_and_changes() -> None:
    assert TickTock.one_shot(keep_macs=0.2).tick_removes == 1.0
    assert TickTock.tick_only(keep_macs=0.2, tick_removes=0.05).but(seed=3) == TickTock(
        keep_macs=0.2, ticks_per_tock=0, tick_removes=0.05, seed=3
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "one budget is needed: .* got none"),
        ({"keep_macs": 0.5, "keep_params": 0.5}, "got keep_macs and keep_params"),
        ({"keep_macs": 1.5}, "keep_macs is the share that is left, above 0 and at most 1, got 1.5"),
        ({"keep_filters": 0.0}, "keep_filters is the share"),
        ({"keep_macs": 0.5, "tick_removes": 0.0}, "tick_removes is a share"),
        ({"keep_macs": 0.5, "tick_data": 1.1}, "tick_data is a share"),
        ({"keep_macs": 0.5, "tock_epochs": 0}, "tock_epochs must be 1 or more, got 0"),
        ({"keep_macs": 0.5, "ticks_per_tock": -1}, "ticks_per_tock must not be negative"),
        ({"keep_macs": 0.5, "tick_per_class": 0}, "tick_per_class must be 1 or more"),
        ({"keep_macs": 0.5, "tock_epochs": 1.5}, "tock_epochs must be a whole number, got 1.5"),
        ({"keep_macs": "0.5"}, "keep_macs must be a number, got '0.5'"),
        ({"keep_macs": True}, "keep_macs must be a number, got True"),
        ({"keep_macs": 0.5, "tick_lr": float("nan")}, "tick_lr must be a number, got nan"),
        ({"keep_macs": 0.5, "finetune_lr": (0.0, float("inf"))}, "finetune_lr is the lowest and the highest rate"),
        ({"keep_macs": 0.5, "distill_temperature": 0}, "distill_temperature must be above 0, got 0"),
        ({"keep_macs": 0.5, "tick_removes": None}, "tick_removes must be a number, got None"),
        ({"keep_macs": 0.5, "tick_per_class": "9"}, "tick_per_class must be a whole number, got '9'"),
        ({"keep_macs": 0.5, "optimizer": None}, "optimizer must be text, got None"),
        ({"keep_macs": 0.5, "nesterov": "no"}, "nesterov must be True or False, got 'no'"),
        ({"keep_macs": 0.5, "at_least": 3}, "at_least must be numbers by name of a layer, got 3"),
        ({"keep_macs": 0.5, "milestones": 0.5}, "milestones are shares of the epochs, .*, got 0.5 and 10.0"),
        ({"keep_macs": 0.5, "tock_lr": ("low", "high")}, "tock_lr is the lowest and the highest rate"),
        ({"keep_macs": 0.5, "finetune_lr": 0.01}, "finetune_lr is the lowest and the highest rate, .*, got 0.01"),
        ({"keep_macs": 0.5, "tock_lr": (0.1, 0.2, 0.3)}, "tock_lr is the lowest and the highest rate"),
        ({"keep_macs": 0.5, "tock_lr": (-0.1, 0.2)}, "tock_lr is the lowest and the highest rate"),
        ({"keep_macs": 0.5, "finetune_lr": (0.1, 0.01)}, r"finetune_lr is the lowest .*, got \(0.1, 0.01\)"),
        ({"keep_macs": 0.5, "seed": 2**64}, "seed must be at least 0 and below"),
        ({"keep_macs": 0.5, "rank": "size"}, "rank must be one of auto, score, .*, got 'size'"),
        ({"keep_macs": 0.5, "cut": "never"}, "cut must be one of auto, now, end"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSetting, match=message):
        TickTock(**settings)


def test_numbers_of_numpy_and_scores_of_ones_own_are_plain_data() -> None:
    class Mine(secateur.Score):
        pass

    settings = TickTock(keep_macs=0.5, score=Mine()).but(keep_macs=numpy.float32(0.5), seed=numpy.int64(3))
    told = json.loads(json.dumps(settings.to_dict()))
    assert (told["keep_macs"], told["seed"], told["score"]) == (0.5, 3, "Mine")


class Powered(OfFilters):
    """A score with settings of its own, and a count that is none of them."""

    def __init__(self, power: float, layers: tuple[str, ...] = (), weigh: Any = None) -> None:
        self.power, self._layers, self.weigh = power, layers, weigh
        self.calls = 0

    def worth(self, rows: Tensor) -> Tensor:
        self.calls += 1
        return rows.abs().pow(self.power).sum(1)


@dataclass(eq=False)
class Scaled(OfFilters):
    by: float = 2.0

    def worth(self, rows: Tensor) -> Tensor:
        return self.by * rows.abs().sum(1)


def test_instances_of_a_score_are_told_apart() -> None:
    told = [
        TickTock(keep_macs=0.5, score=score).to_dict()["score"]
        for score in (Powered(2, ("fc",)), Powered(3.0, weigh=torch.ones(1)), Scaled(), Scaled(0.5))
    ]
    assert told == [
        "Powered(power=2, layers=('fc',), weigh=None)",
        "Powered(power=3.0, layers=())",
        "Scaled(by=2.0)",
        "Scaled(by=0.5)",
    ]


@pytest.mark.parametrize("kind", [Powered, Scaled])
def test_a_run_does_not_go_on_with_another_instance_of_its_score(kind: Any, tmp_path: Path) -> None:
    model, graph, task = prepared()
    score = kind(2.0)
    steps = quick(score=score).steps(model, graph, task, folder=tmp_path)
    for _ in range(3):
        next(steps)
    steps.close()
    with pytest.raises(InvalidSetting, match=r"a run with other settings \(score\): resume it as it was"):
        quick(score=kind(1.0)).steps(model, graph, task, folder=tmp_path)
    # The same one, although it has been used.
    assert quick(score=score)(model, graph, task, folder=tmp_path).after.macs <= 0.5 * graph.macs


def refuse(error: type[Exception], message: str, settings: TickTock, model: nn.Module, graph: Any, task: Task) -> None:
    """It raises before the model is touched."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(error, match=message):
        settings(model, graph, task)
    assert list(before) == list(model.state_dict())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_budget_below_the_floors() -> None:
    message = (
        r"keep_macs=0.05 cannot be reached: with every group at its floor .*% of the MACs are left\. The floors that"
    )
    refuse(UnreachableBudget, message, quick(keep_macs=0.05, min_ratio=0.5), *prepared())


def test_a_layer_that_does_not_exist() -> None:
    refuse(
        UnknownName,
        "no layer with removable channels 'innr'; did you mean 'inner'",
        quick(at_least={"innr": 1.0}),
        *prepared(),
    )


def test_limits_of_layers_hold() -> None:
    net, graph, task = prepared()
    result = quick(at_least={"inner": 1.0, "bare": 8}, finetune_epochs=0)(net, graph, task)
    assert result.model.inner.out_channels == 12
    assert result.model.bare.out_channels >= 8


def test_widths_are_multiples() -> None:
    net, graph, task = prepared()
    result = quick(multiple_of=4, finetune_epochs=0)(net, graph, task)
    widths = [result.model.stem.out_channels, result.model.inner.out_channels]
    assert all(width % 4 == 0 for width in widths)
    assert result.model.bare.out_channels in (4, 8, 10)
    assert result.model.hidden.out_features in (4, 8, 9)


def test_unknown_scores() -> None:
    refuse(UnknownName, "there is no score 'tailor'; did you mean 'taylor'", quick(score="tailor"), *prepared())


@pytest.mark.parametrize("score", ["fisher", "slim", "pcnn", "l1", "l2", "fpgm", "apoz", "random"])
@pytest.mark.parametrize("rank", ["score", "score_per_mac"])
def test_other_scores_run_the_same_schedule(score: str, rank: str) -> None:
    net, graph, task = prepared()
    result = quick(score=score, rank=rank, ticks_per_tock=0, finetune_epochs=0, tick_removes=0.3)(net, graph, task)
    assert result.after.macs <= 0.5 * graph.macs
    assert not any(m._forward_hooks for m in result.model.modules())


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_the_power_of_a_rank_reaches_the_pruner(power: float) -> None:
    settings = {"rank": "score_per_mac", "score": "random", "ticks_per_tock": 0, "finetune_epochs": 0}
    net, graph, task = prepared()
    found = quick(**settings, rank_power=power)(net, graph, task).plan
    pruner = secateur.Pruner(net, graph=graph, score="random", rank="score_per_mac", rank_power=power)
    while not pruner.prune(quick().tick_removes, keep_macs=quick().keep_macs).met:
        pass
    assert torch.equal(found.kept, pruner.kept)


@pytest.mark.parametrize(("decay_norms", "fell"), [(True, {"norm", "filter"}), (False, {"filter"})])
def test_weight_decay_on_filters_alone(decay_norms: bool, fell: set[str]) -> None:
    """The loss has no gradient, so that nothing but weight decay moves anything."""
    net, graph, task = prepared()
    nothing = Task(task.train, lambda model, batch: 0 * model(batch[0]).sum())
    settings = TickTock(keep_macs=1.0, finetune_epochs=1, weight_decay=0.1, decay_norms=decay_norms)
    after = dict(settings(net, graph, nothing).model.named_parameters())
    kinds = {
        "filter" if p.dim() > 1 else "norm"
        for name, p in net.named_parameters()
        if not torch.allclose(p, after[name], rtol=1e-9)
    }
    assert kinds == fell


def test_no_batches() -> None:
    net, graph, task = prepared()
    refuse(InvalidTask, "the training data yields no batches", quick(), net, graph, Task([], task.loss))


def test_losses_that_cannot_be_trained_on() -> None:
    net, graph, task = prepared()

    def with_loss(loss: Any) -> Task:
        return Task(task.train, loss)

    refuse(InvalidTask, r"must be a scalar, got shape \(16, 4\)", quick(), net, graph, with_loss(lambda m, b: m(b[0])))
    refuse(InvalidTask, "has no gradient", quick(), net, graph, with_loss(lambda m, b: m(b[0]).sum().detach()))
    other = copy.deepcopy(net)
    message = "the loss does not depend on the model that it is given"
    refuse(InvalidTask, message, quick(), net, graph, with_loss(lambda m, b: other(b[0]).sum()))
    refuse(
        InvalidTask, "must be a tensor, got float", quick(), net, graph, with_loss(lambda m, b: m(b[0]).sum().item())
    )


def test_labels_out_of_range() -> None:
    wrong = [(images, labels + 3) for images, labels in batches()]
    net, graph, task = prepared(train=wrong)
    refuse(
        InvalidTask,
        "label [456] is out of range: the model has 4 classes, so labels go from 0 to 3",
        quick(),
        net,
        graph,
        task,
    )


def test_a_model_without_a_removable_channel() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(2 * SIZE * SIZE, 4)).double()
    graph = secateur.analyze(net, batches()[0][0])
    task = secateur.classification(batches())
    message = "no channel of this model can be removed: each reaches the model's output"
    for share in (1.0, 0.5):
        refuse(InvalidModel, message, quick(keep_macs=share), net, graph, task)


def test_the_graph_of_another_network() -> None:
    _, graph, task = prepared()
    refuse(secateur.InvalidPlan, "the graph is of another network", quick(), nn.Conv2d(2, 8, 3).double(), graph, task)


def test_a_model_of_which_nothing_trains() -> None:
    net, graph, task = prepared()
    net.requires_grad_(False)
    refuse(InvalidSetting, "nothing of the model trains: set requires_grad", quick(keep_macs=1.0), net, graph, task)
