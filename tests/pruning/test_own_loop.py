"""A loop of one's own: gated models in files and copies, and a loop that is killed."""

import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import own_loop
import pytest
import torch
from gated import IMAGE, drop_odd, gate, network
from killing import Fork, kill, wait_until
from torch import nn

from secateur import InvalidSetting, Pruner, merge_gates_
from secateur.pruning.gated import Gated


def through_a_file(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [through_a_file, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_whole_gated_model_in_a_file_or_copy(copied: Any) -> None:
    """It computes, trains and merges as the first one does, and apart from it."""
    model = network().double()
    gates = gate(model)
    gates.mask_(drop_odd(gates.graph))
    gates.cut_(drop_odd(gates.graph))
    other, image = copied(model), IMAGE.double()
    assert [type(module) for module in other.modules()] == [type(module) for module in model.modules()]
    assert sum(isinstance(module, Gated) for module in other.modules()) == 3
    for each in (model, other):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        each.train()(image).square().mean().backward()
        optimizer.step()
        if each is model:
            changed = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            assert not torch.equal(changed["0.weight"], other.state_dict()["0.weight"])
    assert all(torch.equal(tensor, changed[name]) for name, tensor in other.state_dict().items())
    assert torch.equal(merge_gates_(other).eval()(image), merge_gates_(model).eval()(image))


def test_another_process_reads_a_gated_model(tmp_path: Path) -> None:
    model = network().eval()
    gate(model)
    torch.save({"model": model, "image": IMAGE, "output": model(IMAGE).detach()}, tmp_path / "model.pt")
    code = f"""
import torch
saved = torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)
assert torch.equal(saved["model"](saved["image"]), saved["output"])
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("score", ["apoz", "pcnn", "residual"])
def test_a_copy_is_not_observed(score: str) -> None:
    pruner = Pruner(network(), IMAGE, score=score)
    copies = [copy.deepcopy(pruner.model), through_a_file(pruner.model)]
    before = copy.deepcopy(pruner.score.state())
    for each in copies:
        each(IMAGE).sum().backward()
    assert all(torch.equal(tensor, before[name]) for name, tensor in pruner.score.state().items())
    pruner.model(IMAGE).sum().backward()
    assert not all(torch.equal(tensor, before[name]) for name, tensor in pruner.score.state().items())


def done(folder: Path, score: str, kills: int) -> dict[str, Any]:
    """What the loop leaves, killed so often, each time after another checkpoint."""
    folder.mkdir()
    saved = folder / "saved"
    stamp = lambda: saved.stat().st_mtime_ns if saved.exists() else 0  # noqa: E731
    for _ in range(kills):
        before = stamp()
        process = Fork(folder, [str(folder), score], do=own_loop.main)
        assert wait_until(process, lambda before=before: stamp() != before)
        kill(process)
        assert not (folder / "done").exists()
    process = Fork(folder, [str(folder), score], do=own_loop.main)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return torch.load(folder / "done", weights_only=True)


@pytest.mark.parametrize("score", ["taylor", pytest.param("residual", marks=pytest.mark.slow)])
def test_a_loop_that_is_killed_ends_with_the_same_bits(score: str, tmp_path: Path) -> None:
    whole, killed = done(tmp_path / "whole", score, 0), done(tmp_path / "killed", score, 2)
    assert killed["losses"] == whole["losses"]
    assert list(killed["model"]) == list(whole["model"])
    assert killed["model"]["inner.weight"].shape[0] < 24
    assert all(torch.equal(tensor, whole["model"][name]) for name, tensor in killed["model"].items())


def test_a_state_that_does_not_fit_is_refused() -> None:
    pruner, other = Pruner(network(), IMAGE), Pruner(network(), IMAGE, score="apoz")
    with pytest.raises(InvalidSetting, match="another score"):
        other.load_state_dict(pruner.state_dict())
    state = copy.deepcopy(pruner.state_dict())
    pruner.model(IMAGE).sum().backward()
    pruner.observe()
    pruner.prune(0.3)
    with pytest.raises(InvalidSetting, match="a new Pruner of the whole network"):
        pruner.load_state_dict(state)
    small = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1))
    with pytest.raises(InvalidSetting, match=r"another network: got \d+ channels, wanted 4"):
        Pruner(small, IMAGE).load_state_dict(state)


def test_frozen_layers_stay_as_they_are() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 1), nn.ReLU(), nn.Conv2d(6, 2, 1)
    ).double()
    model[:4].requires_grad_(False)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    images = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    pruner = Pruner(model, images)
    optimizer = torch.optim.SGD(pruner.model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        pruner.model(images).square().mean().backward()
        pruner.observe()
        optimizer.step()
    assert bool((pruner.score.end() > 0).all())
    for name, parameter in pruner.finish().named_parameters():
        same = torch.allclose(parameter, before[name], rtol=1e-12, atol=1e-14)
        assert same == (not name.startswith("5."))
