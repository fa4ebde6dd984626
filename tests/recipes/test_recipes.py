"""The recipes are the paper's: its numbers, written out here by hand, and the learning rates that runs really use."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import own_networks
import pytest
from torch.optim.optimizer import register_optimizer_step_pre_hook

from secateur import Plan, TickTock, Training, analyze
from secateur.data.catalog import find_dataset
from secateur.errors import InvalidSetting
from secateur.models.lookup import BUILT_IN
from secateur.recipes.paper import RECIPES, find_recipe, is_recipe, recipe, summary_of
from secateur.recipes.recipe import Recipe, from_scratch, scaled
from secateur.runs.prune import pruning_phases, training_phases
from secateur.runs.run import Run

PAPERS = ["resnet56-cifar10", "vgg16m-cifar10", "vgg16m-cifar100", "resnet50-imagenet", "vgg16m-cub200", "fcn32s-voc"]
AUTHORS = ["resnet56-cifar10-authors", "vgg16m-cifar100-authors"]
OURS = ["resnet56-cifar10-ours", "vgg16m-cifar100-ours"]
BATCHES = 3  # in an epoch of `own_networks.job`

Rates = list[tuple[str, list[float]]]


@contextmanager
def watched_optimizers() -> Iterator[list[dict[str, Any]]]:
    """The settings of every optimizer step."""
    steps: list[dict[str, Any]] = []

    def note(optimizer: Any, *_: Any) -> None:
        group = optimizer.param_groups[0]
        steps.append({name: group[name] for name in ("lr", "momentum", "weight_decay")})

    handle = register_optimizer_step_pre_hook(note)
    try:
        yield steps
    finally:
        handle.remove()


def run(settings: TickTock | Training) -> tuple[Rates, list[dict[str, Any]]]:
    """A run on a small network: the learning rates of the steps that led to each event, and all steps."""
    job = own_networks.job()
    graph = analyze(job.model, job.example)
    phases = pruning_phases(settings) if isinstance(settings, TickTock) else training_phases(settings)
    rates: Rates = []
    with watched_optimizers() as steps:
        seen = 0
        for event in Run(settings, phases, job.model, Plan(graph, graph.all_kept()), job.task).events():
            rates.append((type(event).__name__, [step["lr"] for step in steps[seen:]]))
            seen = len(steps)
    return rates, steps


def by_epoch(rates: Rates, kind: str) -> list[float]:
    """The learning rate of each epoch of that kind, which must not change within it."""
    epochs = [rates for name, rates in rates if name == kind]
    assert all(len(set(epoch)) == 1 for epoch in epochs)
    return [epoch[0] for epoch in epochs]


def up_and_down(num_steps: int, low: float, high: float) -> list[float]:
    """The 1-cycle as the paper tells it: linearly up over the first half, and down over the second."""
    slope = (high - low) / (num_steps / 2)
    half = num_steps // 2
    return [low + slope * step for step in range(half)] + [high - slope * step for step in range(num_steps - half)]


def constant(*parts: tuple[int, float]) -> list[float]:
    return [rate for epochs, rate in parts for _ in range(epochs)]


BASELINES = {
    "resnet56-cifar10": (128, constant((80, 0.1), (40, 0.01), (40, 0.001)), 0.9, 1e-4),
    "resnet50-imagenet": (256, constant((30, 0.1), (30, 0.01), (30, 0.001)), 0.9, 1e-4),
    "vgg16m-cub200": (64, constant((30, 3e-3), (30, 1e-3), (30, 1e-3 / 3)), 0.9, 1e-4),
    "fcn32s-voc": (1, constant((11, 1e-10)), 0.99, 5e-4),
}


LARGE = ("resnet50-imagenet", "vgg16m-cub200")


def quickly(names: Iterable[str]) -> list[Any]:
    """Those of large networks are left to the slow tests."""
    return [pytest.param(name, marks=pytest.mark.slow if name in LARGE else ()) for name in names]


@pytest.mark.parametrize("name", quickly(BASELINES))
def test_the_baseline_is_trained_as_the_paper_says(name: str) -> None:
    batch_size, expected, momentum, weight_decay = BASELINES[name]
    recipe = find_recipe(name)
    rates, steps = run(recipe.training)
    assert recipe.batch_size == batch_size
    assert by_epoch(rates, "Train") == pytest.approx(expected, rel=1e-9)
    assert len(steps) == len(expected) * BATCHES
    assert {(step["momentum"], step["weight_decay"]) for step in steps} == {(momentum, weight_decay)}
    assert {name for name, _ in rates} == {"Start", "Train", "Finished"}


@pytest.mark.parametrize("name", ["vgg16m-cifar10", "vgg16m-cifar100", *AUTHORS, *OURS, "resnet20@cifar10"])
def test_all_baselines_on_cifar_are_trained_alike(name: str) -> None:
    """But for the weight decay, of which the authors' code has more than the paper says; and ours in larger batches."""
    recipe, other = find_recipe(name), find_recipe("resnet56-cifar10")
    decay, times = 5e-4 if name in (*AUTHORS, *OURS) else 1e-4, 2 if name in OURS else 1
    assert recipe.training == other.training.but(weight_decay=decay, lr=times * other.training.schedule.lr)
    assert recipe.batch_size == times * other.batch_size


@pytest.mark.parametrize(
    "name", quickly(["resnet56-cifar10", "resnet50-imagenet", "fcn32s-voc", "resnet56-cifar10-authors"])
)
def test_the_network_is_pruned_as_the_paper_says(name: str) -> None:
    """Ten Ticks, then a Tock of ten epochs, and so on; then fine-tuning."""
    # A filter at a time, and more than ten of them.
    settings = find_recipe(name).pruning.but(tick_removes=0.002, keep_macs=0.3)
    rates, steps = run(settings)
    kinds = [kind for kind, _ in rates]
    first = kinds.index("Tick")
    assert kinds[1:first] == (["Tock"] * 10 if name in AUTHORS else [])
    assert kinds[first : first + 10] == ["Tick"] * 10
    assert kinds[first + 10 : first + 21] == ["Tock"] * 10 + ["Tick"]

    slow = name == "fcn32s-voc"
    assert set(by_epoch(rates, "Tick")) == {1e-10 if slow else 1e-3}
    # 100 of each of two classes are two batches of 100; all of them are three.
    assert {len(rates) for kind, rates in rates if kind == "Tick"} == {2 if name == "resnet50-imagenet" else BATCHES}

    tock = [rate for kind, epoch in rates[first + 10 : first + 20] for rate in epoch if kind == "Tock"]
    assert tock == pytest.approx(up_and_down(10 * BATCHES, *((1e-11, 1e-10) if slow else (1e-3, 1e-2))), rel=1e-9)

    tuning = [rate for kind, epoch in rates for rate in epoch if kind == "FineTune"]
    if slow:
        assert tuning == [1e-10] * 10 * BATCHES
    elif name == "resnet50-imagenet":
        expected = constant((36, 0.01), (12, 1e-3), (6, 1e-4), (6, 1e-5))
        assert by_epoch(rates, "FineTune") == pytest.approx(expected, rel=1e-9)
    else:
        # As far as the authors' went with half as many images in a batch and a tenth of the momentum's reach.
        epochs, times = (50, 2 / 10) if name in AUTHORS else (40, 1)
        assert tuning == pytest.approx(up_and_down(epochs * BATCHES, times * 1e-3, times * 1e-2), rel=1e-9)
    decay = 5e-4 if slow or name in AUTHORS else 1e-4
    assert {(step["momentum"], step["weight_decay"]) for step in steps} == {(0.99 if slow else 0.9, decay)}


@pytest.mark.parametrize("name", ["vgg16m-cifar10", "vgg16m-cifar100", "vgg16m-cub200"])
def test_vgg_is_pruned_like_resnet_but_for_how_much(name: str) -> None:
    how_much = {"keep_macs": 0.5, "tick_removes": 0.1, "min_channels": 1, "min_ratio": 0.1}
    vgg, resnet = (find_recipe(name).pruning.but(**how_much) for name in (name, "resnet56-cifar10"))
    assert vgg == resnet


@pytest.mark.parametrize("name", [*PAPERS, *AUTHORS])
def test_a_tick_removes_as_much_as_the_paper_says(name: str) -> None:
    found = find_recipe(name).pruning.to_dict()
    wanted = {
        "tick_removes": 0.002 if name.startswith("resnet") else 0.01,
        "score": "taylor",
        "rank": "auto",
        "tock_sparsity": 1e-3,
        "tick_data": 1.0,
        "tick_per_class": 100 if name == "resnet50-imagenet" else None,
        "filter_scale": "mean" if name == "fcn32s-voc" else "norm",
        "distill": 0.0,
        "ema": 0.0,
        "retrain_epochs": 0,
        "tick_shifts": name in AUTHORS,
        "tock_first": name in AUTHORS,
    }
    assert {key: found[key] for key in wanted} == wanted


@pytest.mark.parametrize(("name", "share"), [("fcn32s-voc", 0.73), ("resnet50-imagenet", 0.6)])
def test_how_much_is_left(name: str, share: float) -> None:
    assert find_recipe(name).pruning.budget.macs == share


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_no_layer_of_table_3_gets_below_nine_channels(name: str) -> None:
    limits = find_recipe(name).pruning.limits
    assert (limits.min_channels, limits.min_ratio) == ((9, 0.0) if "cifar100" in name else (1, 0.1))


@pytest.mark.parametrize("name", AUTHORS)
def test_the_authors_differ_in_nothing_else(name: str) -> None:
    theirs, papers = find_recipe(name), find_recipe(name.removesuffix("-authors"))
    changed = {key for key, value in theirs.pruning.to_dict().items() if papers.pruning.to_dict()[key] != value}
    tuning = {"finetune_epochs", "finetune_lr", "finetune_lr_low"} if name.startswith("resnet") else set[str]()
    assert changed == {"weight_decay", "tick_shifts", "tock_first", *tuning}
    assert theirs.but(pruning=papers.pruning, training=papers.training) == papers


def test_photographs_of_birds() -> None:
    recipe = find_recipe("mobilenetv2-cub200")
    assert (recipe.network, recipe.data, recipe.batch_size) == ("torchvision:mobilenet_v2", "class_folders", 64)
    assert (recipe.input_size, recipe.crop_area) == ((3, 160, 160), 0.3)
    training = recipe.training
    assert (training.schedule.epochs, training.schedule.lr, training.schedule.shape) == (40, 0.02, "warmup")
    different = {
        "keep_macs": 0.5,
        "tick_removes": 0.08,
        "tick_step": 0.1,
        "tick_data": 0.2,
        "rank": "score_per_mac",
        "rank_power": 0.25,
        "repair": 512,
        "tock_every": 4,
        "tock_epochs": 2,
        "weight_decay": 5e-4,
        "distill": 0.9,
        "finetune_shape": "warmup",
        "finetune_lr": 0.02,
        "finetune_lr_low": 0.0,
        "cut": "end",
        "evaluate": "phases",
    }
    # All else is the paper's, but for widths, which are what the device is fast with.
    assert recipe.pruning == TickTock.of(**different)


@pytest.mark.parametrize("name", OURS)
def test_ours_learn_from_the_whole_network_and_end_at_zero(name: str) -> None:
    settings = find_recipe(name).pruning
    assert settings.learning.distill > 0.5
    assert settings.finetune.epochs > 40
    assert settings.retrain_epochs == 80
    # Straight to fine-tuning, and only ten epochs of it.
    short = {"tick_removes": 1.0, "tock_every": 0, "min_channels": 1, "finetune_epochs": 10, "retrain_epochs": 0}
    rates, _ = run(settings.but(**short))
    tuning = [rate for kind, epoch in rates for rate in epoch if kind == "FineTune"]
    # A last step more would be at zero.
    assert tuning[-1] == pytest.approx(tuning[-2] - tuning[-1], rel=1e-6)
    assert 0 < tuning[-1] < 0.05 * max(tuning)


@pytest.mark.parametrize(
    ("name", "network", "data", "input_size", "top5", "summed"),
    [
        ("resnet56-cifar10", "resnet56", "cifar10", (3, 32, 32), False, False),
        ("vgg16m-cifar10", "vgg16_m", "cifar10", (3, 32, 32), False, False),
        ("vgg16m-cifar100", "vgg16_m", "cifar100", (3, 32, 32), False, False),
        ("resnet50-imagenet", "torchvision:resnet50", "imagenet", (3, 224, 224), True, False),
        ("vgg16m-cub200", "vgg16_m", "cub200", (3, 224, 224), False, False),
        ("fcn32s-voc", "fcn32s", "voc2011_sbd", (3, 384, 512), False, True),
        ("deeplab-mobilenetv2-camvid", "deeplab_mobilenetv2", "camvid", (3, 360, 480), False, False),
        ("fcn-mobilenetv2-camvid", "fcn_mobilenetv2", "camvid", (3, 360, 480), False, False),
    ],
)
def test_what_is_trained_on_what(
    name: str, network: str, data: str, input_size: tuple[int, int, int], top5: bool, summed: bool
) -> None:
    recipe = find_recipe(name)
    assert (recipe.network, recipe.data, recipe.top5, recipe.summed) == (network, data, top5, summed)
    assert (recipe.input_size or find_dataset(data).input_size) == input_size
    assert network in BUILT_IN or network.startswith("torchvision:")


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_recipe_has_a_line_that_names_the_data(name: str) -> None:
    names = {"digits": "digits", "cifar10": "CIFAR-10 ", "cifar100": "CIFAR-100 ", "imagenet": "ImageNet"}
    names |= {"cub200": "CUB-200", "voc2011_sbd": "VOC 2011 with SBD", "camvid": "CamVid"}
    names |= {"class_folders": "class folders"}
    assert names[find_recipe(name).data] in summary_of(RECIPES[name])
    assert summary_of(RECIPES[name]).endswith(".")


def test_any_network_on_any_dataset() -> None:
    recipe = find_recipe("timm:mixnet_s@fashion_mnist")
    assert (recipe.network, recipe.data, recipe.batch_size) == ("timm:mixnet_s", "fashion_mnist", 128)
    assert recipe.training == from_scratch()
    assert find_recipe("own:build@camvid").batch_size == 4


@pytest.mark.parametrize(
    ("name", "suggested"),
    [
        ("resnet65-cifar10", "resnet56-cifar10"),
        ("vgg16m", "vgg16m-cub200"),
        ("resnet20@cifar11", "cifar10"),
        ("resnet20@", "digits"),
    ],
)
def test_a_wrong_name_suggests_right_ones(name: str, suggested: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        find_recipe(name)
    assert suggested in str(caught.value.remedy)


def test_what_is_a_recipe() -> None:
    assert is_recipe("digits")
    assert is_recipe("own.networks:build@cifar10")
    assert not is_recipe("own.networks:build")
    assert not is_recipe("digist")


def test_a_name_is_taken_once() -> None:
    def digits() -> Recipe:
        raise AssertionError

    with pytest.raises(ValueError, match="there is a recipe digits already"):
        recipe(digits)
    assert find_recipe("digits").network


@pytest.mark.parametrize("name", ["digits", "resnet56-cifar10", "resnet56-cifar10-ours", "fcn32s-voc"])
@pytest.mark.parametrize("scale", [0.001, 0.1, 0.5, 2.0])
def test_a_rehearsal_is_shorter_and_otherwise_the_same(name: str, scale: float) -> None:
    pruning, training = find_recipe(name).pruning, find_recipe(name).training
    short = scaled(pruning, scale)
    for key in ("tock_epochs", "finetune_epochs", "retrain_epochs"):
        before, after = pruning.to_dict()[key], short.to_dict()[key]
        assert after == (max(1, round(scale * before)) if before else 0)
    assert short.ticks.removes == pytest.approx(min(pruning.ticks.removes / scale, 0.3))
    same = {"tock_every": 1, "tock_epochs": 1, "finetune_epochs": 1, "retrain_epochs": 0, "tick_removes": 0.5}
    assert short.but(**same) == pruning.but(**same)
    assert scaled(training, scale) == training.but(epochs=max(1, round(scale * training.schedule.epochs)))


@pytest.mark.parametrize("scale", [0.05, 0.2, 4.0])
def test_ticks_and_tocks_of_a_rehearsal(scale: float) -> None:
    whole = TickTock.of(keep_filters=0.5, tick_removes=0.002)
    short = scaled(whole, scale)
    # n Ticks leave (1 - share) ** n of the filters.
    ticks, fewer = (math.log(0.5) / math.log(1 - settings.ticks.removes) for settings in (whole, short))
    assert fewer == pytest.approx(scale * ticks, rel=0.05)
    # Between two Tocks the same share of the filters goes, or that of one Tick if it is more.
    assert short.tocks.every == max(1, round(0.02 / short.ticks.removes))


def test_what_a_rehearsal_leaves_alone() -> None:
    settings = find_recipe("resnet56-cifar10").pruning
    assert scaled(settings, 1.0) == settings
    assert scaled(TickTock.one_shot(keep_macs=0.5), 0.01).ticks.removes == 1.0
    assert scaled(TickTock.tick_only(keep_macs=0.5), 0.01).tocks.every == 0
    assert scaled(settings.but(finetune_epochs=0), 0.1).finetune.epochs == 0


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan")])
def test_a_length_that_is_none_is_refused(scale: float) -> None:
    for settings in (TickTock.of(keep_macs=0.5), Training()):
        with pytest.raises(InvalidSetting) as caught:
            scaled(settings, scale)
        assert str(caught.value.got) == str(scale)
