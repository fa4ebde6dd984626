"""Flags are the settings: their names, their help, and the defaults of the recipe."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tyro

import secateur.cli.prune
import secateur.cli.train
from secateur import Budget, Engine, TickTock, Training
from secateur.cli.command import commands, with_flags
from secateur.cli.flags import docstrings_of, flags_of, typed
from secateur.recipes.experiments import doubled
from secateur.recipes.jobs import Order
from secateur.recipes.paper import find_recipe
from secateur.recipes.recipe import from_scratch, scaled
from secateur.recipes.work import RunConfig
from secateur.settings import flat_fields

Call = Callable[..., tuple[int, str, str]]
PLAIN = "own_networks:plain@cifar10"
OWN = "tiny_job:with_settings"
SETTINGS = (TickTock, Training, Engine)


def leaves(flags: Any) -> dict[str, Any]:
    """Every flag of a generated class."""
    found: dict[str, Any] = {}
    for each in fields(flags):
        found |= leaves(each.type) if is_dataclass(each.type) else {each.name: each}
    return found


@pytest.mark.parametrize("kind", SETTINGS)
def test_every_setting_is_a_flag_with_help(kind: type) -> None:
    flags = leaves(flags_of(kind))
    assert list(flags) == list(flat_fields(kind))
    for name, flag in flags.items():
        about = flag.type.__metadata__[0]
        assert about.help, name
        assert "\n" not in about.help, name
        assert about.help_behavior_hint.startswith("(default: "), name
        assert flag.default is None


@pytest.mark.parametrize("command", commands().values(), ids=list(commands()))
def test_every_option_of_a_command_has_help_of_one_line(command: Any) -> None:
    nested = [each.default_factory() for each in fields(command) if is_dataclass(each.default_factory)]
    generated = command.flags("") if hasattr(command, "flags") else {}
    for kind in (command, *map(type, nested)):
        texts = docstrings_of(kind)
        own = {each.name for each in fields(kind) if not is_dataclass(each.default_factory)} - set(generated)
        assert own <= set(texts)
        assert not [text for text in texts.values() if "\n" in text]


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        ("", {}),
        ("--nesterov --no-decay-norms --no-tock-first", {"nesterov": True, "decay_norms": False, "tock_first": False}),
        ("--no-nesterov --tick-shifts", {"nesterov": False, "tick_shifts": True}),
        ("--at-least 0 1 fc* 0.5", {"at_least": {"0": 1, "fc*": 0.5}}),
        ("--finetune-milestones 0.2 0.4", {"finetune_milestones": (0.2, 0.4)}),
        ("--keep-macs 0.3 --score l1 --rank score", {"keep_macs": 0.3, "score": "l1", "rank": "score"}),
    ],
)
def test_what_is_typed_is_all_that_counts(arguments: str, values: dict[str, Any]) -> None:
    config = (tyro.conf.OmitArgPrefixes, tyro.conf.DisallowNone)
    flags = tyro.cli(flags_of(TickTock), args=arguments.split(), config=config)
    assert typed(flags) == values
    given = typed(flags).get("at_least", {})
    assert [type(value) for value in given.values()] == [int, float][: len(given)], "1 is a number, 1.0 a share"


def test_a_prefix() -> None:
    assert list(leaves(flags_of(Budget, prefix="keep_"))) == [
        "keep_macs",
        "keep_params",
        "keep_filters",
        "keep_latency",
    ]


@pytest.mark.parametrize(
    ("command", "recipe", "shown"),
    [
        ("train", "vgg16m-cub200", {"--epochs": "90", "--lr": "0.003", "--divide": "3.0"}),
        ("train", "fcn32s-voc", {"--epochs": "11", "--momentum": "0.99", "--milestones": "none"}),
        ("train", "resnet20@digits", {"--epochs": "160", "--milestones": "0.5 0.75"}),
        ("prune", "resnet56-cifar10-ours", {"--retrain-epochs": "80", "--finetune-shape": "warmup", "--ema": "0.0"}),
        ("prune", "fcn32s-voc", {"--tick-lr": "1e-10", "--filter-scale": "mean", "--keep-macs": "0.73"}),
        ("prune", OWN, {"--optimizer": "adamw", "--keep-params": "0.6"}),
        ("prune", "", {"--keep-macs": "none", "--tick-removes": "1.0", "--distill": "0.9", "--finetune-epochs": "5"}),
    ],
)
def test_help_shows_the_values_of_the_recipe(secateur: Call, command: str, recipe: str, shown: dict[str, str]) -> None:
    status, text, _ = secateur(command, *filter(None, [recipe]), "--help")
    assert status == 0
    _, _, options = text.partition("show this help message")
    words = " ".join(options.replace("│", " ").split())
    for flag, value in shown.items():
        # From the flag to its default, without another flag between.
        _, _, rest = words.partition(f" {flag} ")
        before, _, after = rest.partition("(default: ")
        assert after.startswith(f"{value})"), f"{flag} is {after[:20]}"
        assert " --" not in before


@pytest.mark.parametrize("arguments", [["recipes"], ["prune", "digits", "--help"], ["train", "fcn32s-voc", "--help"]])
def test_help_does_not_load_torch(arguments: list[str]) -> None:
    code = f"""
import sys
from secateur import cli
try:
    cli.main({arguments})
except SystemExit:
    pass
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


def test_a_reader_of_help_may_stop_reading() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "secateur", "train", "fcn32s-voc", "--help"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert done.stderr == ""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[RunConfig, Path]]:
    """What commands would have started."""
    found: list[tuple[RunConfig, Path]] = []

    def start(config: RunConfig, out: Path, *_: object, **__: object) -> str:
        found.append((config, out))
        return "started"

    for module in (secateur.cli.prune, secateur.cli.train):
        monkeypatch.setattr(module, "start", start)
    return found


@pytest.mark.parametrize("command", ["prune", "train"])
@pytest.mark.parametrize("behind", [False, True])
def test_the_recipe_may_stand_behind_its_options(secateur: Call, started: list, command: str, behind: bool) -> None:
    options = ["--out", "elsewhere", "--seed", "3", "--no-nesterov"]
    assert secateur(command, *([*options, "digits"] if behind else ["digits", *options]))[:2] == (0, "started\n")
    ((config, out),) = started
    recipe = find_recipe("digits")
    wanted = recipe.pruning if command == "prune" else recipe.training
    assert config == RunConfig(order=Order(recipe="digits"), settings=wanted.but(seed=3), engine=Engine())
    assert out == Path("elsewhere")


def test_all_that_can_be_typed(secateur: Call, started: list) -> None:
    training = "--epochs 30 --lr 0.2 --milestones 0.2 0.4 --divide 5 --momentum 0.8 --weight-decay 0 --seed 4"
    hardware = "--precision bf16 --channels-last --accumulate 2 --clip-norm 3 --no-graphs"
    source = "--data here --batch-size 7 --erase 4 --width 0.5 --hold-out 9 --ignore a b.* --inexact"
    assert secateur("train", "resnet20@cifar10", *f"{training} {hardware} {source}".split())[0] == 0
    ((config, _),) = started
    settings = {"epochs": 30, "lr": 0.2, "milestones": (0.2, 0.4), "divide": 5.0, "momentum": 0.8, "weight_decay": 0.0}
    assert config.settings == from_scratch().but(seed=4, **settings)
    assert config.engine == Engine(precision="bf16", channels_last=True, accumulate=2, clip_norm=3.0, graphs=False)
    assert config.order == Order(
        recipe="resnet20@cifar10",
        data=str(Path("here").absolute()),
        batch_size=7,
        erase=4,
        width=0.5,
        hold_out=9,
        ignore=("a", "b.*"),
        inexact=True,
    )


@pytest.mark.parametrize(
    ("flags", "budget"),
    [([], Budget(macs=0.4)), (["--keep-macs", "0.3"], Budget(macs=0.3)), (["--keep-params", "1"], Budget(params=1.0))],
)
def test_a_budget_that_is_typed_replaces_the_recipes(
    secateur: Call, started: list, flags: list[str], budget: Budget
) -> None:
    assert secateur("prune", "resnet56-cifar10", *flags)[0] == 0
    assert started[0][0].settings == find_recipe("resnet56-cifar10").pruning.but(
        **{f"keep_{budget.counts}": budget.share}
    )


def test_a_job_brings_its_own_settings(secateur: Call, started: list) -> None:
    assert secateur("prune", OWN)[0] == 0
    assert secateur("prune", OWN, "--finetune-lr", 0.2, "--optimizer", "sgd", "--keep-macs", 0.3)[0] == 0
    (brought, _), (given, _) = started
    own = TickTock.of(keep_params=0.6, optimizer="adamw", finetune_epochs=2, finetune_lr=3e-3, finetune_lr_low=1e-4)
    assert brought.settings == own
    assert given.settings == own.but(finetune_lr=0.2, optimizer="sgd", keep_macs=0.3)


@pytest.mark.parametrize("flag", ["--weights", "--shape-of", "--narrow-to", ""])
def test_how_long_networks_are_trained(
    secateur: Call, started: list, flag: str, cifar: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pruned = SimpleNamespace(plan=Path("plan.json"))
    monkeypatch.setattr("secateur.recipes.starts.find_source", lambda name: pruned)
    value = {"--narrow-to": [0.25], "": []}.get(flag, ["runs/pruned"])
    given = ["train", PLAIN, "--data", cifar, "--width", 4, *filter(None, [flag]), *value]
    assert secateur(*given, "--epochs-scale", 0.1)[0] == 0
    ((config, _),) = started
    recipe = find_recipe(PLAIN)
    tuning = Training(schedule=recipe.pruning.finetune, learning=recipe.pruning.learning)
    wanted = {"--weights": tuning, "": recipe.training}.get(flag, doubled(recipe.training))
    assert config.settings == scaled(wanted, 0.1)
    assert config.order.weights == ("runs/pruned" if value == ["runs/pruned"] else None)
    assert config.order.fresh == (flag == "--shape-of")
    assert config.order.width == (pytest.approx(2.0, abs=0.3) if flag == "--narrow-to" else 4.0)


def test_the_shell_completes_commands_and_flags(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "secateur", "--tyro-print-completion", "bash"]
    (tmp_path / "completion").write_text(subprocess.run(command, capture_output=True, text=True).stdout)
    script = """
source completion
try() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _tyro_secateur; echo "${COMPREPLY[@]}"; }
try secateur rep
try secateur prune --keep-m
try secateur train --no-nes
"""
    result = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == ["repair report reproduce", "--keep-macs", "--no-nesterov"]


def test_flags_that_only_switch_something_on_have_no_opposite(secateur: Call) -> None:
    flags = set(re.findall(r"--[\w-]+", secateur("prune", "--help")[1]))
    assert {"--json", "--quiet", "--inexact", "--nesterov", "--no-nesterov"} <= flags
    assert not flags & {"--no-json", "--no-quiet", "--no-inexact", "--no-debug"}


def test_a_command_without_settings_is_itself() -> None:
    assert with_flags(commands()["resume"]) is commands()["resume"]
