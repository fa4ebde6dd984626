"""`secateur repair`: of a run, of a network with a plan, and on images without labels."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import doing
import miniature_images  # pyright: ignore
import own_networks
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from secateur import Job, Plan, analyze, classification, load, shrink
from secateur.data.arrays import Arrays
from secateur.models.weights import load_weights_
from secateur.recipes import repair as recipes_repair
from secateur.recipes.jobs import Order, build
from secateur.recipes.starts import open_network, reopen
from secateur.training.settings import Training
from secateur.words import digits

Call = Callable[..., tuple[int, str, str]]
PLAIN = "own_networks:plain@cifar10"
ON = ("--device", "cpu", "--quiet")


@pytest.fixture(scope="module")
def run(cifar: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has come to its end."""
    folder = tmp_path_factory.mktemp("repair") / "run"
    trained = folder.parent / "trained"
    doing.do(Order(recipe=PLAIN, data=str(cifar)), doing.TRAINING, trained)
    doing.do(Order(recipe=PLAIN, data=str(cifar), weights=str(trained)), doing.PRUNING, folder)
    return folder


def opened(run: Path, cifar: Path) -> tuple[Job, Plan]:
    """The whole network of the run with its weights, and the plan."""
    job = build(Order(recipe=PLAIN, data=str(cifar)), 0, doing.CPU)
    load_weights_(job.model, run / "original.safetensors")
    graph = analyze(job.model, job.example)
    return job, Plan.from_json(graph, (run / "result" / "plan.json").read_text())


def with_plan(run: Path, cifar: Path) -> list[object]:
    weights, plan = run / "original.safetensors", run / "result" / "plan.json"
    return ["repair", PLAIN, "--data", cifar, "--weights", weights, "--plan", plan]


def test_the_network_of_a_run(secateur: Call, run: Path, cifar: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "repaired"
    status, text, _ = secateur("repair", run, "--out", out, "--json", *ON)
    assert status == 0
    told = json.loads(text)
    job, plan = opened(run, cifar)
    model = load(out, build=lambda: own_networks.plain(10))
    cut = shrink(job.model, plan)
    for name, network in (("whole", job.model), ("plain", cut), ("repaired", model)):
        assert told[name]["metrics"] == pytest.approx(job.task.metrics(network), rel=1e-6)
        assert told[name]["macs"] == doing.count_macs(network, job.example)
        assert told[name]["params"] == doing.count_params(network)
    assert doing.shapes(dict(model.state_dict())) == doing.shapes(dict(cut.state_dict()))
    assert isinstance(job.task.train, Arrays)
    images = torch.cat([images for images, _ in job.task.train])
    with torch.no_grad():
        whole, plain, repaired = (network.eval()(images) for network in (job.model, cut, model))
    assert (repaired - whole).norm() < 0.5 * (plain - whole).norm()


def test_a_result_that_other_commands_take(secateur: Call, run: Path, cifar: Path, tmp_path: Path) -> None:
    out = tmp_path / "repaired"
    told = json.loads(secateur("repair", run, "--out", out, "--json", *ON)[1])
    given = ["evaluate", PLAIN, "--data", cifar, "--weights", out, "--json", "--device", "cpu"]
    assert json.loads(secateur(*given)[1]) == pytest.approx(told["repaired"]["metrics"], rel=1e-6)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["before"]["metrics"] == pytest.approx(told["whole"]["metrics"])
    assert (summary["order"]["recipe"], summary["settings"]["epochs"]) == (PLAIN, 0)
    assert summary["repair"] == {"images": 512, "plan": None, "plain": pytest.approx(told["plain"]["metrics"])}
    assert secateur("structure", out)[1].splitlines()[1:] == secateur("structure", run)[1].splitlines()[1:]
    # The whole network is there too, to learn from.
    doing.do(Order(recipe=PLAIN, data=str(cifar), weights=str(out)), doing.TUNING, tmp_path / "tuned")


def test_a_network_with_a_plan_and_how_it_is_shown(secateur: Call, run: Path, cifar: Path, tmp_path: Path) -> None:
    for name, seed in (("same", 3), ("other", 4)):
        few = ["--images", 8, "--seed", seed, "--out", tmp_path / name, *ON]
        status, text, _ = secateur(*with_plan(run, cifar), *few)
        assert status == 0
    assert secateur("repair", run, "--images", 8, "--seed", 3, "--out", tmp_path / "run", *ON)[0] == 0
    found = {name: doing.weights(tmp_path / name / "model.safetensors") for name in ("run", "same", "other")}
    assert doing.same(found["run"], found["same"])
    assert not doing.same(found["run"], found["other"])
    head, *rows = text.splitlines()
    assert head.split("  ")[-1].strip() == "repaired"
    summary = json.loads((tmp_path / "other" / "summary.json").read_text())
    before, after = summary["before"], summary["after"]
    assert rows[0].split() == ["MACs", f"{before['macs']:,}", f"{after['macs']:,}", f"{after['macs']:,}"]
    assert rows[1].split()[0] == "parameters"
    plain = summary["repair"]["plain"]
    for row, name in zip(rows[2:4], ("accuracy", "loss"), strict=True):
        values = before["metrics"][name], plain[name], after["metrics"][name]
        assert row.split() == [name, *(digits(value) for value in values)]
    assert rows[-1].startswith(f"saved in {tmp_path / 'other'};")


def test_images_are_not_augmented(
    secateur: Call, run: Path, cifar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Tensor] = []

    def repair(model: nn.Module, plan: Plan, batches: Any, **options: Any) -> nn.Module:
        seen.extend(images for images, _ in batches)
        return shrink(model, plan)

    monkeypatch.setattr(recipes_repair, "repair", repair)
    assert secateur("repair", run, "--out", tmp_path / "repaired", *ON)[0] == 0
    train = build(Order(recipe=PLAIN, data=str(cifar)), 0, doing.CPU).task.train
    assert isinstance(train, Arrays)
    mean, std = (torch.tensor(numbers)[:, None, None] for numbers in (train.mean, train.std))
    pixels = ((torch.cat(seen) * std + mean) * 255).round().to(torch.uint8)
    assert len(pixels) == 20
    assert all(bool((train.images == image).flatten(1).all(1).any()) for image in pixels)


class Scaled(nn.Module):
    """Its last weight is used by an operator that is not fitted."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3), nn.Parameter(torch.randn(4, 8))

    def forward(self, images: Tensor) -> Tensor:
        return self.first(images).relu().mean((2, 3)) @ self.last.T


def scaled() -> Job:
    return Job(Scaled(), torch.randn(1, 3, 8, 8), classification([(torch.randn(8, 3, 8, 8), torch.arange(8) % 4)]))


@pytest.mark.parametrize("as_json", [False, True])
def test_layers_that_keep_their_plain_cut_are_named(secateur: Call, tmp_path: Path, as_json: bool) -> None:
    job = scaled()
    (tmp_path / "plan.json").write_text(Plan.random(analyze(job.model, job.example), 0.5).to_json())
    given = ["--plan", tmp_path / "plan.json", "--out", tmp_path / "out", *ON, *(["--json"] if as_json else [])]
    status, text, _ = secateur("repair", f"{__name__}:scaled", *given)
    assert status == 0
    lines = json.loads(text)["notes"] if as_json else text.splitlines()
    assert any(line.startswith("last ") for line in lines)


def test_data_that_have_moved(secateur: Call, run: Path, cifar: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    config = json.loads((run / "config.json").read_text())
    config["order"]["data"] = str(tmp_path / "gone")
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    given = ["repair", tmp_path / "run", "--out", tmp_path / "out", *ON]
    status, _, err = secateur(*given)
    assert (status, str(tmp_path / "gone") in err) == (2, True)
    assert secateur(*given, "--data", cifar)[0] == 0


def test_images_without_labels(secateur: Call, tmp_path: Path) -> None:
    miniature_images.write_class_folders(tmp_path / "photos", num_classes=4, per_class=2)
    recipe, out = "own_networks:plain@images", tmp_path / "out"
    torch.manual_seed(0)
    torch.save(own_networks.plain().state_dict(), tmp_path / "weights.pth")
    order = Order(recipe=recipe, data=str(tmp_path / "photos"), weights=str(tmp_path / "weights.pth"))
    job = build(order, 0, doing.CPU)
    graph = analyze(job.model, job.example)
    (tmp_path / "plan.json").write_text(Plan.random(graph, 0.5).to_json())
    flags = ["--weights", order.weights, "--plan", tmp_path / "plan.json", "--out", out, "--json", *ON]
    status, text, _ = secateur("repair", recipe, "--data", tmp_path / "photos", *flags)
    assert status == 0
    assert json.loads(text)["whole"]["metrics"] == {"agreement": 100}
    # What is opened again is compared with the whole network, and not with itself: here it gives one class only.
    pruned = Order(recipe=recipe, data=order.data, weights=str(out))
    whole = own_networks.plain().eval()
    load_weights_(whole, tmp_path / "weights.pth")
    with torch.no_grad():
        given = torch.cat([whole(images).argmax(1) for images in job.task.train])
    rare = int(torch.bincount(given, minlength=2).argmin())
    state = doing.weights(out / "model.safetensors")
    save_file({**state, "10.bias": 1e3 * F.one_hot(torch.tensor(rare), 2).float()}, out / "model.safetensors")
    expected = {"agreement": pytest.approx(100 * float((given == rare).float().mean()))}
    again = open_network(pruned, doing.CPU)
    assert again.task.metrics(again.model) == expected != {"agreement": 100}
    # So is the network of a run, and of a run that is resumed.
    doing.do(pruned, Training.of(epochs=0), tmp_path / "run")
    after = doing.summary(tmp_path / "run")
    assert after["before"]["metrics"] == {"agreement": 100}
    assert after["after"]["metrics"] == expected
    job = build(pruned, 1, doing.CPU)
    start = reopen(job, graph, pruned, tmp_path / "run")
    assert job.task.metrics(start.model) == expected
    (out / "whole.safetensors").unlink()
    status, _, err = secateur("evaluate", recipe, "--data", order.data, "--weights", out, "--device", "cpu")
    assert (status, "needs the whole network" in err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["nowhere"], "nowhere is not a run"),
        ([PLAIN, "--data", "DATA", "--weights", "WEIGHTS"], "--plan FILE"),
        ([PLAIN, "--data", "DATA", "--plan", "PLAN"], "--weights RUN"),
        ([PLAIN, "--weights", "WEIGHTS", "--plan", "PLAN"], "--data FOLDER"),
        ([PLAIN, "--data", "DATA", "--weights", "WEIGHTS", "--plan", "WEIGHTS"], "cannot be read"),
        ([PLAIN, "--data", "DATA", "--weights", "WEIGHTS", "--plan", "RUN/config.json"], "is not a plan"),
        ([PLAIN, "--data", "DATA", "--weights", "WEIGHTS", "--plan", "PLAN", "--width", "2"], "does not fit"),
        (["RUN", "--plan", "PLAN"], "use --data only"),
        (["RUN", "--width", "2"], "use --data only"),
        (["RUN/../trained"], "nothing to repair"),
        (["RUN", "--images", "0"], "images is out of range"),
        (["RUN", "--seed", "-1"], "seed is out of range"),
        (["RUN", "--out", "RUN"], "--out FOLDER"),
        (["RUN", "--out", "PLAN"], "--out FOLDER"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(
    secateur: Call, run: Path, cifar: Path, tmp_path: Path, arguments: list[str], word: str
) -> None:
    places = {"DATA": cifar, "WEIGHTS": run / "original.safetensors", "PLAN": run / "result/plan.json", "RUN": run}
    for name, path in places.items():
        arguments = [argument.replace(name, str(path)) for argument in arguments]
    out = [] if "--out" in arguments else ["--out", tmp_path / "out"]
    status, text, err = secateur("repair", *arguments, *out, *ON)
    assert (status, text, len(err.splitlines())) == (2, "", 1), err
    assert word in err
    assert not list(tmp_path.iterdir())
