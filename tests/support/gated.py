"""Small networks with gates for the tests, and what is asked of them again and again."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import secateur
from secateur import ChannelGraph
from secateur.pruning.gates import Gates

IMAGE = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def network(seed: int = 0) -> nn.Sequential:
    """A batch norm, a filter without one, and a batch norm without parameters."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 6, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(6, 6, 1, bias=False),
        nn.BatchNorm2d(6, affine=False),
        nn.ReLU(),
        nn.Conv2d(6, 2, 1),
    )
    nn.init.normal_(model[1].weight)
    nn.init.normal_(model[1].bias)
    return model


def gate(model: nn.Module, example: Any = IMAGE, probe: bool = True) -> Gates:
    tensor = next(model.parameters())
    if isinstance(example, Tensor):
        example = example.to(tensor.dtype)
    return secateur.insert_gates_(model, secateur.analyze(model, example, probe=probe))


def drop_odd(graph: ChannelGraph) -> Tensor:
    """Every second channel of every group goes."""
    kept = graph.all_kept()
    for group in graph.groups:
        kept[group.start + 1 : group.start + group.size : 2] = False
    return kept


def effective(module: nn.Module) -> list[Tensor]:
    """Weight and bias as the module computes with them."""
    return [module.weight.detach().clone(), module.bias.detach().clone()]


def count_ulps(old: Tensor, new: Tensor) -> Tensor:
    """How far apart, in units of the last place of the old value."""
    exponent = old.double().abs().clamp_min(torch.finfo(old.dtype).smallest_normal).log2().floor()
    return (old.double() - new.double()).abs() / (torch.exp2(exponent) * torch.finfo(old.dtype).eps)


def state_of(model: nn.Module) -> list[tuple[Any, ...]]:
    """Names, kinds and values of everything in the model."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    hooks = [type(m) for m in model.modules()], [len(m._forward_hooks) for m in model.modules()]
    keys = list(model.state_dict())
    return [(keys, hooks, n, t.dtype, t.shape, t.requires_grad, t.detach().clone()) for n, t in tensors.items()]


class Custom(nn.Module):
    """A forward function over named parts."""

    def __init__(self, forward: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)
