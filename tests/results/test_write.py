"""`secateur.export`: a result, a model and a folder in the formats that names of files say."""

import warnings
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from one_result import build
from safetensors.torch import load_file
from torch import Tensor, nn

import secateur
from secateur import InvalidData, InvalidModel, InvalidSetting

IMAGES = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def networks(result: secateur.Result, tmp_path: Path) -> dict[str, tuple[Any, Any, dict[str, Any]]]:
    """What can be exported, and with which arguments."""
    folder = secateur.save(result, tmp_path / "result", classes=["a", "b", "c"])
    return {
        "result": (result, None, {}),
        "model": (result.model, IMAGES[:1], {}),
        "folder": (folder, None, {"build": build}),
        "folder and example": (str(folder), IMAGES[:1], {"build": build}),
    }


@pytest.mark.parametrize("kind", ["result", "model", "folder", "folder and example"])
def test_what_is_written_is_the_network(kind: str, networks: Any, result: secateur.Result, tmp_path: Path) -> None:
    network, example, options = networks[kind]
    before = [module.training for module in result.model.modules()]
    difference = secateur.export(network, tmp_path / "network.ts", example, **options)
    assert difference is not None
    assert difference < 1e-6
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):  # torch prefers torch.export by now
        torch.testing.assert_close(torch.jit.load(tmp_path / "network.ts")(IMAGES), result.model(IMAGES))
    assert secateur.export(network, tmp_path / "network.safetensors", **options) is None
    assert secateur.export(network, tmp_path / "network.pth", **options) is None
    for found in (load_file(tmp_path / "network.safetensors"), torch.load(tmp_path / "network.pth")):
        assert all(torch.equal(found[name], tensor) for name, tensor in result.model.state_dict().items())
    assert [module.training for module in result.model.modules()] == before


def test_batch_norms_are_folded_into_a_copy(result: secateur.Result, tmp_path: Path) -> None:
    secateur.export(result, tmp_path / "folded.pth", fold_batchnorm=True)
    assert [name for name in torch.load(tmp_path / "folded.pth") if name.startswith("1.")] == []
    assert isinstance(result.model[1], nn.BatchNorm2d)  # pyright: ignore


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["onnx", "pt2", "xml", "param", "pte"])
def test_every_format(ending: str, networks: Any, tmp_path: Path) -> None:
    for module in {"xml": ["openvino"], "param": ["ncnn", "pnnx"], "pte": ["executorch"]}.get(ending, []):
        pytest.importorskip(module)
    network, example, options = networks["folder"]
    difference = secateur.export(network, tmp_path / f"network.{ending}", example, **options)
    assert difference is not None
    assert difference < 1e-3
    assert (tmp_path / f"network.{ending}").is_file()
    if ending == "onnx":
        told = {each.key: each.value for each in onnx.load(tmp_path / "network.onnx").metadata_props}
        assert told["classes"] == '["a", "b", "c"]'


def test_what_cannot_be_written_is_refused(result: secateur.Result, tmp_path: Path) -> None:
    refused: list[tuple[Any, str, dict[str, Any], type[Exception], str]] = [
        (result, "network.pt", {}, InvalidSetting, r"network.pt, wanted .onnx, .pt2"),
        (result, "network", {}, InvalidSetting, "does not say its format"),
        (result.model, "network.ts", {}, InvalidSetting, r"export\(model, path, example\)"),
        (result, "network.ts", {"build": build}, InvalidSetting, "beside a Result"),
        (result.model, "network.ts", {"example": torch.ones(1, 3, 8, 8)}, InvalidModel, "1x3x8x8"),
        (result.model, "network.ts", {"example": ([IMAGES],)}, InvalidModel, "more than tensors"),
        ("resnet56", "network.ts", {}, InvalidData, "no result in resnet56"),
    ]
    for network, file, options, error, text in refused:
        with pytest.raises(error, match=text):
            secateur.export(network, tmp_path / file, **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["taken", "network.pth", "Network.ONNX"])
def test_a_result_is_not_saved_in_a_file(name: str, result: secateur.Result, tmp_path: Path) -> None:
    path = tmp_path / name
    if name == "taken":
        path.write_text("something else")
    with pytest.raises(InvalidSetting, match=r"wanted a folder. .*secateur.export\(result, '.*\.safetensors'"):
        secateur.save(result, path)
    assert [each.read_text() for each in tmp_path.iterdir()] == (["something else"] if name == "taken" else [])


class Nested(nn.Module):
    """Outputs of one shape, some deep in a dict, and one that is None."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(1, 2, 3) for _ in range(4))

    def forward(self, x: Tensor) -> dict[str, Any]:
        one, two, three, four = (layer(x) for layer in self.layers)
        return {"loss": None, "z": one, "heads": {"y": two, "a": (three, {"deep": four})}}


@pytest.mark.slow
def test_nested_outputs_keep_their_names(tmp_path: Path) -> None:
    import onnxruntime

    model, path = Nested().eval(), tmp_path / "network.onnx"
    secateur.export(model, path, IMAGES[:1])
    session = onnxruntime.InferenceSession(path)
    names = [each.name for each in session.get_outputs()]
    assert names == ["z", "heads.y", "heads.a.0", "heads.a.1.deep"]
    for found, layer in zip(session.run(None, {"input": IMAGES.numpy()}), model.layers, strict=True):
        torch.testing.assert_close(torch.from_numpy(found), layer(IMAGES).detach(), rtol=1e-4, atol=1e-5)
