"""Pruning by steps, without any trainer's package."""

import importlib
import sys

import pytest
import torch
from trained import BUDGET, EVERY, FRACTION, STEPS, assert_same, by_hand, data, made, optimizer_of

import secateur
from secateur import InvalidSetting
from secateur.errors import MissingExtra
from secateur.integrations.steps import StepPruning

IMAGES, LABELS = data()


def test_channels_go_until_the_budget_is_met_and_training_goes_on() -> None:
    model, pruner = made()
    optimizer, lines = optimizer_of(model), []
    steps = StepPruning(pruner, BUDGET, fraction=FRACTION, every=EVERY, progress=lines.append)
    steps.begin([optimizer], 1)
    counts = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(IMAGES, LABELS)["loss"].backward()
        steps.observe()
        optimizer.step()
        steps.stepped(optimizer)
        counts.append(pruner.cost.macs)
    assert counts[: EVERY - 1] == [pruner.graph.macs] * (EVERY - 1)
    met = next(step for step, macs in enumerate(counts) if macs <= 0.5 * pruner.graph.macs)
    assert (met + 1) % EVERY == 0
    assert len(set(counts[met:])) == 1 < len(counts[met:])
    assert len(lines) == len(steps.removals) == (met + 1) // EVERY
    assert all(state["momentum_buffer"].shape == p.shape for p, state in optimizer.state.items())
    steps.finish()
    assert not [name for name in model.state_dict() if "gate" in name]


def test_the_rest_of_training_from_a_state() -> None:
    expected, _ = by_hand(lambda step: [(IMAGES, LABELS)])
    states = []
    model, pruner = made()
    optimizer = optimizer_of(model)
    steps = StepPruning(pruner, BUDGET, fraction=FRACTION, every=EVERY)
    for step in range(STEPS):
        if step == 4:
            states = [steps.state_dict(), model.state_dict(), optimizer.state_dict()]
            model, pruner = made()
            steps = StepPruning(pruner, BUDGET, fraction=FRACTION, every=EVERY)
            steps.load_state_dict(states[0])
            optimizer = optimizer_of(model)
            model.load_state_dict(states[1])
            optimizer.load_state_dict(states[2])
        optimizer.zero_grad()
        model.train()(IMAGES, LABELS)["loss"].backward()
        steps.observe()
        optimizer.step()
        steps.stepped(optimizer)
    steps.finish()
    assert_same(model, expected)


def test_what_cannot_be_pruned_is_refused_before_training() -> None:
    model, pruner = made()
    steps, optimizer = StepPruning(pruner, BUDGET), optimizer_of(model)
    with pytest.raises(InvalidSetting, match="2 devices"):
        steps.begin([optimizer], 2)
    with pytest.raises(InvalidSetting, match="0 optimizers"):
        steps.begin([], 1)
    with pytest.raises(InvalidSetting, match="after the Pruner"):
        steps.begin([torch.optim.SGD(model.last.parameters())], 1)
    with pytest.raises(InvalidSetting, match="1 or more steps"):
        StepPruning(pruner, secateur.Budget(macs=0.5), every=0)
    with pytest.warns(UserWarning, match="before the budget was met"):
        steps.finish()


@pytest.mark.parametrize("package", ["lightning", "transformers"])
def test_a_package_that_is_missing_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"secateur.integrations.{package}", raising=False)
    with pytest.raises(MissingExtra, match=rf"secateur\[{package}\]"):
        importlib.import_module(f"secateur.integrations.{package}")
