"""Presets, the best epoch, pruning to an accuracy, and times, on the command line."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import doing
import pytest

from secateur import TickTock
from secateur.cli.command import _what_next
from secateur.cli.options import pruning_of
from secateur.recipes.paper import find_recipe

Call = Callable[..., tuple[int, str, str]]
ON_CPU = ["--device", "cpu", "--quiet"]


def settings_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "config.json").read_text())["settings"]


def test_a_job_of_ones_own_is_quick(secateur: Call, tmp_path: Path) -> None:
    given = ["--keep-macs", 0.6, "--finetune-epochs", 1, *ON_CPU, "--out", tmp_path]
    assert secateur("prune", "tiny_job:build", *given)[0] == 0
    assert settings_of(tmp_path) == TickTock.preset("quick", keep_macs=0.6, finetune_epochs=1).to_dict()


def test_a_preset_changes_all_of_a_recipe_but_its_budget_and_limits() -> None:
    recipe = find_recipe("vgg16m-cifar100").pruning
    settings = pruning_of("vgg16m-cifar100", "quick", {"finetune_lr": 0.1})
    assert (settings.budget, settings.limits) == (recipe.budget, recipe.limits)
    assert settings.but(finetune_lr=0.01) == TickTock.preset("quick", keep_macs=0.4).but(
        min_channels=9, min_ratio=0.0, multiple_of=1
    )
    assert pruning_of("vgg16m-cifar100", "paper", {}) == recipe
    assert pruning_of("vgg16m-cifar100", None, {"keep_params": 0.3}).budget.params == 0.3
    assert pruning_of("vgg16m-cifar100", "balanced", {"keep_params": 0.3}).budget.counts == "params"


def test_photographs_take_the_epochs_that_are_typed() -> None:
    name = "torchvision:resnet18@class_folders"
    assert pruning_of(name, None, {}).finetune.length(10) == 25
    assert pruning_of(name, None, {"finetune_epochs": 3}).finetune.length(10) == 3
    assert pruning_of(name, "paper", {}) == TickTock.of(keep_macs=0.5)


def test_a_search_for_the_smallest_and_going_on_with_it(secateur: Call, tmp_path: Path) -> None:
    short = ["--finetune-epochs", 1, "--repair", 0, "--min-ratio", 0.4, "--multiple-of", 1, "--device", "cpu"]
    out = tmp_path / "out"
    status, text, told = secateur("prune", "tiny_job:choosing", "--target-accuracy", 1, *short, "--out", out)
    assert status == 0, told
    tried = sorted(path.name for path in out.glob("keep-*"))
    assert len([line for line in told.splitlines() if line.endswith("on held-out images, enough")]) >= 2
    assert "cannot be reached" in told
    (saved,) = [line for line in text.splitlines() if line.startswith("saved in ")]
    best = Path(saved.removeprefix("saved in ").partition(";")[0])
    assert doing.summary(best.parent)["after"]["metrics"]["held_out"] >= 1
    assert secateur("prune", "tiny_job:choosing", "--target-accuracy", 1, *short, "--out", out)[0] == 2
    shutil.rmtree(best.parent)
    status, again, told = secateur("resume", out, "--device", "cpu")
    assert status == 0, told
    assert saved in again
    assert sorted(path.name for path in out.glob("keep-*")) == tried


def test_a_search_that_cannot_start_leaves_no_folder_behind(secateur: Call, tmp_path: Path) -> None:
    out = tmp_path / "out"
    given = ["tiny_job:choosing", "--target-accuracy", 1, "--weights", tmp_path / "missing.pth", *ON_CPU]
    assert secateur("prune", *given, "--out", out)[0] == 2
    assert not out.exists()


@pytest.mark.parametrize("name", ["config.json", "search.json"])
def test_what_has_begun_can_be_resumed(tmp_path: Path, name: str) -> None:
    command = SimpleNamespace(output=SimpleNamespace(out=tmp_path))
    assert _what_next(command) == "Nothing was saved"
    (tmp_path / name).touch()
    assert _what_next(command) == f"Resume it: secateur resume {tmp_path}"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tiny_job:choosing", "--target-accuracy", 90, "--keep-macs", 0.5], "a budget and a target accuracy"),
        (["tiny_job:build", "--target-accuracy", 90], "held_out"),
        (["tiny_job:build", "--keep-macs", 0.5, "--best-epoch"], "nothing to choose by"),
        (["tiny_job:build", "--keep-macs", 0.5, "--choose-on", 0.1], "choose_on"),
        (["digits", "--keep-macs", 0.5, "--choose-on", 1.5], "choose_on is out of range"),
    ],
    ids=str,
)
def test_mistakes(secateur: Call, tmp_path: Path, arguments: list[object], words: str) -> None:
    status, _, told = secateur("prune", *arguments, *ON_CPU, "--out", tmp_path / "run")
    assert status == 2
    assert words in told


def test_the_best_epoch_is_chosen_on_a_tenth_of_the_images(secateur: Call, cifar: Path, tmp_path: Path) -> None:
    given = ["--data", cifar, "--epochs", 2, "--best-epoch", "--device", "cpu", "--out", tmp_path]
    status, text, told = secateur("train", "own_networks:plain@cifar10", *given)
    assert status == 0, told
    assert "held-out images" in told
    assert "faster" not in text
    assert json.loads((tmp_path / "config.json").read_text())["order"]["choose_on"] == 0.1
    assert "held_out" in doing.summary(tmp_path)["after"]["metrics"]


def test_times_in_onnxruntime(secateur: Call, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    given = ["--keep-macs", 0.6, "--finetune-epochs", 0, "--latency-in", "onnxruntime", "--latency-batch", 2]
    status, text, told = secateur("prune", "tiny_job:build", *given, *ON_CPU, "--out", tmp_path)
    assert status == 0, told
    latency = doing.summary(tmp_path)["latency"]
    assert (latency["how"], latency["batch"]) == ("onnxruntime, float32", 2)
    assert "of the time of the whole network" in text
    assert "onnxruntime, float32, batch 2" in (tmp_path / "result" / "card.md").read_text()
