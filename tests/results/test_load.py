"""Pruned networks from their folders, and folders that somebody has changed."""

import json
import shutil
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import secateur
from secateur.errors import InvalidData, InvalidModel, InvalidSetting, SecateurError
from secateur.models.lookup import BUILT_IN, find_model
from secateur.results import load as load_module
from secateur.results.structure import read_structure


class Odd(nn.Module):
    """Tied weights, a buffer that no state dict holds, and code that looks at a value when it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.third = nn.Conv2d(8, 8, 3, padding=1)
        self.third.weight = self.second.weight
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8)[:, None, None], persistent=False)
        self.width = int(torch.ones(8).sum().item())
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu() * self.scale
        x = self.third(self.second(x).relu()).relu()
        return self.last(x.reshape(x.shape[0], self.width, -1).mean(2))


def saved(
    model: nn.Module, folder: Path, example: Tensor, probe: bool = True, without: Sequence[str] = (), **about: Any
) -> secateur.Result:
    """The result of a run that removes some of everything."""
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point():
            tensor.data += 0.01 * torch.rand_like(tensor)
    graph = secateur.analyze(model, example, probe=probe)
    plan = secateur.Plan(graph, secateur.Plan.random(graph, 0.4, seed=1).kept, frozenset(without))
    result = secateur.Result(
        model=secateur.shrink(model, plan).eval(), plan=plan, settings=secateur.TickTock.of(keep_macs=0.5), history=()
    )
    secateur.save(result, folder, **about)
    return result


def same(result: secateur.Result, loaded: nn.Module, example: Tensor) -> None:
    assert not loaded.training
    assert type(loaded) is type(result.model)
    with torch.no_grad():
        assert torch.equal(loaded(example), result.model(example))
    before = {name: module.extra_repr() for name, module in result.model.named_modules()}
    assert {name: module.extra_repr() for name, module in loaded.named_modules()} == before


KNOWN = ["resnet20", "vgg16_m", "torchvision:mobilenet_v2", "torchvision:shufflenet_v2_x0_5", "timm:lcnet_035"]
LARGE = [
    "torchvision:densenet121",
    "timm:efficientnet_b0",
    "timm:ghostnet_050",
    "timm:res2net50_26w_4s",
    "timm:mixnet_s",
]


@pytest.mark.parametrize("name", [*KNOWN, *(pytest.param(name, marks=pytest.mark.slow) for name in LARGE)])
def test_known_networks_load_by_themselves(name: str, tmp_path: Path) -> None:
    options = {"width": 0.25} if ":" not in name else {"num_classes": 7}
    example = torch.randn(2, 3, 32, 32) if ":" not in name else torch.randn(2, 3, 64, 64)
    network = {"name": name, "options": options}
    # Only the probe finds out which lists of sizes must follow a cut.
    result = saved(find_model(name, **options), tmp_path, example, probe=name in LARGE, network=network)
    same(result, secateur.load(tmp_path), example)


@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("resnet20", ["stage1.1", "stage2.0", "stage3.0"]),
        pytest.param("torchvision:resnet18", ["layer1.0", "layer2.0", "layer4.1"], marks=pytest.mark.slow),
        pytest.param("torchvision:mobilenet_v2", ["features.3", "features.16"], marks=pytest.mark.slow),
    ],
)
def test_a_network_without_some_branches(name: str, without: list[str], tmp_path: Path) -> None:
    options = {"width": 0.25} if ":" not in name else {"num_classes": 7}
    example = torch.randn(2, 3, 64, 64)
    network = {"name": name, "options": options}
    result = saved(find_model(name, **options), tmp_path, example, probe=False, without=without, network=network)
    loaded = secateur.load(tmp_path)
    same(result, loaded, example)
    assert result.after.params == sum(p.numel() for p in loaded.parameters())
    built = secateur.load(tmp_path, build=lambda: find_model(name, **options))
    same(result, built, example)
    structure = read_structure(tmp_path)
    assert f"removed branches: {', '.join(without)}" in str(structure)
    widths = {name: module.weight.shape[0] for name, module in loaded.named_modules() if isinstance(module, nn.Conv2d)}
    convs = [layer for layer in structure.layers if not layer.name.startswith(("fc", "classifier"))]
    assert {layer.name: layer.after for layer in convs if layer.after} == {
        layer.name: widths[layer.name] for layer in convs if layer.name in widths
    }
    assert any(layer.after == 0 for layer in convs)
    (branch, *_) = result.plan.removed_branches
    data = json.loads((tmp_path / "plan.json").read_text())
    data["cuts"]["blocks"][0]["tensors"].pop()
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(InvalidData, match=f"block '{branch.block}' has other tensors"):
        secateur.load(tmp_path)


EXAMPLE = torch.randn(2, 3, 6, 6)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[secateur.Result, Path]:
    folder = tmp_path_factory.mktemp("odd")
    return saved(Odd(), folder, EXAMPLE), folder


@pytest.fixture
def odd(original: tuple[secateur.Result, Path], tmp_path: Path) -> Path:
    """The result of `Odd` in a folder that a test may change."""
    return Path(shutil.copytree(original[1], tmp_path / "run" / "result"))


def test_a_network_of_the_users_own(odd: Path, original: tuple[secateur.Result, Path]) -> None:
    result, task = original[0], secateur.Task([EXAMPLE], lambda model, batch: model(batch).sum())
    before = torch.get_rng_state()
    for build in (Odd, lambda: secateur.Job(Odd(), EXAMPLE, task), f"{__name__}:Odd"):
        loaded: Any = secateur.load(odd.parent, build=build)
        same(result, loaded, EXAMPLE)
        assert loaded.third.weight is loaded.second.weight
        assert loaded.width < 8
        assert torch.equal(loaded.scale, result.model.scale)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    loaded(EXAMPLE).sum().backward()
    plan = secateur.Plan.random(secateur.analyze(loaded, EXAMPLE), 0.3)
    assert secateur.verify(loaded, plan, EXAMPLE).agrees


class Constants(nn.Module):
    """Tensors in a list, and a checkpoint that is read when it is built."""

    def __init__(self, checkpoint: dict[str, Tensor] | None = None) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 3))
        self.scales = [torch.tensor(2.0), torch.tensor(3.0)]
        if checkpoint is not None:
            self.load_state_dict(checkpoint)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x / self.scales[1])


@pytest.mark.parametrize("checkpoint", [None, Constants().state_dict()], ids=["random", "checkpoint"])
def test_a_build_that_makes_constants_or_reads_a_checkpoint(
    checkpoint: dict[str, Tensor] | None, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    example = torch.randn(2, 3, 6, 6)
    result = saved(Constants(), tmp_path, example)
    same(result, secateur.load(tmp_path, build=lambda: Constants(checkpoint)), example)
    assert not recwarn.list


def test_a_network_that_must_be_built_is_not_much_larger_than_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = {"name": "resnet20", "options": {"width": 0.25}}
    saved(find_model("resnet20", width=0.25), tmp_path, torch.randn(2, 3, 32, 32), network=network)
    monkeypatch.setattr(load_module, "_has_own_values", lambda model: True)
    secateur.load(tmp_path)
    monkeypatch.setattr(load_module, "MOST_TIMES", 0.5)
    with pytest.raises(InvalidData):
        secateur.load(tmp_path)


def test_a_network_whose_code_looks_at_values_when_it_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(width: float) -> nn.Module:
        assert torch.ones(2).sum().item() == 2
        return find_model("resnet20", width=width)

    monkeypatch.setitem(BUILT_IN, "odd", build)
    example, network = torch.randn(2, 3, 32, 32), {"name": "odd", "options": {"width": 0.25}}
    result = saved(build(0.25), tmp_path, example, network=network)
    same(result, secateur.load(tmp_path), example)
    monkeypatch.setitem(BUILT_IN, "odd", lambda width: 1 / 0)
    with pytest.raises(InvalidData) as caught:
        secateur.load(tmp_path)
    assert "ZeroDivisionError" in str(caught.value.got)


def test_a_network_pruned_in_another_precision(odd: Path) -> None:
    path = odd / "model.safetensors"
    rewrite(path, **{name: tensor.double() for name, tensor in load_file(path).items() if tensor.is_floating_point()})
    loaded: Any = secateur.load(odd, build=Odd)
    assert loaded.first.weight.dtype == torch.float64


def test_without_build_the_error_names_what_the_run_was_given(odd: Path) -> None:
    for recipe, named in (("my_project.task:build", "build='my_project.task:build'"), ("two words:\n", "build=,")):
        (odd / "summary.json").write_text(json.dumps({"order": {"recipe": recipe}}))
        with pytest.raises(InvalidModel) as caught:
            secateur.load(odd)
        assert named in str(caught.value.remedy)


def change(folder: Path, how: Callable[[dict[str, Any]], object]) -> None:
    plan = json.loads((folder / "plan.json").read_text())
    how(plan)
    (folder / "plan.json").write_text(json.dumps(plan))


def rewrite(path: Path, **tensors: Tensor | None) -> None:
    found = {**load_file(path), **tensors}
    save_file({name: tensor for name, tensor in found.items() if tensor is not None}, path)


def keep(*indices: Any, axis: str = "0") -> Callable[[dict[str, Any]], object]:
    return lambda plan: plan["cuts"]["tensors"]["first.weight"]["kept"].update({axis: list(indices)})


def shape(*sizes: int) -> Callable[[dict[str, Any]], object]:
    return lambda plan: plan["cuts"]["tensors"]["first.weight"].update(shape=list(sizes))


def size(*row: Any) -> Callable[[dict[str, Any]], object]:
    return lambda plan: plan["cuts"]["sizes"].append(list(row))


def bias(value: Tensor | None) -> Callable[[Path], object]:
    return lambda path: rewrite(path, **{"last.bias": value})


PLANS: list[Callable[[dict[str, Any]], object]] = [
    lambda plan: plan.update(format="pickle"),
    lambda plan: plan.update(version=1),
    lambda plan: plan.update(version=3),
    lambda plan: plan.pop("groups"),
    lambda plan: plan["groups"].update(first={}),
    lambda plan: plan["groups"]["first"].update(kept=[8]),
    lambda plan: plan["groups"]["first"].update(kept=[2, 2]),
    keep(0, 8),
    keep(-1, 2),
    keep(2, 2),
    keep(),
    keep(float("nan")),
    keep(False, True),
    keep(0, axis="9"),
    shape(9, 3, 3, 3),
    shape(2**62, 3, 3, 3),
    lambda plan: plan["cuts"]["tensors"].update({"../../etc/passwd": plan["cuts"]["tensors"]["first.weight"]}),
    size("first", "forward", None, 8, 4),
    size("first", "out_channels", None, 7, 4),
    size("first"),
    lambda plan: plan.pop("cuts"),
    lambda plan: plan.update(cuts=None),
    lambda plan: plan.update(cuts=[]),
    lambda plan: plan["cuts"]["tensors"].pop("first.bias"),
]
WEIGHTS: list[Callable[[Path], object]] = [
    lambda path: path.write_bytes(path.read_bytes()[:-4]),
    lambda path: path.write_bytes(b""),
    lambda path: path.unlink(),
    lambda path: path.write_bytes(struct.pack("<Q", 2**62) + path.read_bytes()[8:]),
    bias(None),
    lambda path: rewrite(path, **{"../x": torch.ones(1)}),
    *map(bias, [torch.ones(3), torch.ones(2).half(), torch.ones(2).int(), torch.tensor([1, torch.nan])]),
    bias(torch.tensor([1, torch.inf])),
]


@pytest.mark.parametrize("number", range(len(PLANS) + len(WEIGHTS)))
def test_what_was_changed_is_refused(number: int, odd: Path) -> None:
    if number < len(PLANS):
        change(odd, PLANS[number])
    else:
        WEIGHTS[number - len(PLANS)](odd / "model.safetensors")
    with pytest.raises(InvalidData) as caught:
        secateur.load(odd, build=Odd)
    # Without the last bias the plan is whole, and the weights do not fit.
    name = "plan.json" if number < len(PLANS) - 1 else "model.safetensors"
    assert f"{odd / name}" in caught.value.what


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 0.99])
def test_half_a_plan_is_refused(share: float, odd: Path) -> None:
    text = (odd / "plan.json").read_text()
    (odd / "plan.json").write_text(text[: int(share * len(text))])
    with pytest.raises(InvalidData):
        secateur.load(odd, build=Odd)


NETWORKS: list[tuple[Any, type[SecateurError]]] = [
    ({"name": "os:system", "options": {"command": "touch sprung"}}, InvalidModel),
    ({"name": "trap:build"}, InvalidModel),
    (None, InvalidModel),
    ({"options": {}}, InvalidModel),
    ({"name": "timm:resnet18", "options": {"checkpoint_path": "/etc/passwd"}}, InvalidData),
    ({"name": "torchvision:resnet18", "options": {"weights": "DEFAULT"}}, InvalidData),
    ({"name": "resnet20", "options": {"num_classes": [[]]}}, InvalidData),
    ({"name": "resnet20", "options": {"width": 1e9}}, InvalidData),
    ({"name": "resnet20", "options": {"width": 900}}, InvalidData),
    ({"name": "torchvision:resnet19"}, InvalidSetting),
]


@pytest.mark.parametrize(("network", "error"), NETWORKS)
def test_a_network_from_a_file_is_never_code(
    network: Any, error: type[SecateurError], odd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(odd)
    (odd / "trap.py").write_text("from pathlib import Path\nPath('sprung').touch()\n")
    monkeypatch.setattr(sys, "path", [str(odd), *sys.path])
    change(odd, lambda plan: plan.update(network=network))
    with pytest.raises(error):
        secateur.load(odd)
    assert not (odd / "sprung").exists()


def test_a_folder_without_a_result(tmp_path: Path) -> None:
    for config, remedy in ((None, ""), ({"order": {}}, "resume"), ({}, "secateur.save(result")):
        if config is not None:
            (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(InvalidData) as caught:
            secateur.load(tmp_path)
        assert remedy in (caught.value.remedy or "")


@pytest.mark.parametrize(
    ("build", "error"),
    [
        (lambda: nn.Linear(2, 2), InvalidData),
        (lambda: 3, InvalidModel),
        (lambda width: Odd(), InvalidModel),
        (Odd(), InvalidModel),
        ("Odd", InvalidModel),
        (f"{__name__}:Even", InvalidSetting),
    ],
)
def test_another_build_is_refused(build: Any, error: type[SecateurError], odd: Path) -> None:
    with pytest.raises(error):
        secateur.load(odd, build=build)


def test_a_result_that_removed_nothing(original: tuple[secateur.Result, Path], tmp_path: Path) -> None:
    whole = Odd().eval()
    plan = secateur.Plan.random(secateur.analyze(whole, EXAMPLE), 0.0)
    result = replace(original[0], model=whole, plan=plan)
    secateur.save(result, tmp_path)
    same(result, secateur.load(tmp_path, build=Odd), EXAMPLE)
