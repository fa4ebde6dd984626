"""Where gates sit: on every batch norm that sees a removable channel, and on filters that reach a consumer without."""

import copy

import pytest
import torch
import torch.nn.functional as F
from gated import IMAGE, Custom, drop_odd, gate
from torch import Tensor, nn

import secateur
from secateur import ChannelGraph, Gates, Plan
from secateur.channels.verify import mask_
from secateur.pruning.selection import Limits


def conv(inner: int, outer: int, kernel: int = 1, **options: object) -> nn.Conv2d:
    return nn.Conv2d(inner, outer, kernel, **options)


def check(
    model: nn.Module, expected: set[str], example: Tensor = IMAGE, modes: tuple[str, ...] = ("eval", "train")
) -> Gates:
    """The modules with gates are these; the function stays, and masks, cuts and zeros by hand agree."""
    model = model.double()
    for norm in model.modules():
        if isinstance(norm, nn.modules.batchnorm._BatchNorm) and norm.affine:
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
    plain, example = copy.deepcopy(model), example.double()
    gates = gate(model, example)
    assert {site.module for site in gates.whole.sites} == expected
    assert_same(plain, model, example, modes)
    assert all(float(gradient.abs().max()) > 1e-3 for gradient in gradients(model, gates, example, modes[-1]))
    kept = drop_odd(gates.graph)
    for group in gates.graph.groups:
        kept[group.span] |= group.name in gates.graph.ungated
    mask_(plain, Plan(gates.whole, kept))
    gates.mask_(kept)
    assert_same(plain, model, example, modes)
    gates.cut_(kept)
    assert_same(plain, model, example, modes)
    return gates


def gradients(model: nn.Module, gates: Gates, example: Tensor, mode: str) -> list[Tensor]:
    """Of every gate, for a loss that no symmetry makes zero."""
    twin = copy.deepcopy(model).train(mode == "train")
    out = twin(example)
    (out * torch.arange(out.numel()).view_as(out)).square().sum().backward()
    return [module.gate_phi.grad for module in Gates(twin, gates.whole).modules]


def assert_same(model: nn.Module, other: nn.Module, example: Tensor, modes: tuple[str, ...]) -> None:
    for mode in modes:
        a, b = (copy.deepcopy(m).train(mode == "train")(example) for m in (model, other))
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-9)


def graph_of(model: nn.Module) -> ChannelGraph:
    return secateur.analyze(model, IMAGE)


def test_behind_a_norm_a_filter_has_no_gate() -> None:
    check(nn.Sequential(conv(3, 8), nn.BatchNorm2d(8), nn.ReLU(), conv(8, 2)), {"1"})


def test_a_filter_without_norm_has_its_own() -> None:
    check(nn.Sequential(conv(3, 8), nn.ELU(), conv(8, 6, bias=False), nn.Tanh(), conv(6, 2)), {"0", "2"})


def test_linear_and_transposed() -> None:
    layers = [nn.ConvTranspose2d(3, 6, 2), nn.ReLU(), nn.ConvTranspose2d(6, 8, 2, bias=False), nn.ReLU()]
    check(
        nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5), nn.SiLU(), nn.Linear(5, 2)),
        {"0", "2", "6"},
    )


def test_depthwise_and_grouped() -> None:
    """A depthwise filter that has a bias is a way of its own; so is a grouped one."""
    model = nn.Sequential(
        conv(3, 8), nn.ReLU(), conv(8, 8, 3, groups=8), nn.ReLU(), conv(8, 8, groups=2), nn.ReLU(), conv(8, 2)
    )
    check(model, {"0", "2", "4"})


def test_depthwise_between_filter_and_norm() -> None:
    check(nn.Sequential(conv(3, 8), conv(8, 8, 3, groups=8), nn.BatchNorm2d(8), nn.ReLU(), conv(8, 2)), {"2"})


def test_norms_of_every_dimension() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        x = F.relu(m.norm3(m.solid(x[:, :, None]))).squeeze(2)
        x = F.relu(m.norm1(m.line(x.flatten(2)))).mean(2)
        return m.head(F.relu(m.norm0(m.hidden(x))))

    model = Custom(
        forward, solid=nn.Conv3d(3, 6, 1), norm3=nn.BatchNorm3d(6), line=nn.Conv1d(6, 8, 3), norm1=nn.BatchNorm1d(8),
        hidden=nn.Linear(8, 6), norm0=nn.BatchNorm1d(6), head=nn.Linear(6, 2),
    )  # fmt: skip
    check(model, {"norm3", "norm1", "norm0"})


def test_synchronised_norm() -> None:
    """Torch runs it on a GPU only, but for evaluation mode."""
    model = nn.Sequential(conv(3, 8), nn.SyncBatchNorm(8), nn.ReLU(), conv(8, 2))
    gates = check(model, {"1"}, modes=("eval",))
    assert isinstance(gates.modules[0], nn.SyncBatchNorm)
    assert type(secateur.merge_gates_(model)[1]) is nn.SyncBatchNorm


def test_several_norms_behind_one_filter() -> None:
    model = Custom(
        lambda m, x: (lambda y: m.head(F.relu(m.norm1(y)) + F.elu(m.norm2(y))))(m.conv(x)),
        conv=conv(3, 8), norm1=nn.BatchNorm2d(8), norm2=nn.BatchNorm2d(8), head=conv(8, 2),
    )  # fmt: skip
    gates = check(model, {"norm1", "norm2"})
    assert torch.equal(gates.whole.sites[0].channels, gates.whole.sites[1].channels)


def test_norm_behind_concatenation() -> None:
    model = Custom(
        lambda m, x: m.head(F.relu(m.norm(torch.cat([m.one(x), x, m.two(x)], 1)))),
        one=conv(3, 4), two=conv(3, 6), norm=nn.BatchNorm2d(13), head=conv(13, 2),
    )  # fmt: skip
    gates = check(model, {"norm"})
    assert (gates.whole.sites[0].channels >= 0).tolist() == [True] * 4 + [False] * 3 + [True] * 6


def test_pre_activation() -> None:
    """The sum reaches the head without a norm: what makes it is gated, and the norms beside."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        x = m.stem(x)
        return m.head(x + m.conv2(F.relu(m.norm2(m.conv1(F.relu(m.norm1(x)))))))

    model = Custom(
        forward, stem=conv(3, 8), norm1=nn.BatchNorm2d(8), conv1=conv(8, 6), norm2=nn.BatchNorm2d(6), conv2=conv(6, 8),
        head=conv(8, 2),
    )  # fmt: skip
    check(model, {"stem", "norm1", "norm2", "conv2"})


def test_one_way_with_a_norm_and_one_without() -> None:
    model = Custom(
        lambda m, x: (lambda y: m.head(F.relu(m.norm(y))) + m.other(y))(m.conv(x)),
        conv=conv(3, 8), norm=nn.BatchNorm2d(8), head=conv(8, 2), other=conv(8, 2),
    )  # fmt: skip
    check(model, {"conv", "norm"})


def test_squeeze_excite() -> None:
    """The layer behind the sigmoid needs no gate: what it scales is zero."""
    model = Custom(
        lambda m, x: (lambda y: m.head(y * m.up(F.relu(m.down(y.mean((2, 3), keepdim=True)))).sigmoid()))(
            F.relu(m.norm(m.conv(x)))
        ),
        conv=conv(3, 8), norm=nn.BatchNorm2d(8), down=conv(8, 4), up=conv(4, 8), head=conv(8, 2),
    )  # fmt: skip
    check(model, {"norm", "down"})


def test_shared_module() -> None:
    block = nn.Sequential(conv(8, 8), nn.BatchNorm2d(8), nn.ReLU(), conv(8, 8), nn.ReLU())
    parts = {"stem": nn.Sequential(conv(3, 8), nn.ReLU()), "block": block, "head": conv(8, 2)}
    model = Custom(lambda m, x: m.head(m.block(m.block(m.stem(x)))), **parts)
    check(model, {"stem.0", "block.1", "block.3"})


def test_tied_weights_stay_whole() -> None:
    model = Custom(
        lambda m, x: m.head(F.relu(m.two(F.relu(m.one(F.relu(m.stem(x))))))),
        stem=conv(3, 8), one=conv(8, 8), two=conv(8, 8), head=conv(8, 2),
    )  # fmt: skip
    model.two.weight = model.one.weight
    graph = graph_of(model)
    assert set(graph.ungated.values()) == {"has weights that another module has too"}
    for group, floor in zip(graph.groups, Limits().floors(graph).tolist(), strict=True):
        assert (floor == group.size) == (group.name in graph.ungated)


class Scaled(nn.Conv2d):
    """Its weights are computed."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight * 2, self.bias)


@pytest.mark.parametrize("normed", [False, True])
def test_computed_weights_need_a_norm(normed: bool) -> None:
    model = nn.Sequential(
        Scaled(3, 8, 1), nn.BatchNorm2d(8) if normed else nn.Identity(), nn.ReLU(), conv(8, 6), nn.ELU(), conv(6, 2)
    )
    gates = check(model, {"1", "3"} if normed else {"3"})
    assert gates.whole.ungated == ({} if normed else {"0": "has weights that are computed from others"})


def test_weight_norm_stays_whole() -> None:
    """Its scale and direction are two parameters: the analysis keeps its channels, so that there is nothing to gate."""
    normed = torch.nn.utils.parametrizations.weight_norm(conv(3, 8))
    graph = graph_of(nn.Sequential(normed, nn.ReLU(), conv(8, 6), nn.ReLU(), conv(6, 2)))
    assert [group.name for group in graph.groups] == ["2"]
    assert {site.module for site in graph.sites} == {"2"}


def test_biases_that_autocast_has_cast_are_still_their_layers() -> None:
    class Cast(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    graph = secateur.analyze(Cast(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 2, 1)), torch.randn(1, 3, 4, 4))
    assert {site.module for site in graph.sites} == {"0"}
    assert graph.ungated == {}


def test_weights_that_a_layer_writes_to_carry_no_gate() -> None:
    class Masked(nn.Conv2d):
        def forward(self, input: Tensor) -> Tensor:
            self.weight.data[:, :, 2:] *= 0
            return super().forward(input)

    gates = check(nn.Sequential(Masked(3, 8, 3), nn.ReLU(), conv(8, 6), nn.ReLU(), conv(6, 2)), {"2"})
    assert gates.whole.ungated == {"0": "has weights that the forward pass writes to"}
