"""Optimizers by name, where their state goes when it is loaded, and whether a step can be captured."""

from typing import Any

import pytest
import torch
from torch import nn

from secateur import InvalidSetting, Learning
from secateur.training.optimizers import KNOWN, can_be_captured, load_optimizer_state, make_optimizer, optimizer_state


def loaded(kind: Any, tensor: torch.Tensor, state: dict[str, Any], **options: Any) -> dict[str, Any]:
    """What an optimizer of one parameter keeps after it was given this state."""
    model = nn.Module()
    model.weight = nn.Parameter(tensor)
    optimizer = kind([model.weight], **options)
    load_optimizer_state(optimizer, model, {"weight": state})
    assert list(optimizer_state(optimizer, model)) == ["weight"]
    return optimizer.state[model.weight]


@pytest.mark.parametrize(("options", "device"), [({"capturable": True}, "meta"), ({}, "cpu")])
def test_a_count_of_steps_is_where_the_kernel_looks_for_it(options: dict[str, Any], device: str) -> None:
    found = loaded(torch.optim.AdamW, torch.empty(2, 3, device="meta"), {"step": torch.tensor(7.0)}, **options)
    assert found["step"].device.type == device


def test_other_state_goes_to_the_parameter() -> None:
    state = {"row_var": torch.ones(2, 1), "mu_product": 0.5}
    found = loaded(torch.optim.Adafactor, torch.empty(2, 3, device="meta"), state)
    assert found["row_var"].device.type == "meta"
    assert found["mu_product"] == 0.5


def test_state_of_the_parameters_shape_has_its_layout() -> None:
    tensor, read = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last), torch.randn(4, 3, 2, 2)
    found = loaded(torch.optim.AdamW, tensor, {"exp_avg": read})["exp_avg"]
    assert torch.equal(found, read)
    assert found.stride() == tensor.stride()


@pytest.mark.parametrize("name", KNOWN)
def test_every_known_optimizer_is_made_and_is_not_captured_with_a_rate_that_is_a_number(name: str) -> None:
    optimizer = make_optimizer([nn.Parameter(torch.ones(2))], Learning(optimizer=name, nesterov=True))
    assert not can_be_captured(optimizer)
    optimizer.param_groups[0]["lr"] = torch.zeros(())
    assert can_be_captured(optimizer)


def test_nesterov_needs_momentum() -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    for momentum in (0.0, 0.9):
        optimizer = make_optimizer(parameters, Learning(nesterov=True, momentum=momentum))
        assert optimizer.param_groups[0]["nesterov"] == bool(momentum)


@pytest.mark.parametrize("name", ["muon", "lbfgs", "sparseadam", "adamww"])
def test_optimizers_that_do_not_fit(name: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        make_optimizer([nn.Parameter(torch.ones(2))], Learning(optimizer=name))
    assert name in caught.value.what


def test_nothing_to_train() -> None:
    with pytest.raises(InvalidSetting):
        make_optimizer([], Learning())
