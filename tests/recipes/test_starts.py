"""What a run starts from: weights of many kinds, a baseline, the whole network trained once more."""

import json
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import doing
import pytest
import torch
from doing import CPU, PRUNING, TRAINING, Chain, Stopped, do, same, stopping_at, summary, weights, whole_network
from safetensors.torch import save_file

from secateur import Engine, Event, Finished, load
from secateur.errors import (
    Interrupted,
    InvalidModel,
    InvalidSetting,
    RunInUse,
    SecateurError,
    UnreachableBudget,
)
from secateur.recipes import work
from secateur.recipes.jobs import Order
from secateur.recipes.starts import find_start, open_network
from secateur.recipes.work import reopen
from secateur.runs.run import Run
from secateur.training.checkpoint import RunFolder


def test_a_run_that_was_stopped_at_its_baseline_goes_on_with_the_same_command(chain: Chain, tmp_path: Path) -> None:
    shutil.copytree(chain["baseline"], tmp_path / "baseline")
    with pytest.raises(InvalidSetting, match="was still at its baseline: give the same command as before"):
        reopen(tmp_path)


def test_the_whole_network_is_trained_once_more_and_then_pruned(chain: Chain, tmp_path: Path) -> None:
    order, said = chain.after("baseline", again=1), []
    settings = PRUNING.but(distill=0.5, finetune_lr=(0.01, 0.02))
    watcher = work.Watcher(say=said.append)
    out, further = tmp_path / "run", tmp_path / "further"
    work.perform(order, settings, Engine(), out, CPU, watcher)
    assert f"training the whole network once more, for 1 epoch, in {out / 'again'}" in said
    again = reopen(out / "again")[1]
    assert (again.keep_macs, again.finetune_epochs, again.distill) == (1.0, 1, 0.0)
    assert same(
        weights(out / "again" / "original.safetensors"), weights(chain["baseline"] / "result/model.safetensors")
    )
    assert same(weights(out / "original.safetensors"), weights(out / "again" / "result/model.safetensors"))
    work.perform(order, settings.but(keep_macs=0.3), Engine(), further, CPU, watcher, out)
    for run in (out, further):
        assert summary(run)["before"]["metrics"] == summary(chain["baseline"])["after"]["metrics"]
        assert summary(run)["order"]["weights"] == str(out / "again")
        assert summary(run)["order"]["again"] == 0
    assert len([text for text in said if "once more" in text]) == 1
    # What was before is known wherever the folder lies.
    moved = shutil.move(out, tmp_path / "moved")
    for run in (moved, further):
        shutil.rmtree(run / "result")
        work.perform(*reopen(run), run, CPU, watcher)
        assert summary(run)["before"]["metrics"] == summary(chain["baseline"])["after"]["metrics"]
    shutil.move(moved, out)
    # Stopped before the run itself has begun, the same command goes on, and does not train again what is done.
    shutil.rmtree(out / "result")
    (out / "config.json").unlink()
    with pytest.raises(InvalidSetting, match="was still at training the whole network once more: give the same"):
        reopen(out)
    shutil.rmtree(out / "checkpoints")
    work.perform(order, settings, Engine(), out, CPU, watcher)
    assert len([text for text in said if "once more" in text]) == 1


@pytest.mark.parametrize("part", ["baseline", "again"])
def test_who_is_stopped_in_the_last_evaluation_of_what_comes_first_is_not_pruned(
    chain: Chain, part: str, tmp_path: Path
) -> None:
    order = chain.after("baseline", again=1)
    if part == "baseline":
        order = replace(order, weights=None, again=0, epochs_scale=0.01)
    runs: list[Run] = []

    @contextmanager
    def guard(run: Run) -> Iterator[None]:
        runs.append(run)
        yield

    def event(event: Event) -> None:
        if isinstance(event, Finished):
            runs[-1].stopping = 2

    watcher = work.Watcher(guard=guard, event=event)
    with pytest.raises(Interrupted, match="go on with: the same command as before"):
        work.perform(order, PRUNING, Engine(), tmp_path, CPU, watcher)
    assert (tmp_path / part / "result" / "summary.json").is_file()
    assert not (tmp_path / "config.json").exists()
    assert len(runs) == 1


def test_what_another_run_has_just_begun_with_is_left_alone(chain: Chain, tmp_path: Path) -> None:
    (tmp_path / "original.safetensors").write_bytes(b"of the other")
    with closing(RunFolder(tmp_path)), pytest.raises(RunInUse):
        do(chain.after("baseline"), PRUNING, tmp_path)
    assert (tmp_path / "original.safetensors").read_bytes() == b"of the other"


def test_a_recipe_without_weights_is_trained_first(chain: Chain, tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        do(chain.order, PRUNING.but(seed=3), tmp_path, stopping_at(1))
    settings = reopen(tmp_path / "baseline")[1]
    assert (settings.finetune_epochs, settings.seed, settings.keep_macs) == (160, 3, 1.0)
    assert not (tmp_path / "config.json").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"score": "tailor"}, "there is no score 'tailor'; did you mean 'taylor'"),
        ({"keep_macs": 0.0001}, "cannot be reached"),
        ({"at_least": {"nowhere": 3}}, "nowhere"),
    ],
    ids=["score", "budget", "layer"],
)
def test_what_cannot_be_pruned_is_not_trained_first(
    chain: Chain, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(SecateurError, match=message):
        do(chain.order, PRUNING.but(**settings), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_baseline_of_a_run_is_what_it_prunes(cifar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = work.find_recipe("own_networks:plain@cifar10")
    short = recipe.but(training=replace(recipe.training, epochs=2))
    monkeypatch.setattr(work, "find_recipe", lambda name: short)
    do(Order(recipe="own_networks:plain@cifar10", data=str(cifar)), PRUNING, tmp_path)
    trained = weights(tmp_path / "baseline" / "result" / "model.safetensors")
    assert same(weights(tmp_path / "original.safetensors"), trained)
    assert summary(tmp_path)["order"]["weights"] == str(tmp_path / "baseline")


def test_a_baseline_that_was_trained_otherwise_is_not_taken(chain: Chain, tmp_path: Path) -> None:
    """Such as one of a rehearsal, which was stopped before it came to pruning."""
    do(chain.order, TRAINING, tmp_path / "baseline")
    with pytest.raises(InvalidSetting, match="finetune_epochs"):
        do(chain.order, PRUNING, tmp_path)


def test_ones_own_job_has_its_own_weights_and_is_not_trained_first(tmp_path: Path) -> None:
    do(Order(recipe="own_networks:job"), PRUNING, tmp_path)
    assert not (tmp_path / "baseline").exists()
    assert summary(tmp_path)["network"] is None
    with pytest.raises(InvalidModel, match="name what makes it, as --build own_networks:job, or build=job in Python"):
        load(tmp_path)
    model = open_network(Order(recipe="own_networks:job", weights=str(tmp_path)), CPU).model
    assert doing.count_params(model) == summary(tmp_path)["after"]["params"]


def test_a_pruned_network_is_not_pruned_further(chain: Chain, tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting) as caught:
        do(chain.after("pruned"), PRUNING, tmp_path / "run")
    assert str(caught.value) == (
        f"{chain['pruned']} is pruned already: take its run further (secateur further), or finetune"
    )


def test_a_refused_run_leaves_nothing_that_the_next_one_would_take(chain: Chain, tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting):
        do(chain.after("pruned"), PRUNING, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    do(chain.after("baseline"), PRUNING, tmp_path / "run")
    files = [run / "result" / "model.safetensors" for run in (tmp_path / "run", chain["pruned"])]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_run_that_could_not_begin_leaves_nothing_either(chain: Chain, tmp_path: Path) -> None:
    other = replace(chain.order, weights=str(chain["baseline"] / "original.safetensors"))
    with pytest.raises(UnreachableBudget):
        do(other, PRUNING.but(keep_macs=1e-6), tmp_path / "new" / "run")
    assert not (tmp_path / "new").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(UnreachableBudget):
        do(other, PRUNING.but(keep_latency=1e-6, keep_macs=None), tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["notes.txt"]
    do(chain.after("baseline"), PRUNING, tmp_path / "run")
    begun = weights(tmp_path / "run" / "original.safetensors")
    assert same(begun, weights(chain["baseline"] / "result" / "model.safetensors"))


@pytest.mark.parametrize("name", ["file.pth", "file.safetensors", "model.safetensors"])
def test_weights_from_a_file_that_anybody_may_have_written(chain: Chain, name: str, tmp_path: Path) -> None:
    state = load(chain["baseline"], build=whole_network).state_dict()
    # Of several processes, and of a torch that did not count batches.
    others = {f"module.{key}": tensor for key, tensor in state.items() if not key.endswith("num_batches_tracked")}
    file = tmp_path / name
    torch.save({"state_dict": others}, file) if file.suffix == ".pth" else save_file(others, file)
    do(replace(chain.order, weights=str(file)), PRUNING, tmp_path / "run")
    files = [weights(run / "original.safetensors") for run in (tmp_path / "run", chain["pruned"])]
    assert all(torch.equal(files[0][key], files[1][key]) for key in files[1] if "num_batches" not in key)


def test_weights_that_are_not_there(chain: Chain, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    with pytest.raises(InvalidSetting) as caught:
        do(replace(chain.order, weights=str(nowhere)), PRUNING, tmp_path / "run")
    assert str(caught.value) == f"there is neither a run nor a file with weights at {nowhere}"
    assert not (tmp_path / "run").exists()


def test_weights_of_another_network(chain: Chain, tmp_path: Path) -> None:
    file = chain["baseline"] / "result" / "model.safetensors"
    order = Order(recipe="resnet20@cifar10", data=chain.order.data, weights=str(file))
    with pytest.raises(InvalidModel, match=r"has no .*: is it of another network than CifarResNet\?"):
        do(order, PRUNING, tmp_path / "run")


@pytest.mark.parametrize("width", [1.0, 4.0])
def test_a_run_of_another_width(chain: Chain, width: float, tmp_path: Path) -> None:
    with pytest.raises(SecateurError, match=r"another network|wants"):
        open_network(replace(chain.order, weights=str(chain["pruned"]), width=width), CPU)


def test_a_run_without_a_result(chain: Chain, tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        do(chain.order, TRAINING, tmp_path / "half", stopping_at(1))
    with pytest.raises(SecateurError) as caught:
        do(replace(chain.order, weights=str(tmp_path / "half")), PRUNING, tmp_path / "run")
    assert str(caught.value).endswith(f": its run is not finished, secateur resume {tmp_path / 'half'}")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"groups": 3}'])
def test_a_damaged_plan_is_an_error_of_ours(chain: Chain, text: str, tmp_path: Path) -> None:
    shutil.copytree(chain["pruned"] / "result", tmp_path / "result")
    (tmp_path / "result" / "plan.json").write_text(text)
    with pytest.raises(SecateurError, match="plan"):
        open_network(replace(chain.order, weights=str(tmp_path)), CPU)


@pytest.mark.parametrize("missing", ["settings", "engine", "order"])
def test_a_config_without_its_parts_is_an_error_of_ours(chain: Chain, missing: str, tmp_path: Path) -> None:
    config = json.loads((chain["baseline"] / "config.json").read_text())
    for value in (None, 3):
        (tmp_path / "config.json").write_text(json.dumps({**config, missing: value}))
        with pytest.raises(SecateurError, match=r"config\.json"):
            reopen(tmp_path)
    del config[missing]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SecateurError):
        reopen(tmp_path)


def test_what_a_start_is(chain: Chain) -> None:
    assert find_start(str(chain["baseline"])).plan is None
    for name in (chain["pruned"], chain["pruned"] / "result"):
        start = find_start(str(name))
        assert start.weights == chain["pruned"] / "result" / "model.safetensors"
        assert start.original == chain["pruned"] / "original.safetensors"
        assert json.loads(start.plan or "") == json.loads((chain["pruned"] / "result" / "plan.json").read_text())
