"""Pruned networks in other forms, run by other programs."""

import copy
import math
import platform
import subprocess
import sys
import warnings
from functools import cache, partial
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import secateur
from secateur.channels.example import Example
from secateur.errors import InvalidModel, MissingExtra, NotEquivalent
from secateur.models.lookup import find_model
from secateur.results.export import (
    _compare,
    export_onnx,
    export_program,
    export_torchscript,
    export_weights,
    fold_batchnorm,
)
from secateur.results.network import check_runs, open_network
from secateur.results.runtimes import export_executorch, export_ncnn, export_openvino

NETWORKS = {
    "resnet14": ({}, 32),
    "resnet56": ({}, 32),
    "vgg16_m": ({}, 32),
    "timm:lcnet_035": ({}, 64),
    "torchvision:mobilenet_v2": ({}, 64),
    "torchvision:densenet121": ({}, 64),
    "timm:efficientnet_b0": ({}, 64),
    "fcn32s": ({"width": 1 / 8}, 64),
}
FAST = ("resnet14",)
needs_openvino = pytest.mark.skipif(platform.machine() == "aarch64", reason="OpenVINO has no wheel for it")


def pruned(name: str) -> tuple[nn.Module, Tensor]:
    """A copy of the network with 40% of every group gone, and norms that have seen something; and an image."""
    return copy.deepcopy(make(name))


@cache
def make(name: str) -> tuple[nn.Module, Tensor]:
    options, size = NETWORKS[name]
    torch.manual_seed(0)
    model: Any = find_model(name, **options)
    example = torch.randn(2, 3, size, size)
    model.train()(example)
    if name == "fcn32s":
        nn.init.normal_(model.score.weight, std=0.05)
    graph = secateur.analyze(model.eval(), example[:1])
    return secateur.shrink(model, secateur.Plan.random(graph, 0.4)), example[:1]


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in NETWORKS])
def test_onnx_runs_in_onnxruntime(name: str, tmp_path: Path) -> None:
    model, example = pruned(name)
    difference = export_onnx(model, example, str(tmp_path / "network.onnx"))
    assert 0 < difference < 1e-4
    written = onnx.load(tmp_path / "network.onnx")
    onnx.checker.check_model(written)
    (given,) = written.graph.input
    assert given.type.tensor_type.shape.dim[0].dim_param
    sizes = sum(int(torch.tensor(w.dims).prod()) for w in written.graph.initializer if w.data_type == 1)
    assert sizes == pytest.approx(sum(t.numel() for t in model.state_dict().values()), rel=0.05)


@pytest.mark.slow
def test_a_program_runs_without_our_code(tmp_path: Path) -> None:
    model, example = pruned("resnet14")
    assert export_program(model, example, tmp_path / "network.pt2") < 1e-5
    torch.save((example, model(example).detach()), tmp_path / "wanted.pt")
    code = """
import sys, torch
sys.modules["secateur"] = None
program = torch.export.load("network.pt2").module()
example, wanted = torch.load("wanted.pt")
assert torch.allclose(program(example), wanted, atol=1e-5)
assert program(example.expand(5, -1, -1, -1)).shape[0] == 5
"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


@pytest.mark.parametrize(
    ("name", "without"),
    [
        pytest.param("resnet14", ["stage1.1", "stage2.0"], marks=pytest.mark.slow),
        pytest.param("torchvision:mobilenet_v2", ["features.3", "features.16"], marks=pytest.mark.slow),
    ],
)
def test_a_network_without_some_branches(name: str, without: list[str], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, example = find_model(name).eval(), torch.randn(1, 3, 32, 32)
    graph = secateur.analyze(model, example)
    small = secateur.shrink(model, secateur.Plan(graph, secateur.Plan.random(graph, 0.3).kept, frozenset(without)))
    assert export_onnx(small, example, str(tmp_path / "network.onnx")) < 1e-4
    assert export_program(small, example, tmp_path / "network.pt2") < 1e-5
    assert export_torchscript(small, example, tmp_path / "network.pt") < 1e-5
    folded, _ = fold_batchnorm(small, example)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in folded.modules())
    torch.testing.assert_close(folded(example), small(example), atol=1e-4, rtol=1e-3)
    compiled = torch.compile(small, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(example), small(example))


def test_torchscript(tmp_path: Path) -> None:
    model, example = pruned("resnet14")
    assert export_torchscript(model, example, tmp_path / "network.pt") < 1e-5


@pytest.mark.parametrize("file", ["weights.safetensors", "weights.pth"])
def test_weights(file: str, tmp_path: Path) -> None:
    model, _ = pruned("resnet14")
    export_weights(model, tmp_path / file)
    path = tmp_path / file
    found = load_file(path) if file.endswith("safetensors") else torch.load(path, weights_only=True)
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(("name", "count"), [("resnet14", 15), ("torchvision:mobilenet_v2", 52)])
def test_folding_leaves_the_function_and_no_norms(name: str, count: int) -> None:
    model, example = pruned(name)
    folded, number = fold_batchnorm(model, example)
    norms = [module for module in folded.modules() if isinstance(module, nn.BatchNorm2d)]
    assert (number, len(norms)) == (count, 0)
    assert any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    images = torch.randn(3, *example.shape[1:])
    with torch.no_grad():
        assert torch.allclose(folded.double()(images.double()), model.double()(images.double()), rtol=1e-4, atol=1e-5)


class Tempting(nn.Module):
    """A norm behind a sum, a convolution whose output goes two ways, and one that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.twice, self.behind = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.fork, self.one = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x) + x)
        x = self.behind(self.twice(self.twice(x)))
        y = self.fork(x)
        return self.one(y) + y


@pytest.mark.parametrize("wrong", [lambda y: y * math.nan, lambda y: y[:, :1]], ids=["NaN", "shape"])
def test_what_gives_nan_or_another_shape_is_not_the_same(wrong: Any) -> None:
    images = torch.randn(2, 3, 8, 8)
    conv = nn.Conv2d(3, 4, 3)
    with pytest.raises(NotEquivalent):
        _compare(conv, Example.of(images), lambda call: wrong(call(conv)))


class Named(nn.Module):
    """One convolution whose weight is computed from others, and one that is called by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.normed = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3))
        self.plain, self.norm1, self.norm2 = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm2(input=self.plain(input=self.norm1(self.normed(x))))


class Chooser(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if float(x.sum()) > 0 else -x


class Reused(nn.Module):
    """What the first convolution gives is normalised, and added as it is; the second one's is only normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm1, self.norm2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        for norm in (self.norm1, self.norm2):
            nn.init.normal_(norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = (self.norm1(x) + x).relu()
        return self.norm2(self.second(x))


class Open(nn.Module):
    """Layers that would tell: one gives its output back, one lends its weight, one is hooked, one is in groups."""

    def __init__(self) -> None:
        super().__init__()
        self.shown, self.lent, self.hooked = (nn.Conv2d(4, 4, 1) for _ in range(3))
        self.grouped = nn.ConvTranspose2d(4, 4, 2, groups=2)
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(4))
        self.hooked.register_forward_hook(lambda module, args, output: output * 2)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        shown = self.shown(x)
        lent = self.norms[1](self.lent(self.norms[0](shown))) * self.lent.weight.mean()
        return shown, self.norms[3](self.grouped(self.norms[2](self.hooked(lent))))


@pytest.mark.parametrize(
    ("make", "channels", "left"),
    [(Tempting, 3, ["norm", "behind", "one"]), (Named, 3, ["norm1"]), (Reused, 3, ["norm1"]), (Open, 4, range(4))],
)
def test_a_norm_is_folded_only_into_what_nothing_else_reads(make: Any, channels: int, left: Any) -> None:
    torch.manual_seed(0)
    model = make()
    for _ in range(3):
        model(torch.randn(4, channels, 8, 8) + 1)
    names = [name for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)]
    folded, count = fold_batchnorm(model.eval(), torch.randn(2, channels, 8, 8))
    assert count == len(names) - len(left)
    stay = [name for name, module in folded.named_modules() if isinstance(module, nn.BatchNorm2d)]
    assert stay == (list(left) if make is not Open else names)


def test_a_wrong_fold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Reused().eval()
    monkeypatch.setattr("secateur.results.export._pairs", lambda model, example: {"first": "norm1"})
    with pytest.raises(NotEquivalent):
        fold_batchnorm(model, torch.randn(1, 3, 8, 8))


class Many(nn.Module):
    """A dict with a tensor and a pair of them."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = self.norm(self.body(x))
        return {"features": x, "heads": (self.head(x), x.mean((2, 3)))}


@pytest.mark.parametrize("export", [export_onnx, export_program])
def test_several_outputs(export: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, images = Many().eval(), torch.randn(2, 3, 8, 8)
    folded, count = fold_batchnorm(model, images)
    assert count == 1
    assert export(folded, images, tmp_path / "network") < 1e-4


class Heads(nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 2, 1)
        self.names = names

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return dict(zip(self.names, (self.two(x), self.one(x).mean((2, 3))), strict=True))


@pytest.mark.parametrize("names", [("segments", "classes"), ("x", "classes")])
def test_outputs_have_the_names_of_the_dict(names: tuple[str, str], tmp_path: Path) -> None:
    path = tmp_path / "network.onnx"
    assert export_onnx(Heads(*names).eval(), torch.randn(1, 3, 8, 8), path) < 1e-4
    found = tuple(each.name for each in onnx.load(path).graph.output)
    assert (found == names) == (names[0] == "segments")
    assert export_torchscript(Heads(*names).eval(), torch.randn(1, 3, 8, 8), tmp_path / "network.ts") < 1e-4


@pytest.mark.parametrize("export", [export_torchscript, export_program])
def test_what_is_found_wrong_does_not_appear(export: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secateur.results.export.TOLERANCE", -1.0)
    (tmp_path / "network").write_text("of yesterday")
    with pytest.raises(NotEquivalent):
        export(nn.Conv2d(1, 1, 1), torch.randn(1, 1, 2, 2), tmp_path / "network")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("network", "of yesterday")]


@pytest.mark.parametrize("shape", [(1, 5, 8, 8), (2, 6)])
def test_an_input_of_the_wrong_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidModel) as caught:
        check_runs(*open_network("resnet14", shape=shape), "resnet14")
    assert "x".join(map(str, shape)) in caught.value.what
    assert str(caught.value.got).startswith("RuntimeError: ")


class Counts(nn.Module):
    """Its forward pass writes to a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.calls = nn.Conv2d(3, 2, 1), nn.Buffer(torch.zeros(()))

    def forward(self, images: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.conv(images) * self.calls


def test_what_a_forward_pass_writes_is_not_exported(tmp_path: Path) -> None:
    model, images = Counts().eval(), torch.randn(2, 3, 4, 4)
    secateur.export(model, tmp_path / "net.pt2", images)
    assert not model.calls
    program = torch.export.load(tmp_path / "net.pt2").module()
    torch.testing.assert_close(program(images), model(images))


def test_a_network_that_cannot_be_exported_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel) as caught:
        export_program(Chooser(), torch.randn(1, 3), tmp_path / "network.pt2")
    assert caught.value.what == "Chooser cannot be written as an exported program"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@needs_openvino
def test_openvino_reads_what_was_written(tmp_path: Path) -> None:
    import openvino

    model, example = pruned("resnet14")
    assert export_openvino(model, example, tmp_path / "folder") < 1e-5
    assert export_openvino(model, example, tmp_path / "other.xml") < 1e-5
    names = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")}
    assert names == {"folder/network.xml", "folder/network.bin", "other.xml", "other.bin"}
    images = torch.randn(5, 3, 32, 32)
    options = {"INFERENCE_PRECISION_HINT": "f32"}
    network = openvino.Core().compile_model(tmp_path / "other.xml", "CPU", options)
    with torch.no_grad():
        assert torch.allclose(torch.from_numpy(network(images.numpy())[0]), model(images), atol=1e-4)


@needs_openvino
def test_openvino_with_several_outputs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    assert export_openvino(Many().eval(), torch.randn(2, 3, 8, 8), tmp_path / "network.xml") < 1e-4


@needs_openvino
def test_of_two_files_that_are_wrong_none_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secateur.results.export.TOLERANCE", -1.0)
    monkeypatch.setattr("secateur.results.runtimes.export_onnx", partial(_onnx_within, 1e-3))
    with pytest.raises(NotEquivalent, match="differs from the network"):
        export_openvino(nn.Conv2d(1, 1, 1), torch.randn(1, 1, 2, 2), tmp_path / "network.xml")
    assert not list(tmp_path.iterdir())


def _onnx_within(tolerance: float, *given: Any) -> float:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("secateur.results.export.TOLERANCE", tolerance)
        return export_onnx(*given)


def test_ncnn_reads_what_was_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ncnn = pytest.importorskip("ncnn")
    pytest.importorskip("pnnx")
    model, example = pruned("resnet14")
    assert export_ncnn(model, example, tmp_path / "network") < 1e-4
    assert {path.name for path in tmp_path.iterdir()} == {"network.param", "network.bin"}
    assert capfd.readouterr().out == ""
    network = ncnn.Net()
    assert network.load_param(str(tmp_path / "network.param")) == 0
    assert network.load_model(str(tmp_path / "network.bin")) == 0
    assert network.input_names() == ["in0"]


class Unknown(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.special.erfinv(x.sigmoid())


def test_ncnn_takes_one_image_and_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("ncnn")
    pytest.importorskip("pnnx")
    torch.manual_seed(0)
    two = torch.randn(1, 3, 8, 8), torch.randn(1, 3, 8, 8)
    with pytest.raises(InvalidModel, match="one tensor of"):
        export_ncnn(nn.Bilinear(8, 8, 2), two, tmp_path / "network")
    with pytest.raises(InvalidModel, match="an operator that ncnn lacks"):
        export_ncnn(Unknown(), two[0], tmp_path / "network")
    assert not list(tmp_path.iterdir())


def test_executorch_runs_what_was_written(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own imports
        pytest.importorskip("executorch.exir")
    model, example = pruned("resnet14")
    assert export_executorch(model, example, tmp_path / "network.pte") < 1e-4
    assert [path.name for path in tmp_path.iterdir()] == ["network.pte"]


@pytest.mark.parametrize(("module", "export"), [("openvino", export_openvino), ("pnnx", export_ncnn)])
def test_a_runtime_that_is_missing_is_named(
    module: str, export: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    extra = {"pnnx": "ncnn"}.get(module, module)
    with pytest.raises(MissingExtra, match=rf"secateur\[{extra}\]"):
        export(nn.Conv2d(1, 1, 1), torch.randn(1, 1, 2, 2), tmp_path / "network")


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(3, 3, 1)
        self.other = self.one
        self.register_buffer("grid", torch.zeros(3), persistent=False)


def test_both_formats_of_weights_are_the_state_dict(tmp_path: Path) -> None:
    model = Shared()
    secateur.export(model, tmp_path / "weights.safetensors")
    secateur.export(model, tmp_path / "weights.pth")
    for state in (load_file(tmp_path / "weights.safetensors"), torch.load(tmp_path / "weights.pth")):
        assert set(state) == set(model.state_dict())
        model.load_state_dict(state)
