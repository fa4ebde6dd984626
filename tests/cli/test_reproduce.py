"""Every experiment of the paper, from the command to its page, with small networks on a few images."""

import json
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import doing
import miniature_images
import own_networks
import pytest
import torch
from torchvision.models import mobilenet_v2

from secateur.cli.display import Display
from secateur.recipes.paper import RECIPES, find_recipe

Call = Callable[..., tuple[int, str, str]]
Page = tuple[list[str], dict[str, list[str]]]

RESNET, VGG, PLAIN = "resnet14@cifar10", "vgg16_m@cifar10", "own_networks:plain@cifar10"
WIDTHS = {RESNET: "0.25", VGG: "0.1", PLAIN: "1"}
GREY, BLUE = "#d9d9d9", "#3b6fb6"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all experiments, which share runs there."""
    return tmp_path_factory.mktemp("reproduced")


@pytest.fixture
def reproduce(secateur: Call, cifar: Path, out: Path) -> Call:
    """A rehearsal on CIFAR-10."""

    def call(experiment: str, recipe: str, *more: object) -> tuple[int, str, str]:
        given = ["--recipe", recipe, "--width", WIDTHS[recipe], "--data", cifar, "--epochs-scale", "0.01"]
        return secateur("reproduce", experiment, *given, "--device", "cpu", "--out", out, *more)

    return call


def read_page(path: Path) -> Page:
    """The heads of its table, and the rows by their first cell."""
    rows = [line.strip("| ").split(" | ") for line in path.read_text().splitlines() if line.startswith("| ")]
    heads, _, *rest = rows
    return heads, {row[0]: [cell.strip() for cell in row[1:]] for row in rest}


def page_of(out: Path, experiment: str, recipe: str) -> Path:
    return out / f"{experiment}-{recipe.replace(':', '-')}-seed0.md"


def summaries(out: Path, recipe: str) -> dict[str, dict[str, Any]]:
    runs = out / recipe.replace(":", "-")
    return {run.name.removesuffix("-seed0"): doing.summary(run) for run in runs.iterdir() if (run / "result").exists()}


def fell(summary: dict[str, Any], what: str) -> str:
    return f"{100 * (summary['after'][what] - summary['before'][what]) / summary['before'][what]:+.1f}%"


def shapes(figure: Path, look: str) -> list[str]:
    """The paths of a drawing whose style has that in it."""
    paths = [node for node in ElementTree.parse(figure).iter() if node.tag.endswith("}path")]
    return [node.get("style", "") for node in paths if look in node.get("style", "")]


@pytest.mark.parametrize(("experiment", "steps"), [("table1", ["GBN-40", "GBN-30"]), ("table2", ["GBN-60", "GBN-50"])])
def test_tables_1_and_2(reproduce: Call, out: Path, experiment: str, steps: list[str]) -> None:
    status, text, _ = reproduce(experiment, RESNET)
    assert status == 0
    page = page_of(out, experiment, RESNET)
    assert text == f"{page.read_text()}\nwritten to {page}\n"
    assert text.startswith(f"# {experiment}\n")
    assert "A rehearsal: everything is 0.01 times as long as it should be." in text
    heads, rows = read_page(page)
    assert heads == ["network", "MACs", "parameters", "accuracy", "loss", "the paper"]
    assert list(rows) == steps
    runs = summaries(out, RESNET)
    for name, (macs, params, accuracy, loss, paper) in rows.items():
        run = runs[name]
        assert macs == fell(run, "macs")
        assert params == fell(run, "params")
        before, after = (run[when]["metrics"]["accuracy"] for when in ("before", "after"))
        assert accuracy == f"{before:.2f} -> {after:.2f} ({after - before:+.2f})"
        assert before == runs["baseline"]["after"]["metrics"]["accuracy"]
        assert loss.startswith(f"{run['before']['metrics']['loss']:.2f} -> {run['after']['metrics']['loss']:.2f}")
        assert "parameters" in paper
    assert re.search(rf"recipe {RESNET}, .*, torch [\d.+a-z]+, seed 0, n = 1, \d+ s of training in all", text)


def test_throughput_is_of_the_networks_of_table_2(reproduce: Call, out: Path) -> None:
    assert reproduce("table2", RESNET)[0] == 0
    status, _, err = reproduce("throughput", RESNET)
    assert status == 0
    assert err.count("finished already") == 3
    heads, rows = read_page(page_of(out, "throughput", RESNET))
    assert heads[:3] == ["network", "images/s", "faster by"]
    assert list(rows) == ["baseline", "GBN-60", "GBN-50"]
    speeds = {name: float(row[0]) for name, row in rows.items()}
    assert all(speed > 0 for speed in speeds.values())
    for name, row in rows.items():
        assert float(row[1].rstrip("%")) / 100 == pytest.approx(speeds[name] / speeds["baseline"] - 1, abs=0.02)
    assert rows["baseline"][2] == "864"


def test_appendix_d_draws_what_was_removed_of_each_layer(reproduce: Call, out: Path) -> None:
    assert reproduce("table2", RESNET)[0] == 0
    status, text, _ = reproduce("appendix-d", RESNET)
    assert status == 0
    page = page_of(out, "appendix-d", RESNET)
    heads, rows = read_page(page)
    assert heads == ["layer", "before", "GBN-60"]
    layers = [row for row in summaries(out, RESNET)["GBN-60"]["layers"] if "shortcut" not in row[0]]
    # Without shortcuts, as in the paper's figure.
    assert [[name, *map(int, row)] for name, row in rows.items()] == layers
    assert any(before > after for _, before, after in layers)
    assert f"![Figure]({page.with_suffix('.svg').name})" in text
    assert len(shapes(page.with_suffix(".svg"), f"fill: {BLUE}")) == len(layers)


@pytest.mark.slow
def test_table_3(reproduce: Call, out: Path) -> None:
    status, _, err = reproduce("table3", PLAIN, "--quiet")
    assert (status, err) == (0, "")
    heads, rows = read_page(page_of(out, "table3", PLAIN))
    assert heads[:5] == ["schedule", "MACs", "parameters", "fine-tuned", "from scratch"]
    schedules = ("one-shot", "tick-only", "tick-tock")
    assert list(rows) == [f"{schedule}-{share}" for share in (60, 40, 20) for schedule in schedules]
    runs = summaries(out, PLAIN)
    for name, (macs, params, tuned, scratch, _) in rows.items():
        assert (macs, params) == (fell(runs[name], "macs"), fell(runs[name], "params"))
        assert tuned == f"{runs[name]['after']['metrics']['accuracy']:.2f}"
        assert scratch == f"{runs[f'{name}-scratch']['after']['metrics']['accuracy']:.2f}"
        # Scratch has the shape of the pruned network.
        assert runs[f"{name}-scratch"]["layers"] == runs[name]["layers"]
        assert runs[f"{name}-scratch"]["after"]["macs"] == runs[name]["after"]["macs"]
        events = out / PLAIN.replace(":", "-") / f"{name}-seed0" / "result" / "history.jsonl"
        kinds = [json.loads(line)["event"] for line in events.read_text().splitlines()]
        if name.startswith("one-shot"):
            assert kinds.count("Tick") == 1
        if name.startswith("tick-only"):
            assert "Tock" not in kinds


@pytest.mark.slow
def test_appendix_e_shows_runs_of_table_3(reproduce: Call, out: Path) -> None:
    assert reproduce("table3", PLAIN)[0] == 0
    status, _, err = reproduce("appendix-e", PLAIN)
    assert status == 0
    assert err.count("finished already") == 4
    page = page_of(out, "appendix-e", PLAIN)
    heads, rows = read_page(page)
    names = ["one-shot-20", "tick-only-20", "tick-tock-20"]
    assert heads == ["layer", "before", *names]
    runs = summaries(out, PLAIN)
    for column, name in enumerate(names, 1):
        assert [[layer, int(row[0]), int(row[column])] for layer, row in rows.items()] == runs[name]["layers"]
    # A bar for each layer of each network, and one in the legend.
    assert len(shapes(page.with_suffix(".svg"), f"fill: {GREY}")) == 3 * (len(rows) + 1)


@pytest.mark.slow
def test_nas_compares_a_pruned_network_with_a_narrower_one(reproduce: Call, out: Path) -> None:
    status, _, _ = reproduce("nas", VGG, "--quiet")
    assert status == 0
    page = page_of(out, "nas", VGG)
    heads, rows = read_page(page)
    assert heads[:5] == ["network", "MACs", "parameters", "accuracy", "change"]
    assert list(rows) == ["quarter", "quarter-scratch", "shrunk"]
    runs = summaries(out, VGG)
    whole = runs["baseline"]["after"]
    for name, (macs, params, accuracy, change, _) in rows.items():
        after = runs[name]["after"]
        assert (macs, params) == (f"{after['macs']:,}", f"{after['params']:,}")
        assert accuracy == f"{after['metrics']['accuracy']:.2f}"
        assert change == f"{after['metrics']['accuracy'] - whole['metrics']['accuracy']:+.2f}"
        assert after["macs"] / whole["macs"] == pytest.approx(0.25, abs=0.03)
    # All layers of the narrower one are narrower by about the same factor.
    assert runs["shrunk"]["order"]["width"] == pytest.approx(0.05, abs=0.01)
    assert len(shapes(page.with_suffix(".svg"), f"fill: {GREY}")) == 2 * (13 + 1)
    assert len(shapes(page.with_suffix(".svg"), f"fill: {BLUE}")) == 13 + 1


@pytest.mark.slow
def test_gfir_draws_a_curve_for_each_score(reproduce: Call, tmp_path: Path) -> None:
    # Wide enough that a fifth of its filters is more than its ten classes.
    status, _, err = reproduce("gfir", PLAIN, "--quiet", "--width", 4, "--out", tmp_path)
    assert (status, err) == (0, "")
    page = page_of(tmp_path, "gfir", PLAIN)
    heads, rows = read_page(page)
    assert heads == ["score", *(f"{share}% of the filters removed" for share in (20, 40, 60, 80))]
    scores = ("taylor", "slim", "pcnn", "l1", "random")
    assert sorted(rows) == sorted([*scores, *(f"{score}-sparse" for score in scores if score != "pcnn")])
    for name, row in rows.items():
        run = tmp_path / PLAIN.replace(":", "-") / f"{name}-seed0" / "result" / "history.jsonl"
        events = [json.loads(line) for line in run.read_text().splitlines()]
        for share, cell in zip((20, 40, 60, 80), row, strict=True):
            last = [e for e in events if e["filters"] >= (100 - share) / 100 * events[0]["filters"]][-1]
            gone = 100 * (1 - last["filters"] / events[0]["filters"])
            short = f"only {gone:.0f}% removed, " if share - gone > 2 else ""
            assert cell == f"{last['metrics']['accuracy']:.2f} ({short}{100 * last['share']:.0f}% MACs left)"
    # Lines without and with the L1 term, where PCNN is again, and of the legend.
    assert len(shapes(page.with_suffix(".svg"), "stroke-width: 1.2")) == len(rows) + 1 + len(scores)


def test_segmentation_shows_what_both_networks_predict(
    secateur: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = find_recipe("fcn32s-voc").but(input_size=(3, 48, 48))  # the images here are smaller still
    monkeypatch.setitem(RECIPES, "fcn32s-voc", lambda: recipe)
    miniature_images.write_voc2011_sbd(tmp_path / "voc", num_images=2)
    arguments = ["--width", "0.03", "--data", tmp_path / "voc", "--epochs-scale", "0.01", "--device", "cpu", "--quiet"]
    status, text, err = secateur("reproduce", "segmentation", *arguments, "--out", tmp_path / "out")
    assert status == 0, err
    page = page_of(tmp_path / "out", "segmentation", "fcn32s-voc")
    heads, rows = read_page(page)
    metrics = ["before fine-tuning", "miou", "pixel_accuracy", "epochs"]
    assert heads == ["network", "MACs", "parameters", *metrics, "the paper: FCN-32s, VOC"]
    assert list(rows) == ["whole", "pruned", "half"]
    done = summaries(tmp_path / "out", "fcn32s-voc")
    for name in ("pruned", "half"):
        assert rows[name][0] == fell(done[name], "macs")
        history = tmp_path / "out" / "fcn32s-voc" / f"{name}-seed0" / "result" / "history.jsonl"
        events = [json.loads(line) for line in history.read_text().splitlines()]
        [*_, last] = [event for event in events if event["event"] in ("Tick", "Tock")]
        assert rows[name][2] == f"{last['metrics']['miou']:.2f}"
        assert rows[name][5] == str(sum(event["event"] in ("Tock", "FineTune", "Train") for event in events))
    assert (rows["whole"][0], rows["whole"][2]) == ("+0.0%", "-")
    assert f"![What the networks predict]({page.with_suffix('.svg').name})" in text
    drawing = list(ElementTree.parse(page.with_suffix(".svg")).iter())
    # An image, the truth, and three networks' labels, for each of two images.
    assert sum(node.tag.endswith("}image") for node in drawing) == 2 * 5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deeplab-mobilenetv2-camvid", "fcn-mobilenetv2-camvid"])
def test_segmentation_on_camvid(secateur: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    recipe = find_recipe(name).but(input_size=(3, 32, 64))
    monkeypatch.setitem(RECIPES, name, lambda: recipe)
    miniature_images.write_camvid(tmp_path / "camvid", num_images=2)
    torch.save(mobilenet_v2(width_mult=0.25).state_dict(), tmp_path / "weights.pth")
    arguments = ["--width", "0.25", "--data", tmp_path / "camvid", "--weights", tmp_path / "weights.pth"]
    short = ["--epochs-scale", "0.01", "--device", "cpu", "--quiet", "--out", tmp_path / "out"]
    status, _, err = secateur("reproduce", "segmentation", "--recipe", name, *arguments, *short)
    assert status == 0, err
    rows = read_page(page_of(tmp_path / "out", "segmentation", name))[1]
    assert list(rows) == ["whole", "pruned", "half"]
    assert rows["whole"][5] == "1"

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, text, err = secateur("reproduce", "segmentation", "--recipe", name, *arguments, *short)
    assert status == 0, err
    assert read_page(page_of(tmp_path / "out", "segmentation", name))[1] == rows
    assert "No pictures are drawn: matplotlib is not installed" in text


def test_segmentation_needs_label_maps(reproduce: Call, tmp_path: Path) -> None:
    """Said before anything is trained."""
    status, _, err = reproduce("segmentation", PLAIN, "--out", tmp_path, "--quiet")
    assert (status, len(err.splitlines())) == (2, 1)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_baseline_of_segmentation_alone(secateur: Call, tmp_path: Path) -> None:
    miniature_images.write_voc2011_sbd(tmp_path / "voc", num_images=1)
    arguments = ["--width", "0.02", "--data", tmp_path / "voc", "--epochs-scale", "0.01", "--device", "cpu"]
    status, text, err = secateur("reproduce", "segmentation", *arguments, "--only", "baseline", "--out", tmp_path)
    assert status == 0, err
    assert text.startswith("# segmentation\n")


def test_again_does_nothing_but_print_the_page(reproduce: Call, out: Path) -> None:
    first = reproduce("table1", RESNET)
    times = {path: path.stat().st_mtime_ns for path in (out / RESNET).rglob("*")}
    status, text, err = reproduce("table1", RESNET)
    assert (status, text) == (0, first[1])
    assert [line.split(",")[0] for line in err.splitlines()] == [
        f"{step}: finished already" for step in ("baseline", "GBN-40", "GBN-30")
    ]
    assert {path: path.stat().st_mtime_ns for path in (out / RESNET).rglob("*")} == times


def test_a_smaller_budget_continues_from_a_larger_one(reproduce: Call, out: Path) -> None:
    assert reproduce("table1", RESNET)[0] == 0
    histories = [
        (out / RESNET / f"{step}-seed0" / "events.jsonl").read_text().splitlines() for step in ("GBN-40", "GBN-30")
    ]
    pruning = [[line for line in lines if '"FineTune"' not in line] for lines in histories]
    assert pruning[1][: len(pruning[0])] == pruning[0]
    assert len(pruning[1]) > len(pruning[0])


def test_a_recipe_that_retrains_the_whole_network(
    reproduce: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = find_recipe("vgg16m-cifar10")
    recipe = recipe.but(network="own_networks:plain", pruning=recipe.pruning.but(retrain_epochs=60))
    monkeypatch.setitem(RECIPES, PLAIN, lambda: recipe)
    more = ("--out", tmp_path)
    status, _, told = reproduce("table1", PLAIN, *more)
    assert status == 0
    runs = tmp_path / PLAIN.replace(":", "-")
    assert told.count("Retrain epoch 1") == 1, "the smaller one continues from the other"
    networks = [(runs / f"{name}-seed0" / "retrain.safetensors").read_bytes() for name in ("GBN-40", "GBN-30")]
    assert networks[0] == networks[1]
    for name in ("GBN-40", "GBN-30"):
        found = doing.summary(runs / f"{name}-seed0")
        assert found["before"]["metrics"] == doing.summary(runs / "baseline-seed0")["after"]["metrics"]
    status, _, told = reproduce("table1", PLAIN, *more)
    assert (status, told.count("finished already")) == (0, 3)


def test_as_json(reproduce: Call, out: Path) -> None:
    _, text, _ = reproduce("table1", RESNET)
    told = json.loads(reproduce("table1", RESNET, "--json", "--quiet")[1])
    assert told["page"] == str(page_of(out, "table1", RESNET))
    assert text.startswith(told["text"])
    assert {"baseline", "GBN-40"} <= set(told["runs"])
    assert all((Path(folder) / "result" / "summary.json").is_file() for folder in told["runs"].values())


def test_runs_that_were_moved_are_finished_and_need_no_baseline(
    reproduce: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = reproduce("table1", PLAIN, "--out", tmp_path / "here")[1]
    (tmp_path / "here").rename(tmp_path / "there")
    monkeypatch.chdir(tmp_path)
    status, text, err = reproduce("table1", PLAIN, "--out", "there")
    assert (status, err.count("finished already")) == (0, 3), err
    assert text.splitlines()[:-1] == first.splitlines()[:-1]
    shutil.rmtree(tmp_path / "there" / PLAIN.replace(":", "-") / "baseline-seed0")
    status, _, err = reproduce("table1", PLAIN, "--out", "there", "--only", "GBN-*")
    assert status == 0, err
    assert list(read_page(page_of(tmp_path / "there", "table1", PLAIN))[1]) == ["GBN-40", "GBN-30"]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (["--epochs-scale", "0.5"], "epochs"),
        (["--batch-size", "7"], "batch_size"),
        (["--erase", "2"], "erase"),
        (["--width", "0.5"], "width"),
        (["--hold-out", "3"], "hold_out"),
    ],
)
def test_other_settings_in_the_same_folder_are_refused(
    reproduce: Call, out: Path, change: list[str], what: str
) -> None:
    assert reproduce("table1", RESNET)[0] == 0
    status, text, err = reproduce("table1", RESNET, *change)
    assert (status, text, len(err.splitlines())) == (2, "", 1)
    assert err.startswith(f"secateur: {out / RESNET / 'baseline-seed0'} holds another run: got other {what}. ")


def test_another_baseline_in_the_same_folder_is_refused(reproduce: Call, out: Path, tmp_path: Path) -> None:
    assert reproduce("table1", RESNET)[0] == 0
    other = out / RESNET / "baseline-seed0" / "original.safetensors"
    status, _, err = reproduce("table1", RESNET, "--baseline", other)
    assert status == 2, "the runs that were done began with another network"
    assert err.splitlines()[-1].startswith(
        f"secateur: {out / RESNET / 'GBN-40-seed0'} holds another run: got other weights"
    )


def test_a_published_run_tells_the_name_of_its_baseline_alone(reproduce: Call, out: Path, tmp_path: Path) -> None:
    assert reproduce("table1", RESNET)[0] == 0
    weights = tmp_path / "elsewhere" / "weights.safetensors"
    weights.parent.mkdir()
    shutil.copy(out / RESNET / "baseline-seed0" / "result" / "model.safetensors", weights)
    for run in ("GBN-40", "GBN-30"):
        summary = out / RESNET / f"{run}-seed0" / "result" / "summary.json"
        told = json.loads(summary.read_text())
        told["order"]["weights"] = "weights.safetensors"
        summary.write_text(json.dumps(told))
    status, _, err = reproduce("table1", RESNET, "--baseline", weights)
    assert status == 0, err
    other = weights.rename(tmp_path / "other.safetensors")
    assert "other weights" in reproduce("table1", RESNET, "--baseline", other)[2]


def test_only_some_runs(reproduce: Call, tmp_path: Path) -> None:
    for more, words in (
        (["--only", "GBN-*"], "GBN-40 starts from baseline"),
        (["--baseline", "nowhere"], "nowhere"),
        (["--only", "GBM*"], "baseline, GBN-40, GBN-30"),
    ):
        status, _, err = reproduce("table1", PLAIN, "--out", tmp_path, *more)
        assert (status, words in err.splitlines()[-1]) == (2, True)
    assert reproduce("table1", PLAIN, "--out", tmp_path, "--only", "baseline")[0] == 0
    assert read_page(page_of(tmp_path, "table1", PLAIN))[1] == {}
    assert reproduce("table1", PLAIN, "--out", tmp_path, "--only", "*30")[0] == 0
    assert list(read_page(page_of(tmp_path, "table1", PLAIN))[1]) == ["GBN-30"]


@pytest.mark.parametrize("experiment", ["throughput", "appendix-d", "appendix-e", "nas", "gfir", "table3"])
def test_the_baseline_alone(reproduce: Call, experiment: str) -> None:
    """Its figure has nothing to show yet, and says so, or is left out."""
    status, text, err = reproduce(experiment, PLAIN, "--only", "baseline", "--seed", "1")
    assert (status, len(err.splitlines()[-1:])) == (0, 1), err
    assert text.startswith(f"# {experiment}\n")


def test_a_trained_network_from_a_file(reproduce: Call, tmp_path: Path) -> None:
    import torch

    torch.manual_seed(5)
    model = own_networks.plain(num_classes=10)
    torch.save(model.state_dict(), tmp_path / "trained.pth")
    given = ["--out", tmp_path / "out", "--baseline", tmp_path / "trained.pth", "--only", "GBN-40"]
    status, _, err = reproduce("table1", PLAIN, *given)
    assert status == 0, err
    runs = summaries(tmp_path / "out", PLAIN)
    assert set(runs) == {"GBN-40"}
    begun = doing.weights(tmp_path / "out" / PLAIN.replace(":", "-") / "GBN-40-seed0" / "original.safetensors")
    assert doing.same(begun, dict(model.state_dict()))


def test_seeds_have_runs_and_pages_of_their_own(reproduce: Call, tmp_path: Path) -> None:
    pages = []
    for seed in (0, 1):
        status, text, _ = reproduce("table1", PLAIN, "--out", tmp_path, "--seed", seed, "--only", "baseline")
        assert status == 0
        assert f", seed {seed}, n = 1," in text
        pages.append(text.splitlines()[-1])
    assert len(set(pages)) == 2, "the second page has replaced the first"
    weights = [
        doing.weights(tmp_path / PLAIN.replace(":", "-") / f"baseline-seed{seed}" / "original.safetensors")
        for seed in (0, 1)
    ]
    assert not doing.same(*weights)


@pytest.mark.parametrize("change", [[], ["--batch-size", 3], ["--hold-out", 2]])
def test_a_stopped_experiment_is_resumed_as_it_was_or_not_at_all(
    secateur: Call, cifar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: list[object]
) -> None:
    given = ["--recipe", PLAIN, "--data", cifar, "--epochs-scale", "0.1", "--only", "baseline", "--device", "cpu"]
    command, shown = ["reproduce", "table1", *given, "--out", tmp_path], Display.show

    def stop_at_five(display: Display, event: Any) -> None:
        if getattr(event, "name", "") == "Train epoch 5":
            signal.raise_signal(signal.SIGINT)
        shown(display, event)

    with monkeypatch.context() as patch:
        patch.setattr(Display, "show", stop_at_five)
        status, _, err = secateur(*command)
    run = tmp_path / PLAIN.replace(":", "-") / "baseline-seed0"
    assert (status, (run / "result").exists()) == (130, False)
    assert err.endswith(f"secateur: stopped and saved in {run}. Give the same command again to continue\n")
    before = (run / "events.jsonl").read_bytes()
    status, text, err = secateur(*command, *change)
    if change:
        assert (status, str(change[0])[2:].replace("-", "_") in err.splitlines()[-1]) == (2, True)
    else:
        assert (status, text[:9]) == (0, "# table1\n")
        assert (run / "events.jsonl").read_bytes().startswith(before)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["tabel1"], "'table1'"),
        (["table1", "--recipe", "resnet56"], "'resnet56-cifar10'"),
        (["table1"], "--data FOLDER"),
        (["table1", "--epochs-scale", "0"], "epochs_scale"),
        (["table1", "--recipe", "own_networks:job"], "'own_networks:job'"),
        (["table1", "--clip-norm", "-1"], "clip_norm"),
    ],
)
def test_a_mistake_is_one_line(secateur: Call, arguments: list[str], word: str, tmp_path: Path) -> None:
    status, text, err = secateur("reproduce", *arguments, "--out", tmp_path, "--quiet")
    assert (status, text, len(err.splitlines())) == (2, "", 1), err
    assert word in err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_controls_change_one_thing_at_a_time(reproduce: Call, tmp_path: Path) -> None:
    given = ["--quiet", "--out", tmp_path]
    assert reproduce("controls", RESNET, *given)[0] == 0
    heads, rows = read_page(page_of(tmp_path, "controls", RESNET))
    assert heads == ["run", "MACs", "parameters", "accuracy", "epochs"]
    runs = summaries(tmp_path, RESNET)
    assert {*rows} == {*runs} - {"baseline"} >= {"lifted", "whole", "reference-40", "scratch-40", "narrow-40"}
    reference = runs["reference-40"]
    unlike = {
        name: {key for key, value in run["settings"].items() if value != reference["settings"][key]}
        for name, run in runs.items()
        if run["settings"].keys() == reference["settings"].keys()
    }
    assert unlike["slim-40"] == {"score"}
    assert unlike["no-repair-40"] == {"repair"}
    assert unlike["no-squares-40"] == unlike["not-lifted-40"] == unlike["reference-40"] == set()
    assert runs["no-squares-40"]["order"]["erase"] == 0
    start = {name: Path(run["order"]["weights"] or "").name for name, run in runs.items()}
    assert start["slim-40"] == "lifted-seed0" != start["not-lifted-40"] == "baseline-seed0"
    assert runs["scratch-40"]["layers"] == reference["layers"]
    assert rows["whole"][0] == "+0.0%"
    # Another seed starts from the same network.
    assert reproduce("controls", RESNET, *given, "--seed", 1, "--only", "whole")[0] == 0
    assert not list(tmp_path.rglob("lifted-seed1"))
    assert list(tmp_path.rglob("whole-seed1"))


@pytest.mark.slow
def test_few_images_without_labels(secateur: Call, tmp_path: Path) -> None:
    miniature_images.write_class_folders(tmp_path / "photos", num_classes=3, per_class=5)
    recipe = "resnet14@class_folders"
    given = ["--recipe", recipe, "--width", 0.5, "--data", tmp_path / "photos", "--image-size", 32, "--device", "cpu"]
    given += ["--epochs-scale", 0.01, "--out", tmp_path / "out", "--quiet"]
    assert secateur("reproduce", "unlabelled", *given)[0] == 0
    heads, rows = read_page(page_of(tmp_path / "out", "unlabelled", recipe))
    assert heads[:3] == ["budget of MACs", "MACs", "parameters"]
    assert [head.partition(":")[0] for head in heads[3:]] == ["cut", "repaired", "distilled"]
    assert list(rows) == ["90%", "80%", "70%", "60%", "50%"]
    runs = summaries(tmp_path / "out", recipe)
    for name, run in runs.items():
        assert run["order"]["no_labels"] == (name != "baseline")
    for percent in (90, 50):
        cut, repaired, distilled = (runs[f"{way}-{percent}"] for way in ("cut", "repaired", "distilled"))
        assert (cut["settings"]["repair"], repaired["settings"]["repair"]) == (0, 1000)
        assert cut["after"]["macs"] <= percent / 100 * cut["before"]["macs"]
        assert distilled["layers"] == repaired["layers"]
        assert (distilled["settings"]["distill"], distilled["settings"]["fixed_statistics"]) == (1.0, True)
        for column, run in zip(rows[f"{percent}%"][2:], (cut, repaired, distilled), strict=True):
            assert f"-> {run['after']['metrics']['accuracy']:.2f}" in column
    assert (
        "15 without labels to prune with, 6 others to test"
        in page_of(tmp_path / "out", "unlabelled", recipe).read_text()
    )
    # The runs are finished: nothing is done again.
    assert secateur("reproduce", "unlabelled", *given)[0] == 0
