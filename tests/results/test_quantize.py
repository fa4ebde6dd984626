"""Networks in INT8, beside the networks they come from."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import secateur
import secateur.results.quantize as quantize
from secateur.data.arrays import Arrays
from secateur.errors import InvalidModel, NotEquivalent
from secateur.models.resnet_cifar import CifarResNet
from secateur.results.quantize import Quantized, export_int8
from secateur.training.task import Task, unlabelled

IMAGES = torch.rand(48, 3, 16, 16, generator=torch.Generator().manual_seed(1)) * 2


def pruned() -> nn.Module:
    """A network with a third of every group gone, norms that have seen something, and answers of all classes."""
    torch.manual_seed(0)
    model = CifarResNet(8)
    for _ in range(3):
        model.train()(IMAGES)
    graph = secateur.analyze(model.eval(), IMAGES[:1])
    small: Any = secateur.shrink(model, secateur.Plan.random(graph, 0.3)).eval()
    with torch.no_grad():
        scores = small(IMAGES)
        small.fc.weight.div_(scores.std(0)[:, None])
        small.fc.bias.sub_(scores.mean(0)).div_(scores.std(0))
        assert len(small(IMAGES).argmax(1).unique()) > 7
    return small


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return pruned()


@pytest.fixture(scope="module")
def task(model: nn.Module) -> Task:
    """Its own answers are the labels, so that what it loses is what it answers otherwise."""
    with torch.no_grad():
        labels = model(IMAGES).argmax(1)
    return secateur.classification(Arrays(IMAGES, labels, 16), Arrays(IMAGES, labels, 20))


@pytest.fixture(scope="module")
def exported(model: nn.Module, task: Task, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Quantized]:
    before = copy.deepcopy(model.state_dict())
    path = tmp_path_factory.mktemp("int8") / "network.onnx"
    found = export_int8(model, IMAGES[:1], task, path, images=40)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    return path, found


def run(path: Path, images: Tensor) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: images.numpy()})[0]


def convolutions(path: Path) -> list[tuple[onnx.NodeProto, np.ndarray]]:
    """The convolutions of a file, and their weights as they are stored."""
    graph = onnx.load(path).graph
    stored = {each.name: onnx.numpy_helper.to_array(each) for each in graph.initializer}
    made = {node.output[0]: node for node in graph.node}
    found = []
    for node in graph.node:
        if node.op_type == "Conv":
            weight = node.input[1]
            found.append((node, stored[weight] if weight in stored else stored[made[weight].input[0]]))
    return found


@pytest.mark.parametrize(("narrow", "largest"), [(True, 64), (False, 127)])
def test_weights_have_seven_bits_where_sums_overflow(
    model: nn.Module, task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, narrow: bool, largest: int
) -> None:
    monkeypatch.setattr(quantize, "overflows", lambda: narrow)
    found = export_int8(model, IMAGES[:1], task, tmp_path / "network.onnx", images=8)
    weights = [weight for _, weight in convolutions(tmp_path / "network.onnx")]
    assert max(abs(weight.astype(int)).max() for weight in weights) == largest
    assert (found.weight_bits, "7 bits" in str(found)) == (7 if narrow else 8, narrow)


def test_int8_is_compared_with_the_network(model: nn.Module, exported: tuple[Path, Quantized]) -> None:
    path, found = exported
    assert found.images == 40
    assert found.before["accuracy"] == 100
    with torch.no_grad():
        same = run(path, IMAGES).argmax(1) == model(IMAGES).argmax(1).numpy()
    assert found.agreement == found.after["accuracy"] == pytest.approx(100 * same.mean())
    assert found.agreement > 80
    assert found.lost == 100 - found.after["accuracy"]
    assert found.bytes_after == path.stat().st_size < 0.6 * found.bytes_before
    assert min(found.seconds_before, found.seconds_after) > 0
    assert [run(path, IMAGES[:size]).shape for size in (1, 5)] == [(1, 10), (5, 10)]


def test_weights_have_a_scale_for_each_channel_and_norms_are_folded(exported: tuple[Path, Quantized]) -> None:
    path, _ = exported
    graph = onnx.load(path).graph
    assert not [node for node in graph.node if node.op_type == "BatchNormalization"]
    stored = {each.name: onnx.numpy_helper.to_array(each) for each in graph.initializer}
    made = {node.output[0]: node for node in graph.node}
    for node, weight in convolutions(path):
        assert weight.dtype == np.int8
        scale = stored[made[node.input[1]].input[1]]
        assert scale.shape == (weight.shape[0],)
        assert len(set(scale.tolist())) > 1


@pytest.mark.parametrize(("count", "seed"), [(16, 0), pytest.param(48, 0, marks=pytest.mark.slow)])
def test_ranges_come_from_the_calibration_images(
    model: nn.Module, task: Task, tmp_path: Path, count: int, seed: int
) -> None:
    images = IMAGES.clone()
    images[20] *= 3  # seen only by those who read so far
    labels = torch.zeros(48, dtype=torch.long)
    path = tmp_path / "network.onnx"
    export_int8(model, IMAGES[:1], replace(task, train=Arrays(images, labels, 8)), path, images=count, seed=seed)
    graph = onnx.load(path).graph
    first = next(node for node in graph.node if node.op_type == "QuantizeLinear" and node.input[0] == "input")
    stored = {each.name: onnx.numpy_helper.to_array(each) for each in graph.initializer}
    assert float(stored[first.input[1]]) == pytest.approx(float(images[:count].max()) / 255, rel=1e-3)


@pytest.mark.parametrize("skip", [pytest.param(("first",), marks=pytest.mark.slow), ("first", "last")])
def test_layers_that_are_skipped_stay_in_single_precision(
    model: nn.Module, task: Task, tmp_path: Path, skip: tuple[str, ...]
) -> None:
    path = tmp_path / "network.onnx"
    export_int8(model, IMAGES[:1], task, path, skip=skip)
    kinds = [weight.dtype for _, weight in convolutions(path)]
    assert kinds == [np.float32, *[np.dtype(np.int8)] * (len(kinds) - 1)]
    graph = onnx.load(path).graph
    last = next(node for node in graph.node if node.op_type == "Gemm")
    assert (last.input[1] in {each.name for each in graph.initializer}) == ("last" in skip)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["entropy", "percentile"])
def test_other_methods_choose_other_ranges(
    model: nn.Module, task: Task, tmp_path: Path, method: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: tmp_path / f"{name}.onnx" for name in ("minmax", method)}
    for name, path in files.items():
        assert export_int8(model, IMAGES[:1], task, path, method=name).agreement > 70  # pyright: ignore
    assert not np.array_equal(*(run(path, IMAGES) for path in files.values()))
    assert capsys.readouterr().out == ""


def test_without_labels_there_is_only_agreement(model: nn.Module, tmp_path: Path) -> None:
    batches = list(IMAGES.split(16))
    task = unlabelled(batches, batches, whole=nn.Identity())  # which is not asked
    found = export_int8(model, IMAGES[:1], task, tmp_path / "network.onnx")
    same = run(tmp_path / "network.onnx", IMAGES).argmax(1) == model(IMAGES).argmax(1).numpy()
    assert (found.before, found.after) == ({}, {})
    assert found.agreement == pytest.approx(100 * same.mean())
    assert found.lost == 100 - found.agreement
    assert "accuracy" not in str(found)


def test_a_network_that_answers_otherwise_is_not_written(model: nn.Module, task: Task, tmp_path: Path) -> None:
    dark = Arrays(IMAGES * 1e-4, torch.zeros(48, dtype=torch.long), 16)  # ranges that real images leave
    path = tmp_path / "network.onnx"
    path.write_text("of yesterday")
    with pytest.raises(NotEquivalent, match="another one"):
        export_int8(model, IMAGES[:1], replace(task, train=dark), path)
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("network.onnx", "of yesterday")]


@pytest.mark.parametrize(("after", "told"), [(92.5, False), (91.9, True)])
def test_a_loss_of_more_than_a_point_is_told(after: float, told: bool) -> None:
    found = Quantized({"accuracy": 93.0}, {"accuracy": after}, 97.0, 0.002, 0.001, 4000, 1000, images=512)
    text = str(found)
    assert ("warning: " in text, "more calibration images" in text) == (told, told)
    assert "2.000       1.000" in text


def test_agreement_tells_where_the_metric_is_of_another_kind() -> None:
    assert Quantized({"error": 7.0}, {"error": 9.0}, 98.5, 1.0, 1.0, 1, 1, images=1).lost == pytest.approx(1.5)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        x = self.conv(x)
        return (x, x.mean((2, 3))) if y is None else x * y.mean()


@pytest.mark.parametrize("example", [IMAGES[:1], (IMAGES[:1], IMAGES[:1])], ids=["two out", "two in"])
def test_other_networks_are_refused(task: Task, example: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match="TwoHeads cannot be quantised"):
        export_int8(TwoHeads().eval(), example, task, tmp_path / "network.onnx")
    assert not list(tmp_path.iterdir())
