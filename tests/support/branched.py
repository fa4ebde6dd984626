"""What tests of branches share: a picture, weights that hide nothing, and addends of zeros."""

import copy

import torch
from torch import Tensor, nn

from secateur import ChannelGraph
from secateur.channels.subject import perturb_

PICTURE = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def names(graph: ChannelGraph) -> list[str]:
    return [each.name for each in graph.branches]


def scrambled(model: nn.Module) -> nn.Module:
    """With noise on all that is zero or one, so that nothing hides a difference."""
    perturb_(model)
    return model


def zeroed(model: nn.Module, graph: ChannelGraph, name: str, x: Tensor) -> Tensor:
    """What the model computes with the output of the addend's module replaced by zeros."""
    addend = graph.branch(name).addend
    assert addend is not None
    work = copy.deepcopy(model)
    work.get_submodule(addend).register_forward_hook(lambda module, args, output: torch.zeros_like(output))
    return work(x)
