"""Gates beside what else people do with models: optimizers, averages, compilation, export."""

import copy
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gated import IMAGE, drop_odd, gate, network
from torch import nn
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel

from secateur import merge_gates_
from secateur.pruning.gates import Gates

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "foreach adamw": lambda p: torch.optim.AdamW(p, foreach=True),
    "fused adamw": lambda p: torch.optim.AdamW(p, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "asgd": lambda p: torch.optim.ASGD(p),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_go_on_after_a_cut(name: str) -> None:
    """With a schedule, and with losses of earlier steps still alive."""
    model = network()
    gates = gate(model)
    optimizer = OPTIMIZERS[name](model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    losses = []
    for number in range(4):
        optimizer.zero_grad()
        losses.append(model(IMAGE).square().mean())
        losses[-1].backward()
        if number == 1:
            gates.cut_(drop_odd(gates.graph), optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    for parameter, state in optimizer.state.items():
        assert all(v.shape == parameter.shape for k, v in state.items() if k in ("momentum_buffer", "exp_avg"))
    assert all(bool(loss.isfinite()) for loss in losses)


@pytest.mark.parametrize("name", ["sgd", "adam", "foreach adamw", "rmsprop"])
def test_masked_and_cut_train_alike(name: str) -> None:
    """What an optimizer does to a removed channel does not come back."""
    masked = network().double()
    gates = gate(masked)
    optimizer = OPTIMIZERS[name](masked.parameters())
    train(masked, optimizer, 2)
    kept = drop_odd(gates.graph)
    cut, its_optimizer = copy.deepcopy((masked, optimizer))
    Gates(cut, gates.whole).cut_(kept, its_optimizer)
    gates.mask_(kept)
    train(masked, optimizer, 3)
    train(cut, its_optimizer, 3)
    torch.testing.assert_close(masked.eval()(IMAGE.double()), cut.eval()(IMAGE.double()), rtol=1e-9, atol=1e-12)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(IMAGE.double()).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()


def test_functional_calls() -> None:
    model = network()
    gate(model)
    model.eval()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    torch.testing.assert_close(functional_call(model, parameters, (IMAGE,)), model(IMAGE))
    gradients = torch.func.grad(lambda p: functional_call(model, p, (IMAGE,)).square().mean())(parameters)
    assert all(bool((gradients[f"{index}.gate_phi"] != 0).any()) for index in (1, 3, 6))
    halved = {**parameters, "1.gate_phi": parameters["1.gate_phi"] / 2}
    assert not torch.equal(functional_call(model, halved, (IMAGE,)), model(IMAGE))


def test_averages_of_gated_models() -> None:
    model = network()
    gates = gate(model)
    average = AveragedModel(model)
    average.update_parameters(model)
    torch.testing.assert_close(average.eval()(IMAGE), model.eval()(IMAGE))
    gates.mask_(drop_odd(gates.graph))
    assert bool(average.module[1].gate_mask.all())


@pytest.mark.parametrize("assign", [False, True])
def test_states_are_loaded(assign: bool) -> None:
    model, other = network(), network(seed=1)
    gates, _ = gate(model), gate(other)
    other.load_state_dict(model.state_dict(), assign=assign)
    assert torch.equal(other.eval()(IMAGE), model.eval()(IMAGE))
    assert not other[1]._parameters["weight"].requires_grad
    assert [name for name in model.state_dict() if "gate" in name] == [
        f"{site.module}.{part}" for site in gates.whole.sites[:1] for part in ("gate_phi", "gate_mask")
    ] + ["3.gate_phi", "3.gate_mask", "6.gate_phi", "6.gate_mask"]


def test_traced_and_exported() -> None:
    model = network()
    gate(model)
    model.eval()
    expected = model(IMAGE)
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(IMAGE), expected)
    torch.testing.assert_close(torch.export.export(model, (IMAGE,)).module()(IMAGE), expected)
    with torch.inference_mode():
        torch.testing.assert_close(model(IMAGE), expected)


@pytest.mark.parametrize(
    "setting", ["set_swap_module_params_on_conversion", "set_overwrite_module_params_on_conversion"]
)
def test_ways_of_torch_to_change_types(setting: str) -> None:
    change: Any = getattr(torch.__future__, setting)
    model = network()
    gate(model)
    change(True)
    try:
        model.half().share_memory()
    finally:
        change(False)
    assert model[1].gate_phi.dtype == model[1]._parameters["bias"].dtype == torch.float32
    assert model[1].weight.dtype == model[3].weight.dtype == torch.float16


def test_old_losses_live_on_through_everything() -> None:
    model = network().bfloat16()
    image = IMAGE.bfloat16()
    kept_alive = [model(image).sum()]
    gates = gate(model)
    for change in (lambda: None, lambda: gates.cut_(drop_odd(gates.graph)), lambda: merge_gates_(model)):
        change()
        kept_alive.append(model(image).sum())
        kept_alive[-1].backward()
    assert all(p.grad.shape == p.shape and p.grad.dtype == p.dtype for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_leaves_phi_in_single_precision(dtype: torch.dtype) -> None:
    model = network()
    gates = gate(model)
    with torch.autocast("cpu", dtype):
        loss = model(IMAGE).float().square().mean()
    loss.backward()
    for phi in gates.phis:
        assert phi.dtype == phi.grad.dtype == torch.float32
        assert bool((phi.grad != 0).any())


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_compiled(backend: str) -> None:
    model = network()
    gates = gate(model)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    compiled(IMAGE).square().mean().backward()
    assert all(phi.grad is not None for phi in gates.phis)
    model.eval()
    kept = drop_odd(gates.graph)
    for change in (lambda: None, lambda: gates.mask_(kept), lambda: gates.cut_(kept), lambda: merge_gates_(model)):
        change()
        torch.testing.assert_close(compiled(IMAGE), model(IMAGE))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_to_machine_code() -> None:
    model = network()
    gates = gate(model)
    compiled = torch.compile(model, fullgraph=True)
    compiled(IMAGE).square().mean().backward()
    assert all(bool((phi.grad != 0).any()) for phi in gates.phis)
    model.eval()
    torch.testing.assert_close(compiled(IMAGE), model(IMAGE))


def test_errors_of_torch_are_loud() -> None:
    """What cannot work with gates must not fail in silence."""
    model = network()
    gate(model)
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(network().state_dict())
    with pytest.raises(TypeError, match="cannot assign"):
        nn.SyncBatchNorm.convert_sync_batchnorm(model)


def test_group_norm_behind_frozen_layers_with_channels_last() -> None:
    """Which crashes in torch on a CPU."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.ReLU(), nn.Conv2d(8, 2, 1))
    gate(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("gate_phi"))
    gradients = []
    for layout in (torch.contiguous_format, torch.channels_last):
        model.zero_grad()
        model(IMAGE.float().to(memory_format=layout)).square().sum().backward()
        gradients.append(model.get_parameter("1.gate_phi").grad)
    torch.testing.assert_close(*gradients)
