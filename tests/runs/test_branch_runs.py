"""Runs that remove whole branches: stopped and resumed, cut or masked, and continued from what is left."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import WEAK, graph, weak
from small import CLASSES, assert_near, batches, finished, make_run, on_a, quick, same, states
from timed_networks import invented
from torch import Tensor, nn

import secateur
from secateur import Engine, Plan, Result, Task, classification
from secateur.errors import Interrupted
from secateur.results.report.read import read_run
from secateur.results.structure import read_structure
from secateur.runs.events import Tick
from secateur.runs.prune import finish, pruning_phases, training_phases
from secateur.runs.run import Run
from secateur.training.settings import Training

SETTINGS: dict[str, Any] = {"branches": "always", "keep_macs": 0.3, "tick_removes": 0.3, "min_ratio": 0.0}


def task() -> Task:
    return classification(batches(), batches(2))


def went(result: Result) -> list[str]:
    return [name for event in result.history if isinstance(event, Tick) for name in event.branches]


@pytest.mark.parametrize(
    "changes", [{}, {"repair": 12}, {"cut": "end"}, {"score": "pcnn"}, {"ema": 0.5, "distill": 0.5}]
)
def test_branches_go_in_ticks_and_the_result_has_none(changes: dict[str, Any], tmp_path: Path) -> None:
    result = finished(quick(**{**SETTINGS, **changes}), weak(), graph(), task())
    assert set(went(result)) == result.plan.without >= {WEAK[1]}
    assert result.after.macs <= 0.3 * result.before.macs
    assert secateur.analyze(result.model, batches()[0][0][:1]).cost() == result.after
    assert any("removed" in str(event) for event in result.history if isinstance(event, Tick))
    secateur.save(result, tmp_path / "saved")
    again = secateur.load(tmp_path / "saved", weak)
    assert same(states(again), states(result.model))


def test_a_finished_run_has_the_structure_of_its_result(tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = finished(quick(**SETTINGS), weak(), graph(), task(), folder=run)
    secateur.save(result, run / "result")
    structure = read_structure(run)
    assert structure == replace(read_structure(run / "result"), title=str(run))
    assert set(structure.removed_branches) == result.plan.without != set()
    after = {layer.name: layer.after for layer in read_run(run, "run").layers}
    assert all(after[f"{name}.second"] == 0 for name in result.plan.without)
    assert sum(after.values()) + CLASSES == result.history[-1].filters


def test_masked_and_cut_runs_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = finished(quick(**SETTINGS), weak(), graph(), task())
    on_a("cuda", monkeypatch)
    aligned = finished(quick(**SETTINGS), weak(), graph(), task())
    assert torch.equal(at_once.plan.kept, aligned.plan.kept)
    assert_near(at_once.model, aligned.model)


@pytest.mark.parametrize("step", [2, 6, 9, 13])
def test_a_run_that_is_stopped_goes_on_to_the_same_bits(step: int, tmp_path: Path) -> None:
    settings = quick(**SETTINGS)
    wanted = finished(settings, weak(), graph(), task(), folder=tmp_path / "whole")
    run = make_run(settings, weak(), graph(), task(), folder=tmp_path / "stopped", engine=Engine(checkpoint_steps=1))

    def stop(*_: Any) -> None:
        if run.num_steps + 1 == step:
            run.stopping = 2

    run.on_step = stop
    with pytest.raises(Interrupted):
        finish(run)
    result = finished(settings, weak(), graph(), task(), folder=tmp_path / "stopped", engine=Engine(checkpoint_steps=1))
    assert went(result) == went(wanted) != []
    assert torch.equal(result.plan.kept, wanted.plan.kept)
    assert same(states(result.model), states(wanted.model))


def test_a_smaller_budget_continues_where_a_larger_one_ended(tmp_path: Path) -> None:
    first = finished(quick(**{**SETTINGS, "keep_macs": 0.4}), weak(), graph(), task(), folder=tmp_path / "one")
    assert first.plan.without
    image, settings = batches()[0][0][:1], quick(**SETTINGS)
    second = secateur.prune(
        weak(),
        image,
        task(),
        settings=settings,
        graph=graph(),
        folder=tmp_path / "two",
        continue_from=tmp_path / "one",
    )
    assert first.plan.without <= second.plan.without
    assert second.after.macs <= 0.3 * second.before.macs


def test_a_budget_of_time_removes_branches_by_default() -> None:
    settings = quick(keep_latency=0.45, tick_removes=0.3, multiple_of=4)
    table = invented(weak(), batches()[0][0][:1], 1, 4)
    plan = Plan(graph(), graph().all_kept())
    run = Run(settings, pruning_phases(settings, latency=table), weak(), plan, task())
    result = finish(run)
    assert set(WEAK) <= result.plan.without
    kept = Plan(graph(), graph().all_kept()).kept
    assert table.value(graph(), result.plan.kept) <= 0.45 * table.value(graph(), kept)


def test_a_network_without_some_branches_is_fine_tuned() -> None:
    plan = Plan.keep(graph(), {}, without=[WEAK[0]])
    settings = Training.of(epochs=1, lr_low=0.01, lr=0.05)
    small = secateur.shrink(weak(), plan)
    before = states(small)
    result = finish(Run(settings, training_phases(settings), small, plan, task(), whole=weak()))
    assert result.plan.without == {WEAK[0]}
    assert list(states(result.model)) == list(before)
    assert not same(states(result.model), before)


def test_a_branch_without_channels_of_its_own_is_not_forgotten(tmp_path: Path) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.norm(self.conv(x))

    def build() -> nn.Module:
        torch.manual_seed(0)
        layers = nn.Conv2d(2, 6, 3, padding=1), Plain(), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        return nn.Sequential(*layers, nn.Linear(6, 4)).double()

    found = secateur.analyze(build(), batches()[0][0][:1])
    plan = Plan.keep(found, {}, without=["1"])
    assert bool(plan.kept.all())
    settings = Training.of(epochs=1, lr_low=0.01, lr=0.05)
    small = secateur.shrink(build(), plan)
    folder = tmp_path / "run"
    result = finish(Run(settings, training_phases(settings), small, plan, task(), whole=build(), folder=folder))
    assert result.plan.without == {"1"}
    assert (folder / "start_plan.json").is_file()
    assert result.history[-1].params == sum(parameter.numel() for parameter in result.model.parameters())
    secateur.save(result, tmp_path / "saved")
    assert same(states(secateur.load(tmp_path / "saved", build)), states(result.model))


def test_a_run_that_began_before_branches_could_go_is_resumed(tmp_path: Path) -> None:
    settings = quick(keep_macs=0.6)
    wanted = finished(settings, weak(), graph(), task())
    run = make_run(settings, weak(), graph(), task(), folder=tmp_path, engine=Engine(checkpoint_steps=1))
    run.on_step = lambda *_: setattr(run, "stopping", 2)
    with pytest.raises(Interrupted):
        finish(run)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["settings"]["branches"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = finished(settings, weak(), graph(), task(), folder=tmp_path, engine=Engine(checkpoint_steps=1))
    assert same(states(result.model), states(wanted.model))
