"""From one run to the next: train, prune, fine-tune, and the same shape from scratch."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import doing
import pytest
import torch
from doing import CPU, TRAINING, TUNING, Chain, Stopped, do, same, shapes, stopping_at, summary, weights, whole_network
from torch import nn

from secateur import Engine, Event, load
from secateur.errors import (
    DamagedRun,
    InvalidSetting,
    UnreachableBudget,
)
from secateur.recipes import work
from secateur.recipes.jobs import Order, build
from secateur.recipes.starts import open_network
from secateur.recipes.work import reopen
from secateur.results.structure import read_structure
from secateur.runs import run as run_module

ALL = ["baseline", "pruned", "tuned", "scratch"]
CUT = ["pruned", "tuned", "scratch"]


@pytest.mark.parametrize("name", ALL)
def test_the_network_of_a_run_is_as_good_as_its_summary_says(chain: Chain, name: str) -> None:
    model = load(chain[name], build=whole_network)
    metrics = build(chain.order, 0, CPU).task.metrics(model)
    assert metrics == pytest.approx(summary(chain[name])["after"]["metrics"], rel=1e-6)
    again = open_network(chain.after(name), CPU)
    assert again.task.metrics(again.model) == pytest.approx(metrics, rel=1e-6)


@pytest.mark.parametrize("name", ALL)
def test_the_network_of_a_run_costs_what_its_summary_says(chain: Chain, name: str) -> None:
    told = summary(chain[name])
    model = load(chain[name], build=whole_network)
    assert told["after"]["macs"] == doing.count_macs(model, torch.zeros(1, 3, 32, 32))
    assert told["after"]["params"] == doing.count_params(model)
    whole = whole_network()
    assert told["before"]["macs"] == doing.count_macs(whole, torch.zeros(1, 3, 32, 32))
    assert told["before"]["params"] == doing.count_params(whole)


def test_as_much_is_left_as_was_asked_for(chain: Chain) -> None:
    costs = {name: summary(chain[name]) for name in ALL}
    assert costs["baseline"]["after"] | {"metrics": {}} == costs["baseline"]["before"] | {"metrics": {}}
    for name in CUT:
        assert 0.4 < costs[name]["after"]["macs"] / costs[name]["before"]["macs"] <= 0.5


@pytest.mark.parametrize("name", CUT)
def test_all_that_follows_a_pruned_network_has_its_plan(chain: Chain, name: str) -> None:
    plans = [(chain[run] / "result" / "plan.json").read_text() for run in ("pruned", name)]
    assert plans[0] == plans[1]
    assert json.loads(plans[0])["groups"]
    assert json.loads((chain["baseline"] / "result" / "plan.json").read_text())["groups"] == {}


@pytest.mark.parametrize("name", ALL)
def test_the_structure_is_that_of_the_network(chain: Chain, name: str) -> None:
    model = load(chain[name], build=whole_network)
    whole = whole_network()
    found = read_structure(chain[name]).layers
    assert [layer.name for layer in found] == [n for n, m in whole.named_modules() if isinstance(m, nn.Conv2d)]
    assert [layer.before for layer in found] == [m.out_channels for m in whole.modules() if isinstance(m, nn.Conv2d)]
    assert [layer.after for layer in found] == [m.out_channels for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert read_structure(chain[name] / "result").layers == found


@pytest.mark.parametrize("name", ALL)
def test_a_summary_tells_where_the_run_came_from(chain: Chain, name: str) -> None:
    told = summary(chain[name])
    source = {"baseline": None, "pruned": "baseline"}.get(name, "pruned")
    assert told["order"]["weights"] == (str(chain[source]) if source is not None else None)
    assert told["order"]["fresh"] == (name == "scratch")
    assert told["order"]["width"] == 2.0
    assert told["network"] == {"name": "own_networks:plain", "options": {"num_classes": 10, "width": 2.0}}
    assert told["input"] == [1, 3, 32, 32]
    assert told["settings"]["keep_macs"] == (0.5 if name == "pruned" else 1.0)
    events = [json.loads(line) for line in (chain[name] / "result" / "history.jsonl").read_text().splitlines()]
    assert told["seconds"] == pytest.approx(sum(event["seconds"] for event in events))


@pytest.mark.parametrize("name", ["pruned", "tuned"])
def test_a_run_starts_with_the_numbers_of_the_one_before(chain: Chain, name: str) -> None:
    source = {"pruned": "baseline", "tuned": "pruned"}[name]
    first = json.loads((chain[name] / "result" / "history.jsonl").read_text().splitlines()[0])
    assert first["metrics"] == pytest.approx(summary(chain[source])["after"]["metrics"], rel=1e-6)


@pytest.mark.parametrize("name", ["pruned", "tuned", "scratch"])
def test_what_was_before_is_the_whole_network(chain: Chain, name: str) -> None:
    """Its accuracy too, and not that of the pruned network which was fine-tuned."""
    baseline, told = summary(chain["baseline"])["after"], summary(chain[name])["before"]
    assert told["metrics"] == pytest.approx(baseline["metrics"], rel=1e-6)
    assert (told["macs"], told["params"]) == (baseline["macs"], baseline["params"])


def test_accuracy_that_nobody_knows_is_not_told(chain: Chain, tmp_path: Path) -> None:
    shutil.copytree(chain["pruned"] / "result", tmp_path / "copy")
    result = do(replace(chain.order, weights=str(tmp_path / "copy")), TUNING.but(distill=0.0), tmp_path / "run")
    assert summary(tmp_path / "run")["before"]["metrics"] == {}
    assert f"accuracy     {'-':>14} -> " in str(result)
    assert "| accuracy | - | " in (tmp_path / "run" / "result" / "card.md").read_text()


def test_a_done_run_without_checkpoints_is_not_done_again(chain: Chain, tmp_path: Path) -> None:
    shutil.copytree(chain["pruned"], tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    order, settings, _ = reopen(tmp_path / "run")
    with pytest.raises(InvalidSetting, match="is done, and its checkpoints are gone: its result is in"):
        do(order, settings, tmp_path / "run")


@pytest.mark.parametrize("damage", ["missing", "truncated", "changed"])
def test_a_damaged_original_is_named(chain: Chain, damage: str, tmp_path: Path) -> None:
    shutil.copytree(chain["pruned"], tmp_path / "run")
    file = tmp_path / "run" / "original.safetensors"
    data = file.read_bytes()
    file.unlink()
    if damage == "truncated":
        file.write_bytes(data[: len(data) // 2])
    if damage == "changed":
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    order, settings, _ = reopen(tmp_path / "run")
    words = (
        r"cannot read .*original\.safetensors" if damage == "missing" else r"original\.safetensors is damaged: restore"
    )
    with pytest.raises(DamagedRun, match=words):
        do(order, settings, tmp_path / "run")


def test_a_run_that_cannot_go_further_leaves_nothing_in_the_way(chain: Chain, tmp_path: Path) -> None:
    order, settings, _ = reopen(chain["pruned"])
    watcher = work.Watcher()
    with pytest.raises(UnreachableBudget):
        work.perform(order, settings.but(keep_macs=1e-6), Engine(), tmp_path, CPU, watcher, chain["pruned"])
    with pytest.raises(InvalidSetting, match="is not a run"):
        reopen(tmp_path)
    work.perform(order, settings.but(keep_macs=0.2), Engine(), tmp_path, CPU, watcher, chain["pruned"])
    assert summary(tmp_path)["after"]["macs"] <= 0.2 * summary(tmp_path)["before"]["macs"]


@pytest.mark.parametrize("given", [{"data": "somewhere"}, {"batch_size": 3}, {"hold_out": 5}, {"erase": 2}])
def test_ones_own_job_takes_no_other_data(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting, match=f"own_networks:job brings its own data: {next(iter(given))} would have"):
        Order(recipe="own_networks:job", **given)


def test_each_run_starts_from_the_result_of_another(chain: Chain) -> None:
    result = {name: weights(chain[name] / "result" / "model.safetensors") for name in ALL}
    original = {name: weights(chain[name] / "original.safetensors") for name in ALL}
    assert same(original["pruned"], result["baseline"])
    assert same(original["tuned"], result["pruned"])
    for name in ALL:
        assert not same(original[name], result[name])


@pytest.mark.parametrize("how", ["run", "result"])
def test_fine_tuning_learns_from_the_network_that_was_pruned(
    chain: Chain, how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    teachers: list[nn.Module] = []
    distilled = run_module.distilled
    monkeypatch.setattr(
        run_module,
        "distilled",
        lambda loss, teacher, *rest: teachers.append(teacher) or distilled(loss, teacher, *rest),
    )
    source = chain["pruned"] / ("result" if how == "result" else "")
    do(replace(chain.order, weights=str(source)), TUNING, tmp_path)
    (teacher,) = teachers
    unpruned = weights(chain["baseline"] / "result" / "model.safetensors")
    assert same(dict(teacher.state_dict()), unpruned)
    assert same(weights(tmp_path / "teacher.safetensors"), unpruned)
    assert (tmp_path / "result/model.safetensors").read_bytes() == (
        chain["tuned"] / "result/model.safetensors"
    ).read_bytes()


def test_the_teacher_matters(chain: Chain, tmp_path: Path) -> None:
    do(chain.after("pruned"), TUNING.but(distill=0.0), tmp_path)
    plain, learnt = (weights(run / "result" / "model.safetensors") for run in (tmp_path, chain["tuned"]))
    assert shapes(plain) == shapes(learnt)
    assert not same(plain, learnt)


@pytest.mark.parametrize("first", [0.0, 0.5])
def test_what_was_fine_tuned_can_learn_from_the_unpruned_network_once_more(
    chain: Chain, first: float, tmp_path: Path
) -> None:
    do(chain.after("pruned"), TUNING.but(distill=first), tmp_path / "one")
    do(replace(chain.order, weights=str(tmp_path / "one")), TUNING, tmp_path / "two")
    unpruned = weights(chain["baseline"] / "result" / "model.safetensors")
    assert same(weights(tmp_path / "two" / "teacher.safetensors"), unpruned)


def test_a_result_without_the_unpruned_network_is_nothing_to_learn_from(chain: Chain, tmp_path: Path) -> None:
    shutil.copytree(chain["pruned"] / "result", tmp_path / "copy")
    order = replace(chain.order, weights=str(tmp_path / "copy"))
    do(order, TUNING.but(distill=0.0), tmp_path / "plain")
    with pytest.raises(InvalidSetting, match="distill"):
        do(order, TUNING, tmp_path / "taught")


@pytest.mark.parametrize("name", ALL)
def test_times_are_of_the_networks_whose_macs_are_told(
    chain: Chain, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: dict[str, int] = {}

    def time(models: dict[str, nn.Module], example: torch.Tensor) -> dict[str, float]:
        timed.update({when: doing.count_macs(model, example) for when, model in models.items()})
        return dict.fromkeys(models, 1.0)

    monkeypatch.setattr(work, "latency", time)
    shutil.copytree(chain[name], tmp_path / "run")
    order, settings, _ = reopen(tmp_path / "run")
    do(order, settings, tmp_path / "run")
    told = summary(tmp_path / "run")
    assert timed == {when: told[when]["macs"] for when in ("before", "after")}
    assert told["latency"] == {"before": 1.0, "after": 1.0, "batch": 1, "device": told["hardware"]}


def test_scratch_has_the_shape_and_nothing_else(chain: Chain) -> None:
    pruned = weights(chain["pruned"] / "result" / "model.safetensors")
    begun = weights(chain["scratch"] / "original.safetensors")
    assert shapes(begun) == shapes(pruned)
    for name, tensor in begun.items():
        if tensor.dim() > 1:
            assert not torch.isclose(tensor, pruned[name]).any(), name


def test_scratch_is_initialised_for_its_own_shape(chain: Chain) -> None:
    whole = weights(chain["baseline"] / "original.safetensors")
    begun = weights(chain["scratch"] / "original.safetensors")
    for name, tensor in begun.items():
        if tensor.dim() > 1:
            # Torch draws evenly between plus and minus one over the root of the inputs of a filter.
            inputs = tensor[0].numel()
            assert tensor.abs().max() <= inputs**-0.5, name
            assert tensor.std().item() == pytest.approx((3 * inputs) ** -0.5, rel=3 / tensor.numel() ** 0.5), name
    assert begun["3.weight"].shape[1] < whole["3.weight"].shape[1]
    for number in (1, 4):
        norm = {name: begun[f"{number}.{name}"] for name in ("weight", "bias", "running_mean", "running_var")}
        assert all((tensor == (name in ("weight", "running_var"))).all() for name, tensor in norm.items())


def test_the_seed_decides_what_scratch_starts_with(chain: Chain, tmp_path: Path) -> None:
    order = chain.after("pruned", fresh=True)
    for seed in (0, 1):
        do(order, TRAINING.but(seed=seed, finetune_epochs=1), tmp_path / str(seed))
    begun = weights(chain["scratch"] / "original.safetensors")
    assert same(weights(tmp_path / "0" / "original.safetensors"), begun)
    assert not same(weights(tmp_path / "1" / "original.safetensors"), begun)


@pytest.mark.parametrize(
    ("name", "event"), [("baseline", 2), ("pruned", 2), ("pruned", 4), ("tuned", 1), ("scratch", 2)]
)
def test_a_stopped_run_ends_as_if_it_had_not_been_and_needs_nobody_else(
    chain: Chain, name: str, event: int, tmp_path: Path
) -> None:
    order, settings, _ = reopen(chain[name])
    if order.weights is not None:
        shutil.copytree(order.weights, tmp_path / "source")
        order = replace(order, weights=str(tmp_path / "source"))
    with pytest.raises(Stopped):
        do(order, settings, tmp_path / "run", stopping_at(event))
    shutil.rmtree(tmp_path / "source", ignore_errors=True)
    # As `secateur resume` has it: everything from the run's own folder.
    again, settings, _ = reopen(tmp_path / "run")
    assert again == order
    do(again, settings, tmp_path / "run")
    for file in ("model.safetensors", "plan.json"):
        assert (tmp_path / "run/result" / file).read_bytes() == (chain[name] / "result" / file).read_bytes()
    assert summary(tmp_path / "run")["layers"] == summary(chain[name])["layers"]


def test_a_finished_run_is_not_done_again(chain: Chain, tmp_path: Path) -> None:
    shutil.copytree(chain["pruned"], tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.suffix == ".safetensors"}
    events: list[Event] = []
    order, settings, _ = reopen(tmp_path / "run")
    do(order, settings, tmp_path / "run", events.append)
    assert [type(event).__name__ for event in events] == ["Finished"]
    assert all(path.read_bytes() == data for path, data in before.items())
