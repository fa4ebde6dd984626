"""`secateur export --int8`."""

import json
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from secateur import cli

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `tiny_job`, pruned without training."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    cli.main(["prune", "tiny_job:build", "--keep-macs", "0.7", "--no-train", "--out", str(folder), "--quiet"])
    return folder


def test_a_run_knows_its_data(secateur: Call, run: Path, tmp_path: Path) -> None:
    path = tmp_path / "network.onnx"
    given = ("export", run, "--onnx", path, "--int8", "--int8-images", 20)
    status, out, _ = secateur(*given, "--json")
    found = json.loads(out)
    assert (status, found["path"], found["images"]) == (0, str(path), 20)
    summary = json.loads((run / "result" / "summary.json").read_text())
    assert found["before"]["accuracy"] == pytest.approx(summary["after"]["metrics"]["accuracy"], abs=1e-6)
    assert any(node.op_type == "QuantizeLinear" for node in onnx.load(path).graph.node)
    status, out, _ = secateur(*given)
    assert status == 0
    assert out.splitlines()[0].split() == ["before", "INT8"]
    assert out.splitlines()[-1] == f"onnx in INT8: {path}"


@pytest.mark.parametrize("named", ["tiny_job:build={}", "tiny_job:build={}/result/model.safetensors"])
def test_a_network_with_weights(secateur: Call, run: Path, tmp_path: Path, named: str) -> None:
    given = ("--onnx", tmp_path / "network.onnx", "--int8", "--json")
    status, out, err = secateur("export", named.format(run), *given)
    if "model.safetensors" in named:  # of a smaller network than the job's
        assert (status, out) == (2, ""), err
    else:
        assert (status, json.loads(out)["images"]) == (0, 64)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["resnet20", "--onnx", "a.onnx"], "resnet56@cifar10=baseline.pth"),
        (["resnet20@cifar10", "--onnx", "a.onnx"], "resnet20@cifar10=FILE"),
        (["resnet20@cifar10=nowhere", "--onnx", "a.onnx"], "--data FOLDER"),
        (["tiny_job:build", "--pt2", "a.pt2"], "--onnx FILE"),
        (["tiny_job:build", "--onnx", "a.onnx", "--openvino", "a.xml"], "ONNX alone"),
        (["tiny_job:build", "--onnx", "a.onnx", "--int8-images", "0"], "1 or more"),
    ],
)
def test_a_mistake_is_one_line(
    secateur: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], word: str
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = secateur("export", *arguments, "--int8")
    lines = [line for line in err.splitlines() if not line.startswith("quantising ")]
    assert (status, out, len(lines)) == (2, "", 1), err
    assert word in lines[0]
    assert not list(tmp_path.iterdir())
