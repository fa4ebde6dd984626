"""Networks that take several tensors, timed and exported on the example of their job."""

from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import secateur
from secateur.channels.example import Example
from secateur.errors import InvalidModel
from secateur.results.bench import bench
from secateur.results.export import export_onnx, export_program, export_torchscript, fold_batchnorm
from secateur.results.network import open_network


class Conditioned(nn.Module):
    """A clip, and numbers and a kind of it that scale its channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU())
        self.scale, self.kind = nn.Linear(5, 8), nn.Embedding(4, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, clip: Tensor, about: Tensor, kind: Tensor) -> Tensor:
        scale = self.scale(about) + self.kind(kind)
        return self.last((self.stem(clip) * scale[:, :, None, None, None]).mean((2, 3, 4)))


CLIP, ABOUT, KIND = torch.randn(1, 1, 4, 8, 8), torch.randn(1, 5), torch.tensor([2])
EXAMPLES = {"by place": (CLIP, ABOUT, KIND), "by name": {"kind": KIND, "about": ABOUT, "clip": CLIP}}
OPTIONS = {"batch": 2, "shape": None, "precision": "fp32", "channels_last": True, "repetitions": 2}


def job() -> secateur.Job:
    example = EXAMPLES["by name"]
    return secateur.Job(Conditioned(), example, secateur.Task([example], lambda model, batch: model(**batch).sum()))


def lists() -> secateur.Job:
    """Of a network that takes a list, of which nobody knows which axis is the batch."""
    return secateur.Job(nn.Identity(), ([CLIP],), job().task)


@pytest.fixture
def saved(tmp_path: Path) -> str:
    made = job()
    graph = secateur.analyze(made.model, made.example)
    plan = secateur.Plan.random(graph, 0.4)
    result = secateur.Result(
        model=secateur.shrink(made.model, plan), plan=plan, settings=secateur.TickTock.of(keep_macs=0.5), history=()
    )
    return str(secateur.save(result, tmp_path / "result"))


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
@pytest.mark.parametrize("export", [export_program, export_torchscript])
def test_exported_and_compared(export: Any, example: Any, tmp_path: Path) -> None:
    assert export(Conditioned(), example, tmp_path / "network") < 1e-5


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
def test_onnx_takes_batches_of_any_size_under_the_names_of_the_arguments(example: Any, tmp_path: Path) -> None:
    model = Conditioned().eval()
    assert export_onnx(model, example, tmp_path / "network.onnx") < 1e-5
    session = onnxruntime.InferenceSession(tmp_path / "network.onnx", providers=["CPUExecutionProvider"])
    batch = {"clip": torch.randn(5, 1, 4, 8, 8), "about": torch.randn(5, 5), "kind": torch.arange(5) % 4}
    (found,) = session.run(None, {name: tensor.numpy() for name, tensor in batch.items()})
    assert torch.allclose(torch.from_numpy(found), model(**batch), atol=1e-5)


def test_batch_norms_are_folded() -> None:
    assert fold_batchnorm(Conditioned(), EXAMPLES["by name"])[1] == 1


@pytest.mark.parametrize("how", ["eager", "onnxruntime"])
def test_timed_side_by_side(how: str, saved: str) -> None:
    names = [f"{__name__}:job", saved]
    timings, _ = bench(names, how=how, device=torch.device("cpu"), build=names[0], **OPTIONS)  # pyright: ignore
    assert timings[1].macs < timings[0].macs


def test_without_a_job_the_error_asks_for_one(saved: str) -> None:
    with pytest.raises(InvalidModel) as caught:
        open_network(saved, f"{__name__}:Conditioned")
    assert "secateur.Job" in str(caught.value.remedy)
    with pytest.raises(InvalidModel):
        open_network(f"{__name__}:lists")


def test_a_batch_of_an_example() -> None:
    call = Example.of((ABOUT, KIND, torch.ones(3), torch.tensor(2.0)))
    assert [tuple(t.shape) for t in call.batch(4).tensors] == [(4, 5), (4,), (3,), ()]
    assert torch.equal(call.batch(2).tensors[0], ABOUT.expand(2, 5))
    drawn = call.batch(2, torch.Generator().manual_seed(0)).tensors
    assert not torch.equal(drawn[0][0], drawn[0][1])
    assert torch.equal(drawn[1], torch.tensor([2, 2]))
