"""Runs in folders: what they start from, what they leave, and how they are resumed."""

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import doing
import pytest
import torch
from doing import CPU, PRUNING, TRAINING, TUNING, Chain, Stopped, do, same, shapes, stopping_at, summary, weights
from safetensors.torch import save_file
from torch import nn

from secateur import Event, TickTock, load
from secateur.errors import (
    Diverged,
    Interrupted,
    InvalidData,
    InvalidModel,
    InvalidSetting,
    RunInUse,
    SecateurError,
    UnreachableBudget,
)
from secateur.recipes import timing, work
from secateur.recipes.jobs import Order, build
from secateur.recipes.recipe import from_scratch
from secateur.recipes.starts import find_source, open_network
from secateur.recipes.work import Observer, read_run, smaller
from secateur.results.structure import read_structure
from secateur.runs import lessons
from secateur.runs.run import Run
from secateur.training.checkpoint import RunFolder

ALL = ["baseline", "pruned", "tuned", "scratch"]
CUT = ["pruned", "tuned", "scratch"]
RESULT = "result/model.safetensors"
PLAIN = "own_networks:plain@cifar10"


# What runs leave.


@pytest.mark.parametrize("name", ALL)
def test_a_summary_is_true(chain: Chain, name: str) -> None:
    told, model, whole = summary(chain[name]), load(chain[name], build=doing.whole_network), doing.whole_network()
    for when, network in (("before", whole), ("after", model)):
        assert told[when]["macs"] == doing.count_macs(network, torch.zeros(1, 3, 32, 32))
        assert told[when]["params"] == doing.count_params(network)
    metrics = build(chain.order, 0, CPU).task.metrics(model)
    assert told["after"]["metrics"] == pytest.approx(metrics, rel=1e-6)
    opened = open_network(chain.after(name), CPU)
    assert opened.task.metrics(opened.model) == pytest.approx(metrics, rel=1e-6)
    layers = read_structure(chain[name]).layers
    widths = [[m.out_channels for m in each.modules() if isinstance(m, nn.Conv2d)] for each in (whole, model)]
    assert [[layer.before for layer in layers], [layer.after for layer in layers]] == widths
    assert read_structure(chain[name] / "result").layers == layers
    source = {"baseline": None, "pruned": "baseline"}.get(name, "pruned")
    assert told["order"]["weights"] == (str(chain[source]) if source is not None else None)
    assert (told["order"]["fresh"], told["order"]["width"]) == (name == "scratch", 2.0)
    assert told["network"] == {"name": "own_networks:plain", "options": {"num_classes": 10, "width": 2.0}}
    assert told["input"] == [1, 3, 32, 32]
    events = [json.loads(line) for line in (chain[name] / "result/history.jsonl").read_text().splitlines()]
    assert told["seconds"] == pytest.approx(sum(event["seconds"] for event in events))


def test_as_much_is_left_as_was_asked_for(chain: Chain) -> None:
    costs = {name: summary(chain[name]) for name in ALL}
    assert costs["baseline"]["after"] | {"metrics": {}} == costs["baseline"]["before"] | {"metrics": {}}
    for name in CUT:
        assert 0.4 < costs[name]["after"]["macs"] / costs[name]["before"]["macs"] <= 0.5
        # What was before is the whole network, not the pruned one that was fine-tuned.
        assert costs[name]["before"]["metrics"] == pytest.approx(costs["baseline"]["after"]["metrics"], rel=1e-6)
    plans = [(chain[name] / "result/plan.json").read_text() for name in CUT]
    assert len(set(plans)) == 1
    assert json.loads(plans[0])["groups"]
    assert json.loads((chain["baseline"] / "result/plan.json").read_text())["groups"] == {}


def test_each_run_starts_from_the_result_of_another(chain: Chain) -> None:
    result = {name: weights(chain[name] / RESULT) for name in ALL}
    original = {name: weights(chain[name] / "original.safetensors") for name in ALL}
    for name, source in (("pruned", "baseline"), ("tuned", "pruned")):
        assert same(original[name], result[source])
        first = json.loads((chain[name] / "result/history.jsonl").read_text().splitlines()[0])
        assert first["metrics"] == pytest.approx(summary(chain[source])["after"]["metrics"], rel=1e-6)
    for name in ALL:
        assert not same(original[name], result[name])


@pytest.mark.parametrize("name", ["tuned", "baseline"])
def test_times_are_of_the_networks_whose_macs_are_told(
    chain: Chain, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: dict[str, int] = {}

    def time(models: dict[str, nn.Module], example: Any, **how: Any) -> dict[str, list[float]]:
        timed.update({when: doing.count_macs(model, example.args[0]) for when, model in models.items()})
        return {when: [1.0] for when in models}

    monkeypatch.setattr(timing, "time_networks", time)
    shutil.copytree(chain[name], tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "result")
    doing.resume(tmp_path / "run")
    told = summary(tmp_path / "run")
    if name == "baseline":  # training makes nothing faster
        assert "latency" not in told
        return
    assert timed == {when: told[when]["macs"] for when in ("before", "after")}
    how = {"spread": 0.0, "batch": 1, "device": told["hardware"], "how": "torch, float32"}
    assert told["latency"] == {"before": 1.0, "after": 1.0, **how}


def test_a_run_that_diverges_saves_the_network_before(tmp_path: Path) -> None:
    order = Order(recipe="own_networks:job")
    with pytest.raises(Diverged) as caught:
        do(order, PRUNING.but(tock_lr=1e30), tmp_path / "run")
    saved = tmp_path / "run" / "diverged"
    assert str(saved) in caught.value.what
    do(replace(order, weights=str(saved)), TUNING.but(distill=0.0), tmp_path / "tuned")
    assert summary(tmp_path / "tuned")["after"]["macs"] == summary_of(saved)["after"]["macs"]


def summary_of(result: Path) -> dict[str, Any]:
    return json.loads((result / "summary.json").read_text())


# The whole network and the pruned one.


@pytest.mark.parametrize("how", ["", "result"])
def test_fine_tuning_learns_from_the_whole_network(
    chain: Chain, how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    teachers: list[nn.Module] = []
    distilled = lessons.distilled
    monkeypatch.setattr(
        lessons,
        "distilled",
        lambda loss, teacher, *rest: teachers.append(teacher) or distilled(loss, teacher, *rest),
    )
    do(replace(chain.order, weights=str(chain["pruned"] / how)), TUNING, tmp_path)
    (teacher,) = teachers
    whole = weights(chain["baseline"] / RESULT)
    assert same(dict(teacher.state_dict()), whole)
    assert same(weights(tmp_path / "whole.safetensors"), whole)
    assert (tmp_path / RESULT).read_bytes() == (chain["tuned"] / RESULT).read_bytes()


def test_the_teacher_matters_and_is_known_after_another_fine_tuning(chain: Chain, tmp_path: Path) -> None:
    do(chain.after("pruned"), TUNING.but(distill=0.0), tmp_path / "plain")
    plain, learnt = (weights(run / RESULT) for run in (tmp_path / "plain", chain["tuned"]))
    assert shapes(plain) == shapes(learnt)
    assert not same(plain, learnt)
    do(replace(chain.order, weights=str(tmp_path / "plain")), TUNING, tmp_path / "again")
    assert same(weights(tmp_path / "again" / "whole.safetensors"), weights(chain["baseline"] / RESULT))


def test_a_result_without_the_whole_network(chain: Chain, tmp_path: Path) -> None:
    shutil.copytree(chain["pruned"] / "result", tmp_path / "copy")
    order = replace(chain.order, weights=str(tmp_path / "copy"))
    with pytest.raises(InvalidSetting, match="distill"):
        do(order, TUNING, tmp_path / "taught")
    result = do(order, TUNING.but(distill=0.0), tmp_path / "run")
    # Its accuracy is not known, and nothing is invented.
    assert summary(tmp_path / "run")["before"]["metrics"] == {}
    assert f"accuracy     {'-':>14} -> " in str(result)
    assert "| accuracy | - | " in (tmp_path / "run/result/card.md").read_text()


def test_the_whole_network_is_retrained_and_then_pruned(chain: Chain, tmp_path: Path) -> None:
    out, smallest = tmp_path / "run", tmp_path / "smaller"
    settings, events = PRUNING.but(retrain_epochs=2, distill=0.5), list[Any]()
    do(chain.after("baseline"), settings, out, events.append)
    names = [event.name for event in events if isinstance(event, Event)]
    assert names[:4] == ["Start", "Retrain epoch 1", "Retrain epoch 2", "Tick 1"]
    retrained = weights(out / "retrain.safetensors")
    assert same(weights(out / "original.safetensors"), weights(chain["baseline"] / RESULT))
    assert not same(retrained, weights(out / "original.safetensors"))
    config = smaller(read_run(out), keep_macs=0.3)
    do(config.order, config.settings, smallest, continue_from=out)
    for run in (out, smallest):
        assert summary(run)["before"]["metrics"] == summary(chain["baseline"])["after"]["metrics"]
    # What is fine-tuned next learns from the retrained network.
    do(replace(chain.order, weights=str(out)), TUNING, tmp_path / "tuned")
    assert same(weights(tmp_path / "tuned" / "whole.safetensors"), retrained)


def test_the_shape_from_random_weights(chain: Chain, tmp_path: Path) -> None:
    pruned, begun = weights(chain["pruned"] / RESULT), weights(chain["scratch"] / "original.safetensors")
    assert shapes(begun) == shapes(pruned)
    for name, tensor in begun.items():
        if tensor.dim() > 1:
            assert not torch.isclose(tensor, pruned[name]).any(), name
            # Torch draws evenly between plus and minus one over the root of the inputs of a filter.
            inputs = tensor[0].numel()
            assert tensor.abs().max() <= inputs**-0.5, name
            assert tensor.std().item() == pytest.approx((3 * inputs) ** -0.5, rel=3 / tensor.numel() ** 0.5), name
    for number in (1, 4):
        norm = {name: begun[f"{number}.{name}"] for name in ("weight", "bias", "running_mean", "running_var")}
        assert all((tensor == (name in ("weight", "running_var"))).all() for name, tensor in norm.items())
    for seed in (0, 1):
        with pytest.raises(Stopped):
            do(chain.after("pruned", fresh=True), TRAINING.but(seed=seed), tmp_path / str(seed), stopping_at(1))
        assert same(weights(tmp_path / str(seed) / "original.safetensors"), begun) == (seed == 0)
    with pytest.raises(InvalidSetting) as caught:
        do(chain.after("baseline", fresh=True), TRAINING, tmp_path / "whole")
    assert caught.value.wanted == "a pruned network"


# Baselines.


@pytest.fixture
def short_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = work.find_recipe(PLAIN)
    monkeypatch.setattr(work, "find_recipe", lambda name: recipe.but(training=from_scratch().but(epochs=3)))


@pytest.mark.usefixtures("short_baseline")
def test_a_run_that_trains_its_baseline_can_be_stopped_anywhere(cifar: Path, tmp_path: Path) -> None:
    order, settings = Order(recipe=PLAIN, data=str(cifar)), PRUNING.but(retrain_epochs=1)
    events: list[Any] = []
    do(order, settings, tmp_path / "whole", events.append)
    names = [each.name for each in events if isinstance(each, Event)]
    assert names[:5] == [*(f"Baseline epoch {epoch}" for epoch in (1, 2, 3)), "Start", "Retrain epoch 1"]
    for event in (1, 4, 6):
        run = tmp_path / str(event)
        with pytest.raises(Stopped):
            do(order, settings, run, stopping_at(event))
        doing.resume(run)
        for file in (RESULT, "result/plan.json", "baseline.safetensors", "retrain.safetensors"):
            assert (run / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


def test_the_baseline_is_the_recipes(chain: Chain, tmp_path: Path) -> None:
    said: list[Any] = []
    with pytest.raises(Stopped):
        do(chain.order, PRUNING.but(seed=3), tmp_path, lambda event: (said.append(event), stopping_at(1)(event)))
    assert (said[-1].name, said[-1].epochs) == ("Baseline epoch 1", 160)
    order = replace(chain.order, epochs_scale=0.05)
    with pytest.raises(Stopped):
        do(order, PRUNING, tmp_path / "short", lambda event: (said.append(event), stopping_at(1)(event)))
    assert said[-1].epochs == 8


@pytest.mark.parametrize("settings", [{"score": "tailor"}, {"keep_macs": 0.0001}, {"at_least": {"nowhere": 3}}])
def test_what_cannot_be_pruned_is_not_trained_first(chain: Chain, settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting):
        do(chain.order, PRUNING.but(**settings), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_job_has_its_own_weights_and_is_not_trained_first(tmp_path: Path) -> None:
    do(Order(recipe="own_networks:job"), PRUNING, tmp_path)
    assert not (tmp_path / "baseline.safetensors").exists()
    assert summary(tmp_path)["network"] is None
    with pytest.raises(InvalidModel):
        load(tmp_path)
    model = open_network(Order(recipe="own_networks:job", weights=str(tmp_path)), CPU).model
    assert doing.count_params(model) == summary(tmp_path)["after"]["params"]


def test_ignored_modules_stay_whole(tmp_path: Path) -> None:
    order = Order(recipe="own_networks:job", ignore=("0",))
    do(order, PRUNING.but(keep_macs=0.8), tmp_path / "run")
    assert read_run(tmp_path / "run").order == order
    layers = {layer.name: layer for layer in read_structure(tmp_path / "run").layers}
    assert ("0" not in layers) or layers["0"].after == layers["0"].before
    assert any(layer.after < layer.before for layer in layers.values())


# Stopped, refused and damaged.


@pytest.mark.parametrize(
    ("name", "event"), [("baseline", 2), ("pruned", 2), ("pruned", 4), ("tuned", 1), ("scratch", 2)]
)
def test_a_stopped_run_is_resumed_from_its_own_folder(chain: Chain, name: str, event: int, tmp_path: Path) -> None:
    config = read_run(chain[name])
    order = config.order
    if order.weights is not None:
        shutil.copytree(order.weights, tmp_path / "source")
        order = replace(order, weights=str(tmp_path / "source"))
    with pytest.raises(Stopped):
        do(order, config.settings, tmp_path / "run", stopping_at(event))
    shutil.rmtree(tmp_path / "source", ignore_errors=True)
    assert read_run(tmp_path / "run").order == order
    doing.resume(tmp_path / "run")
    for file in (RESULT, "result/plan.json"):
        assert (tmp_path / "run" / file).read_bytes() == (chain[name] / file).read_bytes()
    assert summary(tmp_path / "run")["layers"] == summary(chain[name])["layers"]
    # Whether it was stopped before the cut was checked or after; training has none.
    checked = [told.get("verification") for told in (summary(chain[name]), summary(tmp_path / "run"))]
    assert checked[0] == checked[1]
    assert bool(checked[0]) == (name == "pruned")


def test_a_finished_run_is_not_repeated(chain: Chain, tmp_path: Path) -> None:
    shutil.copytree(chain["pruned"], tmp_path / "run")
    before = {
        path: path.read_bytes()
        for path in [*(tmp_path / "run").glob("*.safetensors"), *(tmp_path / "run/result").glob("*")]
    }
    times = {path: path.stat().st_mtime_ns for path in before}
    events: list[Any] = []
    doing.resume(tmp_path / "run", events.append)
    assert [event.name for event in events if isinstance(event, Event)] == ["Finished"]
    assert all(path.read_bytes() == data for path, data in before.items())
    assert times == {path: path.stat().st_mtime_ns for path in before}
    (tmp_path / "run" / RESULT).unlink()
    doing.resume(tmp_path / "run")
    assert (tmp_path / "run" / RESULT).read_bytes() == before[tmp_path / "run" / RESULT]
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(InvalidSetting, match="checkpoints are gone"):
        doing.resume(tmp_path / "run")


def test_a_run_that_is_stopped_in_its_last_evaluation(chain: Chain, tmp_path: Path) -> None:
    """What would follow it must not begin."""
    runs: list[Run] = []

    def guard(run: Run) -> Any:
        runs.append(run)
        return work.nullcontext()

    def progress(event: Event | str) -> None:
        if getattr(event, "name", "") == "Finished":
            runs[-1].stopping = 2

    config = replace(read_run(chain["baseline"]), order=chain.order)
    with pytest.raises(Interrupted) as caught:
        work.perform(config, tmp_path, CPU, Observer(progress=progress, guard=guard))
    assert (caught.value.signal, caught.value.folder) == (2, str(tmp_path))
    assert (tmp_path / "result/summary.json").is_file()


@pytest.mark.parametrize("change", [{"batch_size": 3}, {"erase": 2}, {"hold_out": 2}, {"width": 1.0}])
def test_another_order_is_not_resumed(chain: Chain, change: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        do(chain.order, TRAINING, tmp_path, stopping_at(1))
    with pytest.raises(SecateurError) as caught:
        do(replace(chain.order, **change), TRAINING, tmp_path)
    assert next(iter(change)) in str(caught.value) or "width" in change


def test_a_refused_run_leaves_nothing_behind(chain: Chain, tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="already pruned"):
        do(chain.after("pruned"), PRUNING, tmp_path / "new" / "run")
    other = replace(chain.order, weights=str(chain["baseline"] / "original.safetensors"))
    with pytest.raises(UnreachableBudget):
        do(other, PRUNING.but(keep_macs=1e-6), tmp_path / "new" / "run")
    assert not (tmp_path / "new").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(UnreachableBudget):
        do(other, PRUNING.but(keep_latency=1e-6), tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["notes.txt"]
    do(chain.after("baseline"), PRUNING, tmp_path / "run")
    assert (tmp_path / "run" / RESULT).read_bytes() == (chain["pruned"] / RESULT).read_bytes()


def test_a_run_that_cannot_be_continued_leaves_nothing_behind(chain: Chain, tmp_path: Path) -> None:
    config = read_run(chain["pruned"])
    assert isinstance(config.settings, TickTock)
    with pytest.raises(UnreachableBudget):
        do(config.order, config.settings.but(keep_macs=1e-6), tmp_path, continue_from=chain["pruned"])
    with pytest.raises(InvalidSetting):
        read_run(tmp_path)
    do(config.order, config.settings.but(keep_macs=0.2), tmp_path, continue_from=chain["pruned"])
    assert summary(tmp_path)["after"]["macs"] <= 0.2 * summary(tmp_path)["before"]["macs"]
    with pytest.raises(InvalidSetting):
        smaller(read_run(chain["baseline"]), keep_macs=0.5)


def test_the_files_of_another_run_are_left_alone(chain: Chain, tmp_path: Path) -> None:
    (tmp_path / "original.safetensors").write_bytes(b"of the other")
    with closing(RunFolder(tmp_path)), pytest.raises(RunInUse):
        do(chain.after("baseline"), PRUNING, tmp_path)
    assert (tmp_path / "original.safetensors").read_bytes() == b"of the other"


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
    with pytest.raises((InvalidData, InvalidSetting)) as caught:
        doing.resume(tmp_path / "run")
    assert "original.safetensors" in str(caught.value) or caught.value.got == "other weights"


@pytest.mark.parametrize("name", ["settings", "engine", "order", "kind"])
@pytest.mark.parametrize("value", [None, 3, "missing"])
def test_a_damaged_config_is_named(chain: Chain, name: str, value: object, tmp_path: Path) -> None:
    config = json.loads((chain["baseline"] / "config.json").read_text()) | {name: value}
    if value == "missing":
        del config[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises((InvalidData, InvalidSetting)) as caught:
        read_run(tmp_path)
    assert str(tmp_path) in caught.value.what


# Weights.


@pytest.mark.parametrize("name", ["file.pth", "file.safetensors"])
def test_weights_from_a_file_that_anybody_may_have_written(chain: Chain, name: str, tmp_path: Path) -> None:
    state = load(chain["baseline"], build=doing.whole_network).state_dict()
    # From DataParallel, and from a torch that did not count batches.
    others = {f"module.{key}": tensor for key, tensor in state.items() if not key.endswith("num_batches_tracked")}
    file = tmp_path / name
    torch.save({"state_dict": others}, file) if file.suffix == ".pth" else save_file(others, file)
    found = dict(open_network(replace(chain.order, weights=str(file)), CPU).model.state_dict())
    assert all(torch.equal(found[key], state[key]) for key in state if "num_batches" not in key)


def half_a_run(chain: Chain, folder: Path) -> str:
    with pytest.raises(Stopped):
        do(chain.order, TRAINING, folder, stopping_at(1))
    return str(folder)


def damaged_plan(chain: Chain, folder: Path) -> str:
    shutil.copytree(chain["pruned"] / "result", folder)
    (folder / "plan.json").write_text('{"groups": 3}')
    return str(folder)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda chain, folder: {"weights": str(folder / "nowhere")}, InvalidSetting),
        (lambda chain, folder: {"weights": half_a_run(chain, folder)}, SecateurError),
        (lambda chain, folder: {"weights": damaged_plan(chain, folder)}, SecateurError),
        (lambda chain, folder: {"weights": str(chain["pruned"]), "width": 1.0}, SecateurError),
        (lambda chain, folder: {"weights": str(chain["pruned"]), "width": 4.0}, SecateurError),
        (
            lambda chain, folder: {"weights": str(chain["baseline"] / RESULT), "recipe": "resnet20@cifar10"},
            InvalidData,
        ),
        (lambda chain, folder: {"weights": str(chain["pruned"]), "recipe": "resnet20@cifar10"}, InvalidSetting),
    ],
    ids=["nothing", "half a run", "damaged plan", "narrower", "wider", "file of another", "run of another"],
)
def test_weights_that_do_not_fit(
    chain: Chain, change: Callable[[Chain, Path], dict[str, Any]], kind: type[Exception], tmp_path: Path
) -> None:
    order = replace(chain.order, **change(chain, tmp_path / "source"))
    with pytest.raises(kind):
        open_network(order, CPU)
    with pytest.raises(kind):
        do(order, TRAINING, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("source", "width", "remedy"),
    [
        ("pruned/result/model.safetensors", 2.0, "It is of a pruned network: name its folder {}/pruned/result"),
        ("pruned", 1.0, None),
        ("baseline", 1.0, "--weights {}/baseline/result/model.safetensors --new-head 10"),
        ("baseline/result/model.safetensors", 1.0, "differs: --new-head 10"),
    ],
)
def test_the_remedy_is_of_what_was_named(
    chain: Chain, source: str, width: float, remedy: str | None, tmp_path: Path
) -> None:
    order = replace(chain.order, weights=str(chain[source]), width=width)
    with pytest.raises(SecateurError) as caught:
        do(order, TRAINING, tmp_path / "run")
    assert (remedy or "").format(chain.folder) in str(caught.value)
    assert ("of a pruned network" in str(caught.value)) == ("name its folder" in (remedy or ""))


def test_what_can_be_started_from(chain: Chain) -> None:
    assert find_source(str(chain["baseline"])).plan is None
    for name in (chain["pruned"], chain["pruned"] / "result"):
        source = find_source(str(name))
        assert source.weights == chain["pruned"] / RESULT
        assert source.whole == chain["pruned"] / "original.safetensors"
        assert source.plan == chain["pruned"] / "result" / "plan.json"
