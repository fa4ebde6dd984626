"""Which runs the paper's tables and figures are made of, and what their pages say beside ours."""

from pathlib import Path
from typing import Any

import pytest

from secateur import Schedule, TickTock, Training
from secateur.errors import InvalidSetting
from secateur.recipes import curves, reports
from secateur.recipes.experiments import EXPERIMENTS, Experiment, Step, find_experiment
from secateur.recipes.jobs import Order
from secateur.recipes.paper import find_recipe
from secateur.training.checkpoint import RunFolder

SCHEDULES = ["one-shot", "tick-only", "tick-tock"]


def names(experiment: Experiment) -> list[str]:
    return [step.name for step in experiment.steps]


def pruning_of(step: Step) -> TickTock:
    assert isinstance(step.settings, TickTock)
    return step.settings


def training_of(step: Step) -> Schedule:
    assert isinstance(step.settings, Training)
    return step.settings.schedule


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_begins_with_the_papers_baseline(name: str) -> None:
    experiment = find_experiment(name)
    first, *rest = experiment.steps
    assert first.name == "baseline"
    assert first.settings == find_recipe(experiment.recipe).training
    # Each step starts from one that comes before it.
    done = {"baseline"}
    for step in rest:
        assert step.source in done or (step.source is None and step.narrow_to is not None)
        trains = step.narrow_to is not None or step.shape_of is not None
        trains |= step.name in ("lifted", "whole") or step.name.startswith("distilled-")
        assert isinstance(step.settings, Training) == trains
        assert step.name not in done
        done.add(step.name)
    assert callable(getattr(reports, experiment.report))
    assert experiment.data


@pytest.mark.parametrize(
    ("name", "recipe", "steps"),
    [
        ("table1", "resnet56-cifar10", {"GBN-40": 0.4, "GBN-30": 0.3}),
        ("table2", "resnet50-imagenet", {"GBN-60": 1 - 0.4054, "GBN-50": 1 - 0.5506}),
        ("throughput", "resnet50-imagenet", {"GBN-60": 1 - 0.4054, "GBN-50": 1 - 0.5506}),
        ("appendix-d", "resnet50-imagenet", {"GBN-60": 1 - 0.4054}),
        ("segmentation", "fcn32s-voc", {"pruned": 1 - 0.27, "half": 0.5}),
    ],
)
def test_networks_are_pruned_to_the_papers_cost(name: str, recipe: str, steps: dict[str, float]) -> None:
    experiment = find_experiment(name)
    assert experiment.recipe == recipe
    found = {step.name: step for step in experiment.steps[1:] if step.name != "whole"}
    pruning = {name: pruning_of(step) for name, step in found.items()}
    assert {name: settings.budget.macs for name, settings in pruning.items()} == pytest.approx(steps)
    for name, step in found.items():
        # How it is pruned is the recipe's matter.
        assert pruning[name].but(keep_macs=0.5) == find_recipe(recipe).pruning.but(keep_macs=0.5)
        assert step.weights_of == "baseline"
    before = list(steps)
    assert [step.continue_from for step in found.values()] == [None, *before[:-1]]


def test_table_3_has_three_schedules_to_three_costs_and_each_shape_from_scratch() -> None:
    experiment = find_experiment("table3")
    pruned = [f"{schedule}-{share}" for share in (60, 40, 20) for schedule in SCHEDULES]
    assert experiment.recipe == "vgg16m-cifar100"
    assert names(experiment) == ["baseline", *pruned, *(f"{name}-scratch" for name in pruned)]
    for name in pruned:
        step, scratch = experiment.step(name), experiment.step(f"{name}-scratch")
        schedule, share = name[:-3], int(name[-2:])
        pruning = pruning_of(step)
        assert pruning.budget.macs == share / 100
        assert pruning.ticks.removes == (1.0 if schedule == "one-shot" else 0.01)
        assert pruning.tocks.every == (10 if schedule == "tick-tock" else 0)
        assert (pruning.limits.min_channels, pruning.finetune.epochs) == (9, 40)
        assert step.continue_from == (None if schedule == "one-shot" else f"{schedule}-{share + 20}")
        # "We double the epochs to 320"; the learning rate falls at the same fractions of them.
        assert (scratch.shape_of, training_of(scratch).epochs) == (name, 320)
        assert training_of(scratch).milestones == (0.5, 0.75)


def test_appendix_e_shows_runs_of_table_3() -> None:
    table, appendix = find_experiment("table3"), find_experiment("appendix-e")
    assert names(appendix) == ["baseline", *(f"{schedule}-20" for schedule in SCHEDULES)]
    assert all(step == table.step(step.name) for step in appendix.steps)


@pytest.mark.parametrize("name", ["throughput", "appendix-d"])
def test_table_2_is_shared(name: str) -> None:
    table = find_experiment("table2")
    assert all(step == table.step(step.name) for step in find_experiment(name).steps)


def test_gfir_ranks_by_five_scores_with_and_without_the_l1_term() -> None:
    experiment = find_experiment("gfir")
    assert experiment.recipe == "vgg16m-cub200"
    plain = ["taylor", "slim", "pcnn", "l1", "random"]
    sparse = [f"{score}-sparse" for score in plain if score != "pcnn"]
    assert sorted(names(experiment)) == sorted(["baseline", *plain, *sparse])
    for step in experiment.steps[1:]:
        pruning = pruning_of(step)
        assert pruning.score == step.name.removesuffix("-sparse")
        assert pruning.tocks.sparsity == (1e-3 if step.name.endswith("-sparse") else 0.0)
        assert (pruning.budget.filters, pruning.budget.macs) == (0.2, None)
        # Accuracy counts after each Tick, before any fine-tuning.
        assert (pruning.finetune.epochs, pruning.evaluate, pruning.ticks.removes) == (0, "always", 0.01)


def test_nas_compares_networks_with_a_quarter_of_the_macs() -> None:
    experiment = find_experiment("nas")
    assert names(experiment) == ["baseline", "quarter", "quarter-scratch", "shrunk"]
    assert pruning_of(experiment.step("quarter")).budget.macs == 0.25
    assert experiment.step("shrunk").narrow_to == 0.25
    assert experiment.step("quarter-scratch").shape_of == "quarter"
    for name in ("quarter-scratch", "shrunk"):
        assert training_of(experiment.step(name)).epochs == 320


@pytest.mark.parametrize(
    "name", [name for name in EXPERIMENTS if name not in ("segmentation", "controls", "unlabelled")]
)
def test_an_experiment_with_another_recipe_has_its_settings(name: str) -> None:
    experiment = find_experiment(name, "resnet56-cifar10-authors")
    assert experiment.recipe == "resnet56-cifar10-authors"
    pruned = [step.settings for step in experiment.steps if isinstance(step.settings, TickTock)]
    assert pruned
    assert all(settings.tocks.first and settings.learning.weight_decay == 5e-4 for settings in pruned)


def test_controls_differ_from_the_reference_in_one_thing() -> None:
    experiment = find_experiment("controls")
    assert experiment.shared == ("baseline", "lifted")
    assert training_of(experiment.step("lifted")) == find_recipe(experiment.recipe).pruning.finetune.but(epochs=80)
    for percent in (30, 40):
        reference = experiment.step(f"reference-{percent}")
        settings = pruning_of(reference)
        assert (settings.budget.macs, settings.finetune.epochs, settings.repair) == (percent / 100, 40, 512)
        assert (settings.retrain_epochs, settings.tocks.first, reference.weights_of) == (0, True, "lifted")
        changed = {
            "slim": {"score": "slim"},
            "pcnn": {"score": "pcnn"},
            "l1": {"score": "l1"},
            "random": {"score": "random"},
            "one-shot": {"tick_removes": 1.0},
            "tick-only": {"tock_first": False, "tock_every": 0},
            "tick-tock": {"tock_first": False, "tock_every": 3, "tock_epochs": 5, "finetune_epochs": 35},
            "no-repair": {"repair": 0},
            "no-distillation": {"distill": 0.0},
            "no-squares": {},
            "not-lifted": {},
        }
        for name, values in changed.items():
            assert pruning_of(experiment.step(f"{name}-{percent}")) == settings.but(**values)
        assert experiment.step(f"no-squares-{percent}").erase == 0
        assert experiment.step(f"not-lifted-{percent}").weights_of == "baseline"
        # The Tock and fine-tuning of the reference have so many epochs together.
        for name in (f"scratch-{percent}", f"narrow-{percent}", "whole"):
            assert training_of(experiment.step(name)).epochs == 50
        assert experiment.step(f"scratch-{percent}").shape_of == reference.name
        assert experiment.step(f"narrow-{percent}").teacher == "lifted"


def test_networks_without_labels_are_cut_repaired_and_distilled() -> None:
    experiment = find_experiment("unlabelled")
    assert experiment.no_labels
    for before, percent in zip((None, 90, 80, 70, 60), (90, 80, 70, 60, 50), strict=True):
        cut, repaired, distilled = (experiment.step(f"{way}-{percent}") for way in ("cut", "repaired", "distilled"))
        for step in (cut, repaired):
            settings = pruning_of(step)
            assert (settings.trains, settings.finetune.epochs, settings.budget.macs) == (False, 0, percent / 100)
        assert (pruning_of(repaired).score, pruning_of(repaired).ticks.step) == ("measured", 0.1)
        assert (pruning_of(cut).ticks.removes, pruning_of(cut).repair) == (1.0, 0)
        assert repaired.continue_from == (None if before is None else f"repaired-{before}")
        assert (distilled.weights_of, training_of(distilled).epochs) == (repaired.name, 500)
        assert isinstance(distilled.settings, Training)
        assert distilled.settings.learning.distill_features == 5.0


def test_photographs_are_pruned_by_each_score_from_one_network() -> None:
    experiment = find_experiment("photographs")
    assert experiment.shared == ("baseline",)
    for step in experiment.steps[1:]:
        assert step.weights_of == "baseline"
    ours = pruning_of(experiment.step("taylor-50"))
    assert ours == find_recipe(experiment.recipe).pruning
    for score in ("taylor", "random", "l1", "slim", "pcnn"):
        for percent, before in ((50, None), (30, f"{score}-50")):
            step = experiment.step(f"{score}-{percent}")
            assert pruning_of(step) == ours.but(score=score, keep_macs=percent / 100)
            assert step.continue_from == before
        curve = pruning_of(experiment.step(f"curve-{score}"))
        assert (curve.score, curve.budget.filters, curve.budget.macs) == (score, 0.2, None)
        assert (curve.repair, curve.finetune.epochs, curve.evaluate, curve.ranking) == (0, 0, "always", "score")
    plain = pruning_of(experiment.step("plain-50"))
    assert (plain.repair, plain.learning.distill, plain.finetune.epochs) == (0, 0.0, ours.finetune.epochs)
    whole = experiment.step("whole").settings
    assert isinstance(whole, Training)
    assert whole.learning == ours.learning
    assert whole.schedule == ours.finetune.but(epochs=48)


def test_segmentation_is_for_data_with_label_maps() -> None:
    for name in ("fcn32s-voc", "deeplab-mobilenetv2-camvid", "fcn-mobilenetv2-camvid"):
        assert find_experiment("segmentation", name).recipe == name
    with pytest.raises(InvalidSetting) as caught:
        find_experiment("segmentation", "resnet56-cifar10")
    assert caught.value.wanted == "a label for every pixel"


@pytest.mark.parametrize("name", ["deeplab-mobilenetv2-camvid", "fcn-mobilenetv2-camvid"])
def test_the_whole_network_trains_as_long_as_the_pruned_ones(name: str) -> None:
    """One Tock, whatever the budget; the same rates, data, and share of distillation."""
    experiment = find_experiment("segmentation", name)
    assert names(experiment) == ["baseline", "whole", "pruned", "half"]
    whole = experiment.step("whole").settings
    assert isinstance(whole, Training)
    for step in ("pruned", "half"):
        pruning = pruning_of(experiment.step(step))
        assert pruning.tocks.first
        assert pruning.tocks.every >= 1000
        assert whole.schedule.epochs == pruning.tocks.epochs + pruning.finetune.epochs
        assert whole.schedule.but(epochs=1) == pruning.finetune.but(epochs=1)
        assert whole.learning == pruning.learning


def test_a_wrong_name_suggests_right_ones() -> None:
    for arguments, suggested in ((["tabel1"], "'table1'"), (["table1", "resnet56"], "'resnet56-cifar10'")):
        with pytest.raises(InvalidSetting) as caught:
            find_experiment(*arguments)
        assert suggested in str(caught.value.remedy)


@pytest.mark.parametrize(
    ("step", "numbers"),
    [
        ("GBN-40", ["60.1", "53.5", "0.33"]),
        ("GBN-30", ["70.3", "66.7", "0.03"]),
        ("GBN-60", ["40.54", "31.83", "0.31", "0.16"]),
        ("GBN-50", ["55.06", "53.40", "0.67", "0.26"]),
        ("one-shot-60", ["79.3", "71.8", "73.1"]),
        ("one-shot-40", ["92.0", "62.1", "68.0"]),
        ("one-shot-20", ["97.5", "57.7", "59.9"]),
        ("tick-only-60", ["68.5", "73.0", "73.7"]),
        ("tick-only-40", ["86.2", "71.4", "72.9"]),
        ("tick-only-20", ["95.0", "68.4", "69.6"]),
        ("tick-tock-60", ["69.0", "74.6", "73.7"]),
        ("tick-tock-40", ["85.5", "73.2", "73.0"]),
        ("tick-tock-20", ["94.7", "71.2", "69.9"]),
        ("quarter", ["1.30", "1.1"]),
        ("quarter-scratch", ["71.02"]),
        ("shrunk", ["1.98", "3.7"]),
        ("pruned", ["27", "73", "62.84", "62.86"]),
    ],
)
def test_the_papers_numbers_are_the_papers(step: str, numbers: list[str]) -> None:
    places = [reports.PAPER[step].find(number) for number in numbers]
    assert -1 not in places
    assert places == sorted(places)


def test_every_run_that_the_paper_reports_has_its_number_beside() -> None:
    shown = {step for name in ("table1", "table2", "nas", "segmentation") for step in names(find_experiment(name))}
    assert shown - {"baseline", "whole", "half"} <= set(reports.PAPER)
    assert {step for step in names(find_experiment("table3")) if step[-2:].isdigit()} <= set(reports.PAPER)


def test_what_is_read_off_a_curve() -> None:
    filters, shares = (100, 85, 80, 55), (1.0, 0.8, 0.75, 0.5)
    events = [
        {"filters": left, "share": share, "metrics": {"accuracy": value} if value else {}}
        for left, share, value in zip(filters, shares, (90.0, 0.0, 70.0, 60.0), strict=True)
    ]
    path = curves.path_of(events)
    assert [curves.at(path, share).value for share in (10, 20, 40, 60)] == [90.0, 70.0, 70.0, 60.0]
    assert curves.at(path, 20).macs == pytest.approx(25)
    row = curves.table_of_rankings({"taylor": path})[1][0]
    assert row[:3] == ["taylor", "70.00 (75% MACs left)", "70.00 (only 20% removed, 75% MACs left)"]


def test_scores_are_compared_at_the_same_macs(tmp_path: Path) -> None:
    def path(*values: float) -> list[curves.Removed]:
        return [curves.Removed(20.0 * i, 25.0 * i, value) for i, value in enumerate(values)]

    assert curves.value_at(path(80, 60, 50), "macs", 30) == pytest.approx(58)
    assert curves.value_at(path(80, 60, 50), "filters", 30) == pytest.approx(55)
    assert curves.value_at(path(80, 60, 50), "macs", 50) == 50
    assert curves.value_at(path(80, 60, 50), "macs", 51) is None
    seeds = {"taylor": [path(80, 60, 50), path(80, 64, 54)], "random": [path(80, 40)]}
    heads, rows = curves.table_by_macs(seeds)
    assert heads[1:] == [*(f"{share}% of the MACs" for share in (90, 80, 70, 60, 50, 30)), "n"]
    assert rows[0] == [
        "taylor",
        "72.80 ± 1.13",
        "65.60 ± 2.26",
        "60.00 ± 2.83",
        "56.00 ± 2.83",
        "52.00 ± 2.83",
        "-",
        "2",
    ]
    assert rows[1][1:] == ["64.00", "48.00", "-", "-", "-", "-", "1"]
    curves.draw_scores(seeds, tmp_path / "figure.svg")
    assert "MACs" in (tmp_path / "figure.svg").read_text()


def test_the_metric_before_fine_tuning_is_that_of_the_last_tick_or_tock() -> None:
    moments = [("Start", 90.0), ("Tick", 80.0), ("Tock", 85.0), ("FineTune", 88.0)]
    start, tick, tock, tuned = ({"event": event, "metrics": {"accuracy": value}} for event, value in moments)
    assert curves.unrefined([start, tick, tock, tuned]) == 85
    assert curves.unrefined([start, {**tick, "metrics": {}}, tuned]) is None
    assert curves.unrefined([start, tuned]) is None


def test_a_page_without_runs_says_so() -> None:
    text = reports.compared(reports.Done(Order(recipe="digits"), {}, {}, 1.0, Path("figure.svg")))
    assert "Measured: recipe digits, no run is finished. MACs" in text
    assert "rehearsal" not in text


def test_a_page_names_what_is_not_as_in_the_recipe() -> None:
    given = {"width": 0.5, "batch_size": 64, "erase": 2, "hold_out": 9}
    for order, said in (
        (Order(recipe="digits"), "recipe digits, no"),
        (Order(recipe="digits", batch_size=find_recipe("digits").batch_size, erase=0), "recipe digits, no"),
        (
            Order(recipe="resnet56-cifar10", **given),
            "width 0.5, batches of 64, squares of 2 pixels erased, tested on 9 images held out of the training data",
        ),
    ):
        assert said in reports.nothing_yet(reports.Done(order, {}, {}, 1.0, Path("figure.svg")))


def test_a_page_names_the_precision_of_every_run(tmp_path: Path) -> None:
    for name in ("fp32", "bf16"):
        with RunFolder(tmp_path / name) as folder:
            folder.write_config({"engine": {"precision": name}})
    folders = {name: tmp_path / name for name in ("fp32", "bf16")} | {"baseline": tmp_path / "weights.pth"}
    done = reports.Done(Order(recipe="digits"), {name: {} for name in folders}, folders, 1.0, Path("figure.svg"))
    assert reports.precisions(done) == ["bf16", "fp32"]


def test_a_page_names_all_hardware_that_its_numbers_are_from() -> None:
    def run(hardware: str) -> dict[str, Any]:
        cost = {"macs": 10, "params": 10, "metrics": {"accuracy": 90.0}}
        made = {"settings": {"seed": 0}, "versions": {"torch": "2.0"}, "seconds": 1.5, "hardware": hardware}
        return {"before": cost, "after": cost, **made}

    runs = {"GBN-40": run("one GPU"), "GBN-30": run("another GPU")}
    text = reports.compared(reports.Done(Order(recipe="digits"), runs, {}, 1.0, Path("figure.svg")))
    assert "one GPU" in text
    assert "another GPU" in text
    assert "3 s of training in all" in text
