"""A pretrained network on one's own photographs: a new classifier, a split, and the time to expect."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import miniature_images
import own_networks
import pytest
import torch
from doing import CPU, do, resume, same, summary, weights

from secateur import TickTock, Training, analyze
from secateur.data.preprocessing import Preprocessing
from secateur.errors import InvalidData, InvalidSetting
from secateur.files import read_json
from secateur.models.lookup import find_model
from secateur.recipes.jobs import Job, Order, build
from secateur.recipes.paper import find_recipe
from secateur.recipes.repair import repair_network
from secateur.recipes.starts import begin, open_network, teacher_of
from secateur.recipes.work import first_training
from secateur.results.load import about
from secateur.results.predict import predict
from secateur.runs.events import Event, FineTune, Start, Tick, Train

NETWORK = "timm:test_resnet"
TRAINING = Training.of(epochs=1, lr=0.01)
PRUNING = TickTock.of(keep_macs=0.8, tick_removes=0.2, tock_every=0, finetune_epochs=1)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five images of each of three classes, in a folder per class."""
    folder = tmp_path_factory.mktemp("photos")
    miniature_images.write_class_folders(folder, num_classes=3, per_class=5, parts=("train", "unused"))
    for path in (folder / "train").iterdir():
        path.rename(folder / path.name)
    for rest in ("train", "unused"):
        shutil.rmtree(folder / rest)
    return folder


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of ten other classes."""
    return saved(NETWORK, tmp_path_factory.mktemp("weights") / "ten.pth")


def saved(network: str, path: Path) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        torch.save(find_model(network, num_classes=10).state_dict(), path)
    return path


def order_of(photos: Path, weights: Path | None, **values: Any) -> Order:
    recipe = values.pop("recipe", f"{NETWORK}@class_folders")
    given = {"image_size": 32, "batch_size": 4, **values}
    return Order(recipe=recipe, data=str(photos), weights=str(weights) if weights else None, **given)


def lines(said: list[Event | str]) -> list[str]:
    return [line for line in said if isinstance(line, str)]


def test_a_network_of_other_classes_is_trained(photos: Path, pretrained: Path, tmp_path: Path) -> None:
    said: list[Event | str] = []
    result = do(order_of(photos, pretrained), TRAINING, tmp_path / "run", said.append)
    (line,) = [line for line in lines(said) if "made anew" in line]
    assert "fc is made anew, with random weights: 3 classes, where the file has 10 classes" in line
    given = torch.load(pretrained, weights_only=True)
    begun = weights(tmp_path / "run" / "original.safetensors")
    head = {"fc.weight", "fc.bias"}
    assert given.keys() == begun.keys()
    assert {name for name in begun if not torch.equal(begun[name], given[name])} == head
    assert begun["fc.weight"].shape == (3, 96)
    assert result.model(torch.randn(1, 3, 32, 32)).shape == (1, 3)
    assert summary(tmp_path / "run")["new_head"] == {"layer": "fc", "classes": 3, "before": 10}


def test_the_seed_draws_the_classifier(photos: Path, pretrained: Path) -> None:
    def head(seed: int) -> torch.Tensor:
        order = order_of(photos, pretrained)
        job = build(order, seed, CPU)
        start = begin(job, analyze(job.model, job.example, probe=False), order, seed)
        return start.model.get_parameter("fc.weight")

    assert torch.equal(head(0), head(0))
    assert not torch.equal(head(0), head(1))


def test_pruning_trains_first_and_can_be_resumed(photos: Path, pretrained: Path, tmp_path: Path) -> None:
    order = order_of(photos, pretrained, epochs_scale=0.08)
    said: list[Event | str] = []
    whole = do(order, PRUNING, tmp_path / "whole", said.append)
    assert any("the classifier is new" in line and "for 2 epochs first" in line for line in lines(said))
    kinds = [type(event) for event in whole.history]
    assert kinds[:3] == [Train, Train, Start]
    assert (Tick in kinds, kinds[-1]) == (True, FineTune)

    class Stopped(Exception):
        pass

    def stop(event: Event | str) -> None:
        if isinstance(event, Tick):
            raise Stopped

    with pytest.raises(Stopped):
        do(order, PRUNING, tmp_path / "stopped", stop)
    pretrained_again = resume(tmp_path / "stopped")
    assert same(dict(pretrained_again.model.state_dict()), dict(whole.model.state_dict()))
    assert not same(weights(tmp_path / "whole/original.safetensors"), weights(tmp_path / "whole/baseline.safetensors"))


def test_nothing_is_made_anew_where_nothing_trains(photos: Path, pretrained: Path, tmp_path: Path) -> None:
    order = order_of(photos, pretrained)
    with pytest.raises(InvalidSetting, match=r"without training.*fc is made anew.*secateur train"):
        do(order, PRUNING.without_training(), tmp_path / "run")
    with pytest.raises(InvalidData, match="got 10x96, wanted 3x96"):
        open_network(order, CPU)
    with pytest.raises(InvalidSetting, match="repair does not train"):
        repair_network(order, None, tmp_path / "repaired", CPU)


@pytest.mark.parametrize(
    ("network", "layer"),
    [
        ("torchvision:squeezenet1_1", "classifier.1"),
        ("torchvision:mnasnet0_5", "classifier.1"),
        ("torchvision:mobilenet_v3_small", "classifier.3"),
        ("timm:mobilenetv3_small_050", "classifier"),
        ("timm:resnet10t", "fc"),
        ("timm:test_convnext", "head.fc"),
    ],
)
def test_the_classifier_of_any_network_is_found(photos: Path, tmp_path: Path, network: str, layer: str) -> None:
    order = order_of(photos, saved(network, tmp_path / "ten.pth"), recipe=f"{network}@class_folders", image_size=64)
    job = build(order, 0, CPU)
    start = begin(job, analyze(job.model, job.example, probe=False), order, 0)
    assert start.new_head is not None
    assert (start.new_head.layer, start.new_head.classes, start.new_head.before) == (layer, 3, 10)
    assert start.model.eval()(job.example).shape == (1, 3)


# A network of the user's own


def own(path: Path) -> Path:
    torch.save(own_networks.plain(num_classes=10).state_dict(), path)
    return path


def begun(order: Order) -> tuple[Job, Any]:
    job = build(order, 0, CPU)
    return job, begin(job, analyze(job.model, job.example, probe=False), order, 0)


@pytest.mark.parametrize("recipe", ["own_networks:plain@class_folders", "own_networks:job"])
def test_ones_own_network_needs_the_name_of_the_layer(photos: Path, tmp_path: Path, recipe: str) -> None:
    file = str(own(tmp_path / "ten.pth"))
    data = {} if recipe == "own_networks:job" else {"data": str(photos), "image_size": 32}
    order = Order(recipe=recipe, weights=file, **data)
    with pytest.raises(InvalidData, match=r"got 10x8.*--new-head 10"):
        begun(order)
    with pytest.raises(InvalidSetting, match="got 6, wanted 10"):
        begun(Order(recipe=recipe, weights=file, new_head="6", **data))
    _, start = begun(Order(recipe=recipe, weights=file, new_head="10", **data))
    assert (start.new_head.layer, start.new_head.before) == ("10", 10)
    given = torch.load(file, weights_only=True)
    state = start.model.state_dict()
    assert {name for name in state if not torch.equal(state[name], given[name])} == {"10.weight", "10.bias"}


def test_a_new_classifier_needs_weights() -> None:
    with pytest.raises(InvalidSetting, match="new_head"):
        Order(recipe="own_networks:job", new_head="10")


# How it is trained


def test_weights_are_trained_gently_and_not_for_long(photos: Path, pretrained: Path) -> None:
    order = order_of(photos, pretrained)
    training = first_training(order, seed=3, new_head=True)
    assert training is not None
    assert 20 <= training.schedule.epochs <= 30
    assert training.schedule.lr <= 0.1 * find_recipe(order.recipe).training.schedule.lr
    assert training.seed == 3
    assert first_training(order, seed=3, new_head=False) is None
    scratch = first_training(order_of(photos, None), seed=3, new_head=False)
    assert scratch is not None
    assert scratch.schedule.epochs == 160


# The split


def test_the_images_of_each_part_are_listed(photos: Path, pretrained: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(photos, data)
    said: list[Event | str] = []
    run = tmp_path / "run"
    do(order_of(data, pretrained), TRAINING, run, said.append)
    (line,) = [line for line in lines(said) if "split.json" in line]
    assert line.startswith("12 images to train on, 3 to test on (20% of them, by class)")
    parts = read_json(run / "split.json")
    assert {name.partition("/")[0] for name in parts["test"]} == {"class_0", "class_1", "class_2"}
    files = sorted(path.relative_to(data).as_posix() for path in data.glob("*/*.jpg"))
    assert sorted([*parts["train"], *parts["test"]]) == files
    shutil.move(data / files[0], tmp_path / "elsewhere.jpg")
    with pytest.raises(InvalidData, match=r"others.*split\.json"):
        resume(run)


def test_the_time_is_said_before_the_run(photos: Path, pretrained: Path, tmp_path: Path) -> None:
    said: list[Event | str] = []
    do(order_of(photos, pretrained, epochs_scale=0.08), PRUNING, tmp_path / "run", said.append)
    place, line = next((i, line) for i, line in enumerate(said) if isinstance(line, str) and "trains in about" in line)
    assert line.startswith("to do: 2 epochs of training first, 1 Tick, 1 epoch of fine-tuning. ")
    assert re.search(r"An epoch trains in about .*s, all of it in .*s; tests come on top$", line)
    assert all(isinstance(line, str) for line in said[:place])


# The result


def test_predictions_are_those_of_the_test(photos: Path, pretrained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = do(order_of(photos, pretrained, epochs_scale=0.2), PRUNING, run)
    assert about(run).classes == ("class_0", "class_1", "class_2")
    test = read_json(run / "split.json")["test"]
    found = predict(run, [photos / name for name in test])
    for network, metrics in (("whole", result.metrics_before), ("pruned", result.metrics)):
        best = [next(iter(each.probabilities[network])) for each in found]
        right = sum(name.startswith(f"{answer}/") for name, answer in zip(test, best, strict=True))
        assert 100 * right / len(test) == pytest.approx(metrics["accuracy"])
    half = (0.5, 0.5, 0.5)  # what the network says of itself
    assert about(run).preprocessing == Preprocessing(resize=37, crop=32, mean=half, std=half)


def test_a_network_of_timm_brings_its_own_normalization(photos: Path) -> None:
    job = build(order_of(photos, None, recipe="timm:test_vit@class_folders", image_size=160), 0, CPU)
    config = job.model.default_cfg
    assert tuple(config["mean"]) != Preprocessing().mean
    assert job.preprocessing is not None
    assert (job.preprocessing.mean, job.preprocessing.std) == (tuple(config["mean"]), tuple(config["std"]))
    images = torch.cat([images for images, _ in job.task.train])
    assert images.max() <= (1 - min(config["mean"])) / min(config["std"]) + 1e-5


def test_the_page_in_python(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the page on photographs shows, on smaller images, for fewer epochs."""
    page = (Path(__file__).parents[2] / "docs/howto/photographs.md").read_text()
    use, transfer = re.findall(r"```{\.python title=.*?}\n(.*?)```", page, flags=re.DOTALL)
    shorter = {
        "size=160": "size=32",
        "epochs=25": "epochs=1",
        "finetune_lr=3e-3": "finetune_lr=3e-3, finetune_epochs=1, repair=8",
    }
    for before, after in shorter.items():
        assert before in transfer
        transfer = transfer.replace(before, after)
    shutil.copytree(photos, tmp_path / "photos")
    saved("torchvision:mobilenet_v2", tmp_path / "imagenet.pth")
    (tmp_path / "new").mkdir()
    for number, path in enumerate(sorted((photos / "class_1").iterdir())[:2], start=1):
        shutil.copy(path, tmp_path / "new" / f"{number}.jpg")
    monkeypatch.chdir(tmp_path)
    exec(transfer, {})
    assert "classifier.1 is made anew" in capsys.readouterr().out
    exec(use.replace("runs/pruned", "pruned"), {})
    assert re.fullmatch(r"\['class_\d', 'class_\d'\]", capsys.readouterr().out.strip())


# The names of the classes


@pytest.fixture(scope="module")
def parted(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The photographs in train and val."""
    folder = tmp_path_factory.mktemp("parted")
    for part in ("train", "val"):
        shutil.copytree(photos, folder / part)
    return folder


@pytest.fixture(scope="module")
def trained(parted: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("trained") / "run"
    do(order_of(parted, None), TRAINING, run)
    return run


@pytest.fixture
def renamed(parted: Path, tmp_path: Path) -> Path:
    """As many classes, of which two have other names."""
    folder = tmp_path / "renamed"
    shutil.copytree(parted, folder)
    for part in ("train", "val"):
        (folder / part / "class_0").rename(folder / part / "class_9")
    return folder


def test_a_run_is_not_resumed_with_other_classes(trained: Path, parted: Path, renamed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    with pytest.raises(InvalidSetting, match="got other classes"):
        do(order_of(renamed, None), TRAINING, run)
    do(order_of(parted, None), TRAINING, run)
    config = read_json(run / "config.json")
    del config["classes"]
    (run / "config.json").write_text(json.dumps(config))
    do(order_of(parted, None), TRAINING, run)


def test_a_result_of_other_classes_is_refused(trained: Path, parted: Path, renamed: Path, tmp_path: Path) -> None:
    order = order_of(renamed, trained)
    with pytest.raises(InvalidData, match=r"class 1 of .* has another name: got class_0, wanted class_1") as caught:
        begun(order)
    assert f"{trained / 'result/model.safetensors'} and --new-head" in str(caught.value.remedy)
    with pytest.raises(InvalidData, match="class 1 of"):
        open_network(order, CPU)
    begun(order_of(parted, trained))
    begun(order_of(renamed, trained / "result/model.safetensors", new_head="fc"))


def test_a_teacher_of_other_classes_is_refused(trained: Path, parted: Path, renamed: Path) -> None:
    jobs = {folder: build(order_of(folder, None), 0, CPU) for folder in (parted, renamed)}
    assert teacher_of(jobs[parted], order_of(parted, None, teacher=str(trained))) is not None
    with pytest.raises(InvalidData, match="class 1 of"):
        teacher_of(jobs[renamed], order_of(renamed, None, teacher=str(trained)))


def test_a_pruned_result_of_other_classes_is_refused(
    trained: Path, parted: Path, renamed: Path, tmp_path: Path
) -> None:
    do(order_of(parted, trained), PRUNING.but(finetune_epochs=0), tmp_path / "pruned")
    with pytest.raises(InvalidData, match="class 1 of") as caught:
        begun(order_of(renamed, tmp_path / "pruned"))
    assert "--new-head" not in str(caught.value.remedy)
    with pytest.raises(InvalidData, match="class 1 of"):
        open_network(order_of(renamed, tmp_path / "pruned"), CPU)
    begun(order_of(renamed, tmp_path / "pruned", fresh=True))
