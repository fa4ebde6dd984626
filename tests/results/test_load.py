"""Pruned networks from their folders, and folders that somebody has changed."""

import json
import struct
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import secateur
from secateur.models.lookup import BUILT_IN, find_model
from secateur.results import load as load_module


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


def saved(model: nn.Module, folder: Path, example: Tensor, **about: Any) -> secateur.Result:
    """The result of a run that removes some of everything."""
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point():
            tensor.data += 0.01 * torch.rand_like(tensor)
    graph = secateur.analyze(model, example)
    plan = secateur.Plan.random(graph, 0.4, seed=1)
    result = secateur.Result(
        model=secateur.shrink(model, plan).eval(), plan=plan, settings=secateur.TickTock(keep_macs=0.5), history=()
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
    result = saved(find_model(name, **options), tmp_path, example, network={"name": name, "options": options})
    same(result, secateur.load(tmp_path), example)


def test_a_network_of_the_users_own(tmp_path: Path) -> None:
    example = torch.randn(2, 3, 6, 6)
    result = saved(Odd(), tmp_path / "run" / "result", example)
    loaded = secateur.load(tmp_path / "run", build=Odd)
    same(result, loaded, example)
    assert loaded.third.weight is loaded.second.weight
    assert loaded.width < 8
    assert torch.equal(loaded.scale, result.model.scale)


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


def test_a_build_that_wants_arguments(tmp_path: Path) -> None:
    saved(Odd(), tmp_path, torch.randn(2, 3, 6, 6))
    with pytest.raises(secateur.InvalidModel, match=r"build is called without arguments.*'width'"):
        secateur.load(tmp_path, build=lambda width: Odd())


def test_a_network_that_must_be_built_is_no_larger_than_its_weights_let_expect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = {"name": "resnet20", "options": {"width": 0.25}}
    saved(find_model("resnet20", width=0.25), tmp_path, torch.randn(2, 3, 32, 32), network=network)
    monkeypatch.setattr(load_module, "_has_own_values", lambda model: True)
    secateur.load(tmp_path)
    monkeypatch.setattr(load_module, "MOST_TIMES", 0.5)
    with pytest.raises(secateur.DamagedResult, match="much larger than what"):
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
    with pytest.raises(secateur.DamagedResult, match=r"names cannot be made: .*ZeroDivisionError"):
        secateur.load(tmp_path)


def test_a_network_pruned_in_another_precision(tmp_path: Path) -> None:
    example = torch.randn(2, 3, 6, 6)
    saved(Odd(), tmp_path, example)
    path = tmp_path / "model.safetensors"
    rewrite(path, **{name: tensor.double() for name, tensor in load_file(path).items() if tensor.is_floating_point()})
    assert secateur.load(tmp_path, build=Odd).first.weight.dtype == torch.float64


def test_a_build_that_returns_a_job(tmp_path: Path) -> None:
    example = torch.randn(2, 3, 6, 6)
    result = saved(Odd(), tmp_path, example)
    task = secateur.Task([example], lambda model, batch: model(batch).sum())
    same(result, secateur.load(tmp_path, build=lambda: secateur.Job(Odd(), example, task)), example)


def test_without_build_the_error_names_what_the_run_was_given(tmp_path: Path) -> None:
    example = torch.randn(2, 3, 6, 6)
    saved(Odd(), tmp_path, example, order={"recipe": "my_project.task:build"})
    with pytest.raises(secateur.InvalidModel, match=r"as --build my_project\.task:build, or build=build in Python$"):
        secateur.load(tmp_path)
    saved(Odd(), tmp_path, example, order={"recipe": "two words:\n"})
    with pytest.raises(secateur.InvalidModel, match=r"as build= or --build$"):
        secateur.load(tmp_path)


def test_what_is_loaded_can_be_trained_and_pruned_again(tmp_path: Path) -> None:
    example = torch.randn(2, 3, 6, 6)
    saved(Odd(), tmp_path, example)
    loaded = secateur.load(tmp_path, build=Odd)
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    loaded(example).sum().backward()
    graph = secateur.analyze(loaded, example)
    assert secateur.verify(loaded, secateur.Plan.random(graph, 0.3), example).agrees


def test_loading_draws_no_random_numbers(tmp_path: Path) -> None:
    saved(Odd(), tmp_path, torch.randn(2, 3, 6, 6))
    before = torch.get_rng_state()
    secateur.load(tmp_path, build=Odd)
    assert torch.equal(torch.get_rng_state(), before)


def test_version_1_had_no_cuts(tmp_path: Path) -> None:
    example = torch.randn(2, 3, 32, 32)
    result = saved(find_model("resnet20"), tmp_path, example, network={"name": "resnet20"})
    change(tmp_path, lambda plan: plan.update(version=1) or plan.pop("cuts"))
    same(result, secateur.load(tmp_path), example)
    same(result, secateur.load(tmp_path, build=lambda: find_model("resnet20"), example=example), example)


def change(folder: Path, how: Callable[[dict[str, Any]], object]) -> None:
    plan = json.loads((folder / "plan.json").read_text())
    how(plan)
    (folder / "plan.json").write_text(json.dumps(plan))


def first_of(plan: dict[str, Any]) -> dict[str, Any]:
    return plan["cuts"]["tensors"]["first.weight"]


PLANS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "another format": (lambda plan: plan.update(format="pickle"), "does not say"),
    "a later version": (lambda plan: plan.update(version=3), "its version is 3, and this Secateur reads up to 2"),
    "no groups": (lambda plan: plan.pop("groups"), 'it has no "groups"'),
    "a group of nothing": (lambda plan: plan["groups"].update(first={}), "cannot read"),
    "a channel too large": (lambda plan: plan["groups"]["first"].update(kept=[8]), "must rise from 0 to 7"),
    "a channel twice": (lambda plan: plan["groups"]["first"].update(kept=[2, 2]), "must rise from 0 to 7"),
    "an index too large": (lambda plan: first_of(plan)["kept"].update({"0": [0, 8]}), "must rise from 0 to 7"),
    "a negative index": (lambda plan: first_of(plan)["kept"].update({"0": [-1, 2]}), "must rise from 0 to 7"),
    "an index twice": (lambda plan: first_of(plan)["kept"].update({"0": [2, 2]}), "must rise from 0 to 7"),
    "no index": (lambda plan: first_of(plan)["kept"].update({"0": []}), "at least one"),
    "no number": (lambda plan: first_of(plan)["kept"].update({"0": [float("nan")]}), "must be a list of indices"),
    "true": (lambda plan: first_of(plan)["kept"].update({"0": [False, True]}), "must be a list of indices"),
    "another axis": (lambda plan: first_of(plan)["kept"].update({"9": [0]}), "damaged"),
    "another shape": (
        lambda plan: first_of(plan).update(shape=[9, 3, 3, 3]),
        "first.weight was 9x3x3x3 before pruning",
    ),
    "a huge shape": (lambda plan: first_of(plan).update(shape=[2**62, 3, 3, 3]), "before pruning, and is 8x3x3x3 here"),
    "another tensor": (
        lambda plan: plan["cuts"]["tensors"].update({"../../etc/passwd": first_of(plan)}),
        "the network has no ../../etc/passwd",
    ),
    "a method": (
        lambda plan: plan["cuts"]["sizes"].append(["first", "forward", None, 8, 4]),
        "first.forward is not 8, as it was before pruning",
    ),
    "another size": (
        lambda plan: plan["cuts"]["sizes"].append(["first", "out_channels", None, 7, 4]),
        "first.out_channels is not 7",
    ),
    "half a size": (lambda plan: plan["cuts"]["sizes"].append(["first"]), "damaged"),
    "no cuts": (lambda plan: plan.update(cuts=None), "damaged"),
    "a list": (lambda plan: plan.update(cuts=[]), "damaged"),
    "not all": (lambda plan: plan["cuts"]["tensors"].pop("first.bias"), "first.bias in .* is 5, and should be 8"),
}


@pytest.mark.parametrize("case", PLANS)
def test_a_changed_plan_is_refused(case: str, tmp_path: Path) -> None:
    saved(Odd(), tmp_path, torch.randn(2, 3, 6, 6))
    how, message = PLANS[case]
    change(tmp_path, how)
    with pytest.raises(secateur.DamagedResult, match=message):
        secateur.load(tmp_path, build=Odd)


NETWORKS = {
    "code": ({"name": "os:system", "options": {"command": "touch sprung"}}, "which is not ours: name what makes it"),
    "a module": ({"name": "trap:build"}, "which is not ours: name what makes it"),
    "a file": (
        {"name": "timm:resnet18", "options": {"checkpoint_path": "/etc/passwd"}},
        "options that no result needs",
    ),
    "a download": ({"name": "torchvision:resnet18", "options": {"weights": "DEFAULT"}}, "that no result needs"),
    "a nest": ({"name": "resnet20", "options": {"num_classes": [[]]}}, "not plain or too large"),
    "a giant": ({"name": "resnet20", "options": {"width": 1e9}}, "not plain or too large"),
    "a large one": ({"name": "resnet20", "options": {"width": 900}}, "does not fit the network"),
    "nothing": (None, "does not say which network it is of"),
    "no name": ({"options": {}}, "does not say which network it is of"),
    "unknown": ({"name": "torchvision:resnet19"}, "there is no torchvision network 'resnet19'"),
}


@pytest.mark.parametrize("case", NETWORKS)
def test_a_network_from_a_file_is_never_code(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trap.py").write_text("from pathlib import Path\nPath('sprung').touch()\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    saved(Odd(), tmp_path, torch.randn(2, 3, 6, 6))
    network, message = NETWORKS[case]
    change(tmp_path, lambda plan: plan.update(network=network))
    with pytest.raises(secateur.SecateurError, match=message):
        secateur.load(tmp_path)
    assert not (tmp_path / "sprung").exists()


def rewrite(path: Path, **tensors: Tensor | None) -> None:
    found = {**load_file(path), **tensors}
    save_file({name: tensor for name, tensor in found.items() if tensor is not None}, path)


def huge_header(path: Path) -> None:
    path.write_bytes(struct.pack("<Q", 2**62) + path.read_bytes()[8:])


WEIGHTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut short": (lambda path: path.write_bytes(path.read_bytes()[:-4]), "cannot read"),
    "empty": (lambda path: path.write_bytes(b""), "cannot read"),
    "gone": (lambda path: path.unlink(), "cannot read"),
    "a huge header": (huge_header, "cannot read"),
    "a tensor too few": (lambda path: rewrite(path, **{"last.bias": None}), "has no last.bias"),
    "a tensor too many": (lambda path: rewrite(path, **{"../x": torch.ones(1)}), "has '../x', which Odd does not"),
    "another shape": (
        lambda path: rewrite(path, **{"last.bias": torch.ones(3)}),
        "last.bias in .* is 3, and should be 2",
    ),
    "another precision": (lambda path: rewrite(path, **{"last.bias": torch.ones(2).half()}), "float16, and should be"),
    "whole numbers": (lambda path: rewrite(path, **{"last.bias": torch.ones(2).int()}), "is of torch.int32"),
    "no numbers": (
        lambda path: rewrite(path, **{"last.bias": torch.full((2,), torch.nan)}),
        "values that are no numbers",
    ),
    "infinite": (
        lambda path: rewrite(path, **{"last.bias": torch.full((2,), torch.inf)}),
        "values that are no numbers",
    ),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_changed_weights_are_refused(case: str, tmp_path: Path) -> None:
    saved(Odd(), tmp_path, torch.randn(2, 3, 6, 6))
    how, message = WEIGHTS[case]
    how(tmp_path / "model.safetensors")
    with pytest.raises(secateur.DamagedResult, match=message):
        secateur.load(tmp_path, build=Odd)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 0.99])
def test_half_a_plan_is_refused(share: float, tmp_path: Path) -> None:
    saved(Odd(), tmp_path, torch.randn(2, 3, 6, 6))
    text = (tmp_path / "plan.json").read_text()
    (tmp_path / "plan.json").write_text(text[: int(share * len(text))])
    with pytest.raises(secateur.DamagedResult, match=r"cannot read .*plan.json"):
        secateur.load(tmp_path, build=Odd)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(secateur.DamagedResult, match="there is no result"):
        secateur.load(tmp_path)
    (tmp_path / "config.json").write_text('{"order": {}}')
    with pytest.raises(secateur.DamagedResult, match="its run is not finished"):
        secateur.load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(secateur.DamagedResult, match=r"a run from Python leaves it to you, secateur\.save\(result, "):
        secateur.load(tmp_path)


def test_another_network_is_refused(tmp_path: Path) -> None:
    saved(Odd(), tmp_path, torch.randn(2, 3, 6, 6))
    with pytest.raises(secateur.DamagedResult, match=r"the network has no first\.\w+: it is another one"):
        secateur.load(tmp_path, build=lambda: nn.Linear(2, 2))
    with pytest.raises(
        secateur.InvalidModel, match=r"build must return a torch\.nn\.Module or a secateur\.Job, got int"
    ):
        secateur.load(tmp_path, build=lambda: 3)  # pyright: ignore
    for build in (Odd(), "Odd"):
        with pytest.raises(secateur.InvalidModel, match="build is a function that makes the whole network, got "):
            secateur.load(tmp_path, build=build)  # pyright: ignore


def test_a_result_that_removed_nothing(tmp_path: Path) -> None:
    example = torch.randn(2, 3, 6, 6)
    result = saved(Odd(), tmp_path, example)
    whole = Odd().eval()
    plan = secateur.Plan.random(secateur.analyze(whole, example), 0.0)
    result = replace(result, model=whole, plan=plan)
    secateur.save(result, tmp_path)
    same(result, secateur.load(tmp_path, build=Odd), example)
