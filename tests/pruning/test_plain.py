"""A network with gates is repaired as a plain one is, and takes the weights back."""

import pytest
import torch
import torch.nn.functional as F
from small import batches, prepared, states
from torch import Tensor, nn

from secateur import Budget, Pruner, repair
from secateur.pruning.plain import plain_copy

LAYERS = "inner", "outer", "bare", "hidden", "last"
IMAGES = [images for images, _ in batches(6)]


def scored(net: nn.Module) -> Pruner:
    """Gates of every kind, away from their first values, with a score."""
    _, graph, _ = prepared()
    pruner = Pruner(net, graph=graph)
    with torch.no_grad():
        for phi in pruner.gates.phis:
            phi.mul_(torch.linspace(0.5, 1.5, phi.numel(), dtype=phi.dtype))
    pruner.model.eval()
    for images, labels in batches():
        F.cross_entropy(pruner.model(images), labels).backward()
        pruner.observe()
    return pruner


def output(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(torch.cat(IMAGES))


@pytest.mark.parametrize("cut", [True, False])
def test_gates_and_masks_are_repaired_as_the_plain_network_is(cut: bool) -> None:
    pruner = scored(prepared()[0])
    before = plain_copy(pruner.gates)
    torch.testing.assert_close(output(before), output(pruner.model))
    pruner.prune(budget=Budget(macs=0.5), cut=cut, repair=IMAGES)
    wanted = output(repair(before, pruner.plan, IMAGES))
    torch.testing.assert_close(output(pruner.model), wanted)
    torch.testing.assert_close(output(plain_copy(pruner.gates)), wanted)
    torch.testing.assert_close(output(pruner.finish()), wanted)


def test_the_whole_network_is_the_reference_over_several_removals() -> None:
    torch.manual_seed(0)
    whole = prepared()[0].eval()
    wanted = output(whole)
    errors = []
    for options in ({}, {"repair": IMAGES}, {"repair": IMAGES, "reference": whole}):
        pruner = Pruner(prepared()[0], graph=prepared()[1], score="l2")
        for share in (0.8, 0.6, 0.4):
            pruner.prune(budget=Budget(macs=share), **options)
        errors.append(float((output(pruner.finish()) - wanted).norm() / wanted.norm()))
    assert errors[2] < errors[1] < errors[0]


def test_momentum_and_gates_stay_and_filters_without_a_gate_too() -> None:
    pruner = scored(prepared()[0])
    optimizer = torch.optim.SGD(pruner.model.parameters(), lr=0.01, momentum=0.9)
    optimizer.step()
    bare = next(module for module in pruner.gates.modules if module is pruner.model.bare)
    with torch.no_grad():
        bare.gate_phi[3] = 0  # a filter that a gate has switched off, but that is not removed yet
    before = states(pruner.model)
    momentum = {id(p): state["momentum_buffer"].clone() for p, state in optimizer.state.items() if state}
    assert len(momentum) > 5
    pruner.prune(0.2, optimizer=optimizer, cut=False, repair=IMAGES)
    after = states(pruner.model)
    changed = {name for name in after if not torch.equal(after[name], before[name]) and "mask" not in name}
    assert {"outer.weight", "bare.weight"} <= changed <= {f"{name}.weight" for name in LAYERS}
    assert torch.equal(after["bare.weight"][3], before["bare.weight"][3])
    assert all(torch.equal(state["momentum_buffer"], momentum[id(p)]) for p, state in optimizer.state.items() if state)
