"""Where an optimizer's state goes when it is read back, and what is captured."""

from typing import Any

import pytest
import torch
from torch import nn

from secateur.training.optimizers import KNOWN, can_be_captured, make_optimizer, placed


@pytest.mark.parametrize(("options", "device"), [({"capturable": True}, "meta"), ({}, "cpu")])
def test_a_count_of_steps_is_where_the_kernel_looks_for_it(options: dict[str, Any], device: str) -> None:
    parameter = nn.Parameter(torch.empty(2, 3, device="meta"))
    optimizer = torch.optim.AdamW([parameter], **options)
    assert placed(optimizer, parameter, "step", torch.tensor(7.0)).device.type == device


def test_what_else_there_is_goes_to_the_parameter() -> None:
    parameter = nn.Parameter(torch.empty(2, 3, device="meta"))
    optimizer = torch.optim.Adafactor([parameter])
    assert placed(optimizer, parameter, "row_var", torch.ones(2, 1)).device.type == "meta"
    assert placed(optimizer, parameter, "mu_product", 0.5) == 0.5


def test_what_has_the_parameters_shape_has_its_layout() -> None:
    parameter = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    optimizer = torch.optim.AdamW([parameter])
    read = torch.randn(4, 3, 2, 2)
    found = placed(optimizer, parameter, "exp_avg", read)
    assert torch.equal(found, read)
    assert found.stride() == parameter.stride()


@pytest.mark.parametrize("name", KNOWN)
def test_a_rate_that_is_a_number_is_not_captured(name: str) -> None:
    optimizer = make_optimizer(name, [nn.Parameter(torch.ones(2))], momentum=0.9, nesterov=False, weight_decay=0.0)
    assert not can_be_captured(optimizer)
    optimizer.param_groups[0]["lr"] = torch.zeros(())
    assert can_be_captured(optimizer)
