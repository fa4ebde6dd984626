"""`secateur recipes`, `structure`, `evaluate` and `export`."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import doing
import pytest
import torch

from secateur import Plan, Result, TickTock, analyze, save, shrink
from secateur.data.catalog import DATASETS
from secateur.errors import InvalidModel
from secateur.models.lookup import find_model
from secateur.recipes.experiments import EXPERIMENTS
from secateur.recipes.jobs import Order
from secateur.recipes.paper import RECIPES, find_recipe

Call = Callable[..., tuple[int, str, str]]
PLAIN = "own_networks:plain@cifar10"


@pytest.fixture(scope="module")
def run(cifar: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has come to its end."""
    folder = tmp_path_factory.mktemp("look") / "run"
    order = Order(recipe=PLAIN, data=str(cifar), weights=str(folder.parent / "trained"))
    doing.do(Order(recipe=PLAIN, data=str(cifar)), doing.TRAINING, folder.parent / "trained")
    doing.do(order, doing.PRUNING, folder)
    return folder


@pytest.fixture
def shallow(tmp_path: Path) -> Path:
    """A result without some branches."""
    model = find_model("resnet14").eval()
    graph = analyze(model, torch.randn(1, 3, 32, 32), probe=False)
    plan = Plan.keep(graph, {"conv1": range(12)}, without=["stage1.1", "stage2.0"])
    result = Result(model=shrink(model, plan), plan=plan, settings=TickTock.of(keep_macs=0.5), history=())
    return save(result, tmp_path / "shallow", network={"name": "resnet14", "options": {}})


@pytest.mark.slow
def test_a_result_without_some_branches(secateur: Call, shallow: Path, tmp_path: Path) -> None:
    status, text, _ = secateur("structure", shallow)
    assert status == 0
    assert text.splitlines()[-1] == "removed branches: stage1.1, stage2.0"
    assert re.search(r"stage1\.1\.conv2 +16 +0 +0%", text)
    (told,) = json.loads(secateur("structure", shallow, "--json")[1])
    assert told["removed_branches"] == ["stage1.1", "stage2.0"]
    for kind in ("onnx", "pt2"):
        status, _, err = secateur("export", shallow, f"--{kind}", tmp_path / f"network.{kind}")
        assert status == 0, err
        assert (tmp_path / f"network.{kind}").stat().st_size > 0


@pytest.mark.parametrize("columns", [80, 200])
def test_recipes_lists_everything_by_name(secateur: Call, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    status, text, _ = secateur("recipes")
    assert status == 0
    rows = [line for line in text.splitlines() if line.startswith("  ")]
    assert max(map(len, rows)) <= columns
    first = [row.split()[0] for row in rows if row[2] != " "]
    assert first == [*RECIPES, *EXPERIMENTS, *DATASETS]
    words = " ".join(text.split())
    assert "table1 Table 1: ResNet-56 to 40% and 30% of its MACs. [CIFAR-10]" in words
    assert re.search(r"fcn32s-voc FCN-32s [^[]+ \[PASCAL VOC 2011 with SBD\]", words)


def test_recipes_as_json(secateur: Call) -> None:
    told = json.loads(secateur("recipes", "--json")[1])
    assert [recipe["name"] for recipe in told["recipes"]] == list(RECIPES)
    assert [experiment["name"] for experiment in told["experiments"]] == list(EXPERIMENTS)
    assert {recipe["name"]: recipe["data"] for recipe in told["recipes"]}["vgg16m-cub200"] == "CUB-200-2011"
    assert all(row["summary"] == " ".join(row["summary"].split()) != "" for rows in told.values() for row in rows)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("vgg16m-cub200", ["epochs = 90", "lr = 0.003", "divide = 3.0", "batches of 64", "images.txt"]),
        ("fcn32s-voc", ["epochs = 11", "keep_macs = 0.73", "tick_lr = 1e-10", "benchmark_RELEASE/dataset"]),
        ("resnet20@class_folders", ["resnet20", "epochs = 160", "a folder for each class"]),
        ("digits", ["epochs = 15", "tock_epochs = 3"]),
        (
            "resnet56-cifar10-ours",
            ["retrain_epochs = 80", "distill = 0.9", "batches of 256, squares of 8 pixels erased"],
        ),
    ],
)
def test_one_recipe_as_a_whole(secateur: Call, name: str, shown: list[str]) -> None:
    status, text, _ = secateur("recipes", "--show", name)
    assert status == 0
    assert text.startswith(f"{name}: ")
    for words in shown:
        assert words in text


@pytest.mark.parametrize("name", sorted(DATASETS))
def test_every_dataset_says_how_its_folder_looks(secateur: Call, name: str) -> None:
    assert secateur("recipes", "--show", f"resnet20@{name}")[0] == 0


def test_one_recipe_as_json(secateur: Call) -> None:
    told = json.loads(secateur("recipes", "--show", "vgg16m-cub200", "--json")[1])
    recipe = find_recipe("vgg16m-cub200")
    assert (told["network"], told["pruning"]["keep_macs"], told["training"]["epochs"]) == ("vgg16_m", 0.4, 90)
    assert told["training"] == recipe.training.to_dict()


def test_a_recipe_that_is_none(secateur: Call) -> None:
    status, _, err = secateur("recipes", "--show", "vgg16-cub200")
    assert (status, len(err.splitlines()), "'vgg16m-cub200'" in err) == (2, 1, True)


def test_structure_in_words(secateur: Call, run: Path) -> None:
    status, text, _ = secateur("structure", run)
    title, heads, *rows = text.splitlines()
    assert (status, title) == (0, str(run))
    assert heads.split() == ["layer", "before", "after", "left"]
    layers = doing.summary(run)["layers"]
    assert [row.split() for row in rows] == [
        [name, str(before), str(after), f"{after / before:.0%}"] for name, before, after in layers
    ]
    assert any(before > after for _, before, after in layers)


def test_structures_side_by_side_as_json(secateur: Call, run: Path) -> None:
    told = json.loads(secateur("structure", run, run / "result", run.parent / "trained", "--json")[1])
    assert [each["title"] for each in told] == [str(run), str(run / "result"), str(run.parent / "trained")]
    assert told[0]["layers"] == told[1]["layers"]
    assert all(layer["after"] == layer["before"] for layer in told[2]["layers"])
    assert [list(layer.values()) for layer in told[0]["layers"]] == doing.summary(run)["layers"]


@pytest.mark.parametrize(
    ("suffix", "begins", "flags"), [(".svg", b"<?xml", []), (".png", b"\x89PNG", ["--percent"]), (".pdf", b"%PDF", [])]
)
def test_structure_as_a_figure(
    secateur: Call, run: Path, tmp_path: Path, suffix: str, begins: bytes, flags: list[str]
) -> None:
    figure = tmp_path / "new" / f"figure{suffix}"
    status, text, _ = secateur("structure", run, "--figure", figure, *flags)
    assert status == 0
    assert text.endswith(f"drawn into {figure}\n")
    assert figure.read_bytes().startswith(begins)
    assert [path.name for path in figure.parent.iterdir()] == [figure.name]


def test_percent_is_what_was_removed(secateur: Call, run: Path, tmp_path: Path) -> None:
    secateur("structure", run, "--figure", tmp_path / "figure.svg", "--percent")
    text = "".join(ElementTree.parse(tmp_path / "figure.svg").getroot().itertext())
    layers = doing.summary(run)["layers"]
    paths = [node for node in ElementTree.parse(tmp_path / "figure.svg").iter() if node.tag.endswith("}path")]
    bars = [node.get("d", "").split() for node in paths if "fill: #3b6fb6" in node.get("style", "")]
    assert text.strip()
    assert len(bars) == len(layers)
    # Bars are as high as the shares: "M left bottom L right bottom L right top ..."
    heights = [float(bar[2]) - float(bar[8]) for bar in bars]
    removed = [1 - after / before for _, before, after in layers]
    assert heights == pytest.approx([height / max(removed) * max(heights) for height in removed], abs=0.01)


def test_what_is_no_run_or_figure_is_one_line(secateur: Call, run: Path, tmp_path: Path) -> None:
    for arguments, word in (
        ([run, "--figure", tmp_path / "figure.jpg"], ".svg"),
        ([tmp_path], str(tmp_path)),
        ([tmp_path / "nowhere"], "nowhere"),
    ):
        status, text, err = secateur("structure", *arguments)
        assert (status, text, len(err.splitlines()), word in err) == (2, "", 1, True)
    assert not list(tmp_path.iterdir())


ODD = ["", "{", "[]", "3", "[" * 5000, "\udcff"]
LAYERS = [3, None, {"a": 1}, [3], [["conv"]], [["conv", "8", 4]], [["conv", 0, 0]], [["conv", 8, 4, 2]]]
LINES = ["{", "3", "[]", '{"removed": 3}', '{"removed": {"0": "two"}}', '{"removed": null}']
DAMAGE = [
    *(("config.json", text) for text in ODD),
    *(("result/summary.json", text) for text in ODD),
    *(("result/summary.json", layers) for layers in LAYERS),
    *(("events.jsonl", line) for line in LINES),
]


@pytest.mark.parametrize(("name", "damage"), DAMAGE, ids=str)
def test_a_damaged_file_is_one_line(secateur: Call, run: Path, name: str, damage: object, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    file = tmp_path / "run" / name
    if name == "events.jsonl":
        text = f"{file.read_text()}{damage}\n"
    elif isinstance(damage, str):
        text = damage
    else:
        text = json.dumps({**json.loads(file.read_text()), "layers": damage})
    file.write_bytes(text.encode(errors="surrogateescape"))
    status, out, err = secateur("structure", file.parent)
    assert (status, out, len(err.splitlines())) == (2, "", 1), err
    assert str(file) in err


def test_half_a_line_of_events_is_being_written(secateur: Call, run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    whole = json.loads(secateur("structure", run, "--json")[1])[0]["layers"]
    with (tmp_path / "run" / "events.jsonl").open("a") as events:
        events.write('{"event": "Tick", "removed": {"')
    assert json.loads(secateur("structure", tmp_path / "run", "--json")[1])[0]["layers"] == whole


def test_evaluate_weights_from_a_file(secateur: Call, run: Path, cifar: Path) -> None:
    file = run.parent / "trained" / "result" / "model.safetensors"
    status, out, _ = secateur("evaluate", PLAIN, "--data", cifar, "--weights", file, "--json", "--device", "cpu")
    assert status == 0
    assert json.loads(out) == pytest.approx(doing.summary(run.parent / "trained")["after"]["metrics"], rel=1e-6)


def test_evaluate_what_was_held_out(secateur: Call, run: Path, cifar: Path) -> None:
    given = ["evaluate", PLAIN, "--data", cifar, "--weights", run, "--json", "--device", "cpu"]
    status, out, _ = secateur(*given, "--hold-out", 7)
    assert status == 0
    right = json.loads(out)["accuracy"] * 7 / 100
    assert right == pytest.approx(round(right), abs=1e-3)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["resnet20@cifar10", "--weights", "nowhere"], "--data FOLDER"),
        (["digist"], "'digits'"),
        (["digits", "--weights", "nowhere"], "nowhere"),
        (["digits", "--weights", "nowhere", "--device", "gpu"], "'gpu'"),
        (["digits", "--weights", "nowhere", "--hold-out", "5000"], "5000"),
        (["digits"], "--weights RUN"),
    ],
)
def test_a_wrong_evaluation_is_one_line(secateur: Call, arguments: list[str], word: str) -> None:
    status, out, err = secateur("evaluate", *arguments)
    # A slow machine says what it is waiting for.
    lines = [line for line in err.splitlines() if not line.startswith("testing ")]
    assert (status, out, len(lines)) == (2, "", 1), err
    assert lines[0].startswith("secateur: ")
    assert word in lines[0]


def test_a_figure_needs_matplotlib_and_says_so(
    secateur: Call, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, _, err = secateur("structure", run, "--figure", tmp_path / "figure.svg")
    assert (status, len(err.splitlines()), 'pip install "secateur[report]"' in err) == (2, 1, True)


def test_one_format_that_fails_does_not_keep_the_others(
    secateur: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> float:
        raise InvalidModel("not as that")

    monkeypatch.setattr("secateur.results.export.export_program", fail)
    files = {"--pt2": "a.pt2", "--torchscript": "a.ts", "--state-dict": "a.safetensors"}
    given = [part for flag, name in files.items() for part in (flag, tmp_path / name)]
    status, _, err = secateur("export", "resnet20", *given)
    assert status == 2
    assert err.splitlines()[-1].endswith(f"not as that; written: {tmp_path / 'a.ts'}, {tmp_path / 'a.safetensors'}")
    assert {path.name for path in tmp_path.iterdir()} == {"a.ts", "a.safetensors"}
