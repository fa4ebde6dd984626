"""Presets, what a task does not allow of them, the best epoch, and pruning to an accuracy."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small import Net, batches, choosing, finished, make_run, prepared, quick, same, states
from torch import Tensor, nn

import secateur
from secateur import InvalidSetting, Task, TickTock, Training, UnreachableBudget
from secateur.errors import Diverged, SecateurError
from secateur.runs.duration import estimate
from secateur.runs.events import Event, FineTune, Tick
from secateur.runs.prune import chosen
from secateur.runs.search import FIRST, search
from secateur.training.settings import with_epochs


def pruned(preset: Any, task: Task | None = None, **values: Any) -> tuple[secateur.Result, list[Any]]:
    net, graph, own = prepared()
    said: list[Any] = []
    result = secateur.prune(
        net,
        torch.zeros(1, 2, 6, 6).double(),
        own if task is None else task,
        preset=preset,
        graph=graph,
        progress=said.append,
        keep_macs=0.6,
        multiple_of=1,
        **values,
    )
    return result, said


def test_quick_scores_once_repairs_and_trains_a_few_epochs() -> None:
    result, said = pruned(None, finetune_min_steps=28)
    ticks = [event for event in result.history if isinstance(event, Tick)]
    epochs = [event for event in result.history if isinstance(event, FineTune)]
    assert (len(ticks), len(epochs)) == (1, 7)  # of 4 batches each
    what = "to do: 1 Tick with repair, 7 epochs of fine-tuning. An epoch trains in about "
    assert any(isinstance(line, str) and line.startswith(what) for line in said)
    settings = result.settings
    assert isinstance(settings, TickTock)
    assert (settings.repair, settings.learning.distill, settings.rank) == (512, 0.9, "score_per_mac")


def test_typed_epochs_are_those_that_are_trained() -> None:
    result, _ = pruned("quick", finetune_epochs=2)
    assert sum(isinstance(event, FineTune) for event in result.history) == 2


def test_balanced_removes_in_small_steps() -> None:
    result, _ = pruned("balanced", finetune_epochs=1)
    shares = [event.share for event in result.history if isinstance(event, Tick)]
    assert len(shares) > 3
    assert max(a - b for a, b in zip([1.0, *shares], shares, strict=False)) < 0.15


def test_paper_is_what_the_class_has() -> None:
    assert TickTock.preset("paper", keep_macs=0.4) == TickTock.of(keep_macs=0.4)


def test_unknown_and_double_presets() -> None:
    net, graph, task = prepared()
    with pytest.raises(InvalidSetting, match=r"preset.*quik.*quick"):
        TickTock.preset("quik", keep_macs=0.5)  # pyright: ignore
    with pytest.raises(InvalidSetting, match="do not go together"):
        secateur.prune(net, torch.zeros(1), task, graph=graph, preset="quick", settings=quick())


class Regressor(nn.Module):
    """Gives numbers that are no class scores, in the shape of scores."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images).sigmoid()


def test_a_network_that_gives_no_scores_is_not_distilled() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0])[:, 0], batch[1].double())

    said: list[Any] = []
    result = secateur.prune(
        Regressor().double(),
        torch.zeros(1, 2, 6, 6).double(),
        Task(batches(), loss),
        keep_macs=0.6,
        multiple_of=1,
        finetune_epochs=1,
        progress=said.append,
    )
    assert isinstance(result.settings, TickTock)
    assert (result.settings.learning.distill, result.settings.repair) == (0.0, 512)
    assert any(isinstance(line, str) and line.startswith("note: no distillation, since the task") for line in said)


def test_batches_that_repair_cannot_read_are_said_and_left_out() -> None:
    unclear = [{"a": images, "b": images, "c": labels} for images, labels in batches()]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch["a"]), batch["c"])

    task = Task(unclear, loss)
    result, said = pruned("quick", task, finetune_epochs=1)
    assert isinstance(result.settings, TickTock)
    assert result.settings.repair == 0
    assert any("no repair, since a batch does not show" in line for line in said if isinstance(line, str))
    with pytest.raises(secateur.InvalidData, match="does not show"):
        pruned("quick", task, finetune_epochs=1, adapt=False, distill=0.0)


def test_batches_that_the_loss_prepares_are_not_repaired_with() -> None:
    raw = [((255 * images).long(), labels) for images, labels in batches()]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0].double() / 255), batch[1])

    result, said = pruned("quick", Task(raw, loss), finetune_epochs=1)
    assert isinstance(result.settings, TickTock)
    assert result.settings.repair == 0
    assert any(
        "no repair, since the network does not take what a batch" in line for line in said if isinstance(line, str)
    )


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_a_loss_that_scales_the_images_excludes_repair(scale: float) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(scale * (batch[0] + batch[0].roll(1, 0)) / 2), batch[1])

    result, said = pruned("quick", Task(batches(), loss), finetune_epochs=1)
    assert isinstance(result.settings, TickTock)
    assert result.settings.repair == (512 if scale == 1 else 0)
    assert any("other numbers than the batch holds" in str(line) for line in said) == (scale != 1)


def test_settings_of_another_kind_are_refused() -> None:
    net, _, task = prepared()
    example = batches(1)[0][0]
    given: list[tuple[Any, Any]] = [
        (secateur.prune, Training()),
        (secateur.prune, {"keep_macs": 0.5}),
        (secateur.train, TickTock.of(keep_macs=0.5)),
    ]
    for act, got in given:
        with pytest.raises(InvalidSetting, match=f"got {type(got).__name__}"):
            act(net, example, task, settings=got)


def test_what_a_run_does_without_training_is_not_timed() -> None:
    run = make_run(quick().without_training(), *prepared())
    assert estimate(run).startswith("to do: at most about 14 Ticks with repair")
    assert "epoch" not in estimate(run)


# The best epoch


def test_the_best_epoch_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    values = iter([50.0, 70.0, 60.0, 70.0])
    seen: list[dict[str, Tensor]] = []

    def chosen_by(self: Task, model: nn.Module) -> float:
        seen.append(states(model))
        return next(values, 0.0)

    monkeypatch.setattr(Task, "chosen_by", chosen_by)
    net, graph, _ = prepared()
    task, said = choosing(), list[Any]()
    monkeypatch.setattr(secateur.runs.run.Run, "metrics", lambda *given, **more: {})
    settings = quick(finetune_epochs=4, best_epoch=True, keep_macs=0.9)
    result = finished(settings, net, graph, task, progress=said.append)
    assert same(states(result.model), seen[1])
    assert not same(states(result.model), seen[3])
    assert "kept epoch 2 of 4: 70.00 on held-out images, 70.00 after the last" in said
    held = [event.metrics["held_out"] for event in result.history if isinstance(event, FineTune)]
    assert held == [50.0, 70.0, 60.0, 70.0]


def test_the_last_epoch_is_kept_where_no_value_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Task, "chosen_by", lambda task, model: math.nan)
    net, graph, _ = prepared()
    said = list[Any]()
    settings = quick(finetune_epochs=2, best_epoch=True, keep_macs=0.9)
    finished(settings, net, graph, choosing(), progress=said.append)
    assert any(isinstance(line, str) and line.startswith("the last epoch is kept") for line in said)


def test_there_must_be_something_to_choose_by() -> None:
    with pytest.raises(InvalidSetting, match=r"nothing to choose by.*held_out"):
        finished(quick(best_epoch=True), *prepared())


# Pruning to an accuracy


def test_the_search_ends_between_a_good_and_a_bad_budget() -> None:
    """Against a law by which the accuracy falls with the MACs, and an attempt that overshoots its budget."""
    tried: list[tuple[float, float | None]] = []

    def attempt(share: float, since: float | None) -> Any:
        tried.append((share, since))
        costs = {"before": SimpleNamespace(macs=1), "after": SimpleNamespace(macs=0.97 * share)}
        return SimpleNamespace(metrics={"held_out": 100 * (0.97 * share) ** 0.1}, **costs)

    share, result = search(attempt, 92.0, lambda line: None)
    assert result.metrics["held_out"] >= 92.0
    needed = 0.92**10
    assert needed <= 0.97 * share < 1.15 * needed
    assert tried[0] == (FIRST, None)
    assert len(tried) < 10
    for share, since in tried[1:]:
        assert since is not None
        assert share < since
    with pytest.raises(UnreachableBudget, match=r"90% of the MACs.*99"):
        search(attempt, 99.9, lambda line: None)


@pytest.mark.parametrize("error", [UnreachableBudget, Diverged])
def test_what_cannot_be_reached_ends_the_search(error: type[SecateurError]) -> None:
    def attempt(share: float, since: float | None) -> Any:
        if share < 0.6:
            raise error("so little cannot be reached")
        cost = type("Cost", (), {"macs": share})
        return type(
            "Fake", (), {"metrics": {"held_out": 99.0}, "before": type("Whole", (), {"macs": 1}), "after": cost}
        )

    said: list[str] = []
    share, _ = search(attempt, 98.0, said.append)
    assert 0.6 <= share < 0.67
    assert any(line.endswith("cannot be reached: so little cannot be reached") for line in said)

    def fail(share: float, since: float | None) -> Any:
        raise error("nothing can be reached")

    with pytest.raises(error, match="nothing"):
        search(fail, 98.0, said.append)


def test_prune_to_an_accuracy(tmp_path: Path) -> None:
    """Every network that was tried is in its folder; the result is the smallest that is good enough."""
    net, _, _ = prepared()
    task = choosing()
    example = torch.zeros(1, 2, 6, 6).double()
    trained = secateur.train(net, example, replace(task, evaluate=None), epochs=12, lr=0.1).model
    said: list[Any] = []
    given: Any = {"accuracy": 60.0, "finetune_epochs": 3, "multiple_of": 1, "folder": tmp_path}
    result = secateur.prune_to(trained, example, task, progress=said.append, **given)
    lines = [line for line in said if isinstance(line, str) and "on held-out images, " in line]
    good = [line for line in lines if line.endswith("enough")]
    assert good
    assert result.metrics["held_out"] >= 60.0
    assert len(list(tmp_path.glob("keep-*"))) == len(lines)
    again = secateur.prune_to(trained, example, task, **given)
    assert same(states(again.model), states(result.model))
    events: list[Event] = list(result.history)
    assert sum(isinstance(event, Tick) for event in events) == len(good)


@pytest.mark.parametrize("kept", [True, False])
def test_an_interrupted_search_tells_only_of_a_folder_that_stays(kept: bool, tmp_path: Path) -> None:
    seen: list[Any] = []
    task = choosing()

    def loss(*given: Any) -> Any:
        if any(isinstance(event, Tick) for event in seen):
            raise KeyboardInterrupt
        return task.loss(*given)

    given: Any = {"accuracy": 1.0, "multiple_of": 1, "folder": tmp_path if kept else None, "progress": seen.append}
    with pytest.raises(KeyboardInterrupt) as caught:
        secateur.prune_to(prepared()[0], torch.zeros(1, 2, 6, 6).double(), replace(task, loss=loss), **given)
    notes = getattr(caught.value, "__notes__", [])
    assert [f"saved in {tmp_path}" in note for note in notes] == [True] * kept


def test_what_prune_to_refuses() -> None:
    net, _, task = prepared()
    with pytest.raises(InvalidSetting, match="nothing to judge by"):
        secateur.prune_to(net, torch.zeros(1), task, accuracy=50.0)
    with pytest.raises(InvalidSetting, match="a budget and a target"):
        secateur.prune_to(net, torch.zeros(1), choosing(), accuracy=50.0, keep_macs=0.5)


@pytest.mark.parametrize("train", [[], None])
def test_without_training_data(train: Any) -> None:
    net, _, _ = prepared()
    with pytest.raises(secateur.InvalidData, match="training data"):
        secateur.prune(net, batches(1)[0][0], secateur.classification(train, batches()), keep_macs=0.5)


def test_a_number_of_epochs_that_is_given_is_meant() -> None:
    given = chosen(None, TickTock.preset("quick", keep_macs=0.5), {"finetune_epochs": 1})
    assert (given.finetune.epochs, given.finetune.min_steps) == (1, 0)
    assert chosen(None, given.but(finetune_min_steps=7), {"seed": 1}).finetune.min_steps == 7
    assert with_epochs({"epochs": 2}) == {"min_steps": 0, "epochs": 2}
    assert with_epochs({"epochs": 2, "min_steps": 9}) == {"epochs": 2, "min_steps": 9}
