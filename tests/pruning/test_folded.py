"""Gates of all norms folded in together do what autograd does one by one."""

import copy

import torch
from gated import IMAGE, gate, network
from torch import nn

from secateur.pruning.folded import Folded


def test_gradients_are_those_of_autograd() -> None:
    model = network().double()
    gates = gate(model)
    gates.mask_(torch.arange(gates.graph.num_channels) % 3 > 0)
    other = copy.deepcopy(model)
    images = IMAGE.double()
    other(images).square().sum().backward()
    folded = Folded(gates)
    with folded.in_use():
        folded.prepare()
        out = model(images)
        out.square().sum().backward()
        folded.collect()
    torch.testing.assert_close(out, copy.deepcopy(other)(images))
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        if mine.requires_grad:
            torch.testing.assert_close(mine.grad, theirs.grad, msg=name)


def test_nothing_stays_and_other_gates_are_left_to_autograd() -> None:
    model = network()
    gates = gate(model)
    folded = Folded(gates)
    assert len(folded.modules) == 1  # neither the filter nor the norm without parameters
    with folded.in_use():
        assert model[1].weight is folded.made[0][0]
    assert model[1].weight is not folded.made[0][0]
    assert "gate_ready" not in vars(model[1])


def test_a_norm_that_is_not_reached_has_no_gradient() -> None:
    model = network()
    folded = Folded(gate(model))
    with folded.in_use():
        folded.prepare()
        folded.collect()
    assert isinstance(model[1], nn.BatchNorm2d)
    assert model[1].gate_phi.grad is None
