"""Gates through a whole life, for networks of every family: insert, train, score, mask, cut, train, cut, merge."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import secateur
from secateur import Pruner
from secateur.channels.example import Example, tensors_within
from secateur.channels.gaps import gaps_between
from secateur.channels.rehearsal import run
from secateur.models.lookup import find_model

TOLERANCE = 1e-9


class Autoencoder(nn.Module):
    """Transposed convolutions, one with a batch norm and one without."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 12, 3, 2, 1))
        self.up1, self.norm = nn.ConvTranspose2d(12, 8, 2, 2), nn.BatchNorm2d(8, affine=False)
        self.up2, self.head = nn.ConvTranspose2d(8, 6, 2, 2), nn.Conv2d(6, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.elu(self.up2(F.relu(self.norm(self.up1(F.relu(self.down(x))))))))


class Volume(nn.Module):
    """Three dimensions, then one, then none."""

    def __init__(self) -> None:
        super().__init__()
        self.solid, self.norm3 = nn.Conv3d(1, 6, 3, padding=1), nn.BatchNorm3d(6)
        self.line, self.norm1 = nn.Conv1d(6, 8, 3), nn.BatchNorm1d(8)
        self.hidden, self.norm0, self.head = nn.Linear(8, 10), nn.BatchNorm1d(10), nn.Linear(10, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm3(self.solid(x[:, None])))
        x = F.relu(self.norm1(self.line(x.mean((3, 4)))))
        return self.head(F.relu(self.norm0(self.hidden(x.amax(2)))))


class Excited(nn.Module):
    """Depthwise, grouped and shuffled channels, and a squeeze-excite."""

    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(3, 12, 1), nn.BatchNorm2d(12), nn.Hardswish())
        self.depth = nn.Conv2d(12, 12, 3, padding=1, groups=12)
        self.squeeze, self.excite = nn.Conv2d(12, 4, 1), nn.Conv2d(4, 12, 1)
        self.group, self.norm = nn.Conv2d(12, 12, 3, padding=1, groups=2), nn.BatchNorm2d(12)
        self.shuffle, self.head = nn.ChannelShuffle(2), nn.Conv2d(12, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.depth(self.expand(x))
        x = x * self.excite(F.relu(self.squeeze(x.mean((2, 3), keepdim=True)))).sigmoid()
        return self.head(self.shuffle(F.relu(self.norm(self.group(x)))))


BY_HAND: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "autoencoder": (Autoencoder, (3, 8, 8)),
    "volume": (Volume, (6, 6, 6)),
    "excited": (Excited, (3, 8, 8)),
}
QUICK: dict[str, dict[str, Any]] = {
    "torchvision:mobilenet_v3_small": {"width_mult": 0.5},
    "torchvision.models:DenseNet": {"growth_rate": 8, "block_config": (2, 3), "num_init_features": 16},
}
SLOW: dict[str, dict[str, Any]] = {
    "resnet20": {},
    "torchvision:resnet18": {},
    "torchvision:mobilenet_v2": {"width_mult": 0.25},
    "torchvision:shufflenet_v2_x0_5": {},
    "torchvision:squeezenet1_1": {},
    "torchvision:regnet_y_400mf": {},
    "torchvision.models:MNASNet": {"alpha": 0.25},
    "timm:resnet10t": {},
    "timm:lcnet_035": {},
    "timm:resnetblur18": {},
    "timm:mobilenetv4_conv_small_035": {},
    "timm:dla46x_c": {},
    "timm:seresnet18": {},
    "timm:skresnet18": {},
    "timm:mobilevit_xxs": {},
    "timm:ghostnet_050": {"drop_rate": 0.0},
    "timm:edgenext_xx_small": {},
}


def build(name: str) -> tuple[nn.Module, Tensor]:
    """The network in double precision with norms that do something, and a batch for it."""
    torch.manual_seed(0)
    maker, shape = BY_HAND.get(name) or (partial(find_model, name, **{**QUICK, **SLOW}[name]), (3, 32, 32))
    model = maker()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine:
            nn.init.uniform_(module.weight, -0.2, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
            module.bias.data[0] = 15 * module.weight.data[0]
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return model.double(), torch.randn(4, *shape, dtype=torch.float64)


def assert_same(expected: nn.Module, got: nn.Module, images: Tensor) -> None:
    for mode in ("eval", "train"):
        outcomes = [run(model, Example.of(images), mode).outputs for model in (expected, got)]
        assert max((gap.relative for gap in gaps_between(*outcomes) or []), default=0.0) <= TOLERANCE, mode


def step(model: nn.Module, pruner: Pruner, optimizer: torch.optim.Optimizer, images: Tensor) -> Tensor:
    """A training step; the loss is given back, and lives on with what autograd noted for it."""
    model.train()
    optimizer.zero_grad()
    loss = torch.stack([tensor.square().mean() for tensor in tensors_within(model(images))]).sum()
    loss.backward()
    pruner.observe()
    pruner.add_l1_(1e-4)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return loss


@pytest.mark.parametrize("name", [*BY_HAND, *QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_whole_life(name: str) -> None:
    model, images = build(name)
    graph = secateur.analyze(model, images[:1], probe=name in SLOW)  # some keep widths in attributes
    plain = copy.deepcopy(model)
    pruner = Pruner(model, graph=graph)
    assert_same(plain, model, images)

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    losses = [step(model, pruner, optimizer, images) for _ in range(2)]
    pruner.prune(fraction=0.2, cut=False)
    assert not any(pruner.gates.loose(group) for group in graph.groups)
    masked = copy.deepcopy(model)
    pruner.cut_(optimizer)
    assert_same(masked, model, images)

    losses.append(step(model, pruner, optimizer, images))
    pruner.prune(fraction=0.2, optimizer=optimizer)
    losses.append(step(model, pruner, optimizer, images))
    assert all(bool(loss.isfinite()) for loss in losses)

    gated = copy.deepcopy(model)
    merged = pruner.finish()
    assert merged is model
    assert_same(gated, merged, images)
    small = secateur.shrink(plain, pruner.plan)
    assert [type(m) for m in merged.modules()] == [type(m) for m in plain.modules()]
    assert shapes(merged) == shapes(small)
    assert shapes(merged) != shapes(plain)
    assert str(merged) == str(small)
    assert [p.requires_grad for p in merged.parameters()] == [p.requires_grad for p in plain.parameters()]
    assert sum(p.numel() for p in merged.parameters()) == pruner.cost.params


def shapes(model: nn.Module) -> list[tuple[str, torch.Size, torch.dtype]]:
    return [(name, tensor.shape, tensor.dtype) for name, tensor in model.state_dict().items()]
