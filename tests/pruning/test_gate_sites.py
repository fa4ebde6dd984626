"""Where gates sit: on every batch norm that sees a removable channel, and on filters that reach a consumer without."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from gated import IMAGE, Custom, drop_odd, gate
from torch import Tensor, nn

from secateur import ChannelGraph, InvalidModel, Limits, Plan, analyze, merge_gates_
from secateur.channels.reasons import Kind
from secateur.channels.verify import mask_
from secateur.pruning.gates import Gates


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
    return analyze(model, IMAGE)


def kinds(graph: ChannelGraph) -> dict[str, Kind]:
    """Why groups have no gate."""
    return {name: reason.kind for name, reason in graph.ungated.items()}


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
    assert type(merge_gates_(model)[1]) is nn.SyncBatchNorm


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
    assert {reason.kind for reason in graph.ungated.values()} == {Kind.SHARED_WEIGHT}
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
    assert kinds(gates.whole) == ({} if normed else {"0": Kind.COMPUTED_WEIGHT})


def test_weight_norm_has_no_gate() -> None:
    """Its scale and direction are two parameters: plans can cut its channels, but there is nothing to gate."""
    normed = torch.nn.utils.parametrizations.weight_norm(conv(3, 8))
    graph = graph_of(nn.Sequential(normed, nn.ReLU(), conv(8, 6), nn.ReLU(), conv(6, 2)))
    assert [group.name for group in graph.groups] == ["0", "2"]
    assert {site.module for site in graph.sites} == {"2"}
    assert set(graph.ungated) == {"0"}


def test_biases_that_autocast_has_cast_are_still_their_layers() -> None:
    class Cast(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    graph = analyze(Cast(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 2, 1)), torch.randn(1, 3, 4, 4))
    assert {site.module for site in graph.sites} == {"0"}
    assert graph.ungated == {}


def test_weights_that_a_layer_writes_to_carry_no_gate() -> None:
    class Masked(nn.Conv2d):
        def forward(self, input: Tensor) -> Tensor:
            self.weight.data[:, :, 2:] *= 0
            return super().forward(input)

    gates = check(nn.Sequential(Masked(3, 8, 3), nn.ReLU(), conv(8, 6), nn.ReLU(), conv(6, 2)), {"2"})
    assert kinds(gates.whole) == {"0": Kind.WRITTEN_WEIGHT}


# Norms that take the scale out of a filter, but carry no gate: the filter's own gate would be blind.


def shares_of_score(model: nn.Module, gates: Gates) -> dict[str, float]:
    """By group, the Taylor score relative to the largest; what no gate can feel has next to nothing."""
    out = model.train()(IMAGE)
    (out * torch.arange(out.numel()).view_as(out)).sum().backward()
    products = [m.gate_phi.grad * m.gate_factor().detach() for m in gates.modules]
    score = gates.per_channel(torch.cat(products).abs())
    parts = {g.name: float(score[g.start : g.start + g.size].sum()) for g in gates.graph.groups}
    return {name: part / max(parts.values()) for name, part in parts.items()}


BLIND = {
    "instance": lambda: nn.InstanceNorm2d(8, affine=True),
    "instance without parameters": lambda: nn.InstanceNorm2d(8),
    "group": lambda: nn.GroupNorm(8, 8),
    "groups": lambda: nn.GroupNorm(4, 8),
    "functional": lambda: Custom(lambda m, x: F.batch_norm(x, None, None, training=True)),
    "parametrised": lambda: nn.utils.parametrize.register_parametrization(nn.BatchNorm2d(8), "weight", nn.Identity()),
}


@pytest.mark.parametrize("kind", BLIND)
def test_a_score_behind_every_norm(kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(conv(3, 8, 3), BLIND[kind](), nn.ReLU(), conv(8, 6), nn.ReLU(), conv(6, 2))
    plain = copy.deepcopy(model)
    gates = gate(model, probe=False)
    torch.testing.assert_close(model(IMAGE), plain(IMAGE))
    assert shares_of_score(model, gates)["0"] > 1e-3 or "0" in gates.graph.ungated


@pytest.mark.parametrize("flat", ["weight", "bias"])
def test_norms_whose_parameters_are_no_vectors(flat: str) -> None:
    """Found by the fuzzer: phi had the shape of the weight, and masks did not fit."""
    shapes = {"weight": (8,), "bias": (8,), flat: (8, 1, 1)}
    held = {name: nn.Parameter(torch.rand(shape) + 1) for name, shape in shapes.items()}

    def run(m: Custom, x: Tensor) -> Tensor:
        y = m.a(x)
        y = F.batch_norm(y, None, None, m.weight.flatten(), m.bias.flatten(), training=True)
        return m.c(m.b(y.relu()).tanh())

    model = Custom(run, a=conv(3, 8), b=conv(8, 4), c=conv(4, 2))
    for name, parameter in held.items():
        model.register_parameter(name, parameter)
    assert kinds(check(model, {"b"}).whole) == {"a": Kind.NO_WEIGHT}


def test_tied_norms() -> None:
    parts = {"a": conv(3, 8, 3), "b": conv(8, 8), "one": nn.BatchNorm2d(8), "two": nn.BatchNorm2d(8), "c": conv(8, 2)}
    model = Custom(lambda m, x: m.c(F.relu(m.two(m.b(F.relu(m.one(m.a(x))))))), **parts)
    model.two.weight, model.two.bias = model.one.weight, model.one.bias
    graph = graph_of(model)
    assert set(graph.ungated) == {group.name for group in graph.groups}


# Several gates in one module, gates on buffers, members that a mask does not reach.


class Blur(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kernel", torch.full((8, 1, 3, 3), 1 / 9))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.kernel, groups=x.shape[1])


class Fixed(nn.Module):
    """A batch norm of buffers."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.rand(8) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias)


class Shifted(nn.BatchNorm2d):
    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.shift = nn.Parameter(torch.ones(features, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shift


def two_layers(m: nn.Module, x: Tensor) -> Tensor:
    return m.head(F.relu(F.conv2d(F.relu(F.conv2d(x, m.first)), m.second)))


def both_ways(m: nn.Module, x: Tensor) -> Tensor:
    x = F.relu(m.norm(m.stem(x))).mean((2, 3))
    return m.head(F.relu(F.linear(F.relu(m.code(x)), m.code.weight.t()) + x))


UNUSUAL = {
    "two weights in one module": lambda: Custom(
        two_layers,
        first=nn.Parameter(torch.randn(8, 3, 1, 1)),
        second=nn.Parameter(torch.randn(6, 8, 1, 1)),
        head=conv(6, 2),
    ),
    "a blur made of a buffer": lambda: nn.Sequential(
        conv(3, 8), nn.BatchNorm2d(8), nn.ReLU(), Blur(), nn.ReLU(), conv(8, 2)
    ),
    "a batch norm with a shift of its own": lambda: nn.Sequential(conv(3, 8), Shifted(8), nn.ReLU(), conv(8, 2)),
    "a weight used both ways": lambda: Custom(
        both_ways, stem=conv(3, 8), norm=nn.BatchNorm2d(8), code=nn.Linear(8, 5, bias=False), head=nn.Linear(8, 2)
    ),
    "a norm without tensors": lambda: nn.Sequential(conv(3, 8), bare_norm(), nn.ReLU(), conv(8, 2)),
    "a bias that is never used": lambda: Custom(
        lambda m, x: m.head(F.relu(F.linear(x.mean((2, 3)), m.hidden.weight))),
        hidden=nn.Linear(3, 8),
        head=nn.Linear(8, 2),
    ),
}


def bare_norm() -> nn.BatchNorm2d:
    return nn.BatchNorm2d(8, affine=False, track_running_stats=False)


@pytest.mark.parametrize("name", UNUSUAL)
def test_masks_do_what_zeros_do_unless_a_group_is_loose(name: str) -> None:
    torch.manual_seed(0)
    model = UNUSUAL[name]().double()
    for tensor in model.parameters():
        nn.init.uniform_(tensor, 0.2, 1.0)
    plain, images = copy.deepcopy(model), IMAGE.double()
    gates = gate(model, images, probe=False)
    assert_same(plain, model, images, ("eval",))
    kept = drop_odd(gates.graph)
    for group in gates.graph.groups:
        if group.name in gates.graph.ungated or gates.loose(group):
            kept[group.span] = True
    gates.mask_(kept)
    mask_(plain, Plan(gates.whole, kept))
    assert_same(plain, model, images, ("eval",))
    gates.cut_(kept)
    assert_same(plain, model, images, ("eval",))
    assert_same(plain, merge_gates_(model), images, ("eval",))


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(conv(3, 8), nn.BatchNorm2d(8), nn.ReLU(), Fixed(), nn.ReLU(), conv(8, 2)),
        lambda: Custom(
            lambda m, x: m.c(F.relu(m.norm(m.b(F.relu(m.norm(m.a(x))))))),
            a=conv(3, 8, 3), b=conv(8, 8), c=conv(8, 2), norm=bare_norm(),
        ),
    ],
    ids=["a norm made of buffers", "a norm without tensors used twice"],
)  # fmt: skip
def test_without_any_gate_there_is_nothing_to_prune(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(InvalidModel):
        gate(make(), probe=False)


def test_l1_spares_groups_without_gate() -> None:
    parts = {"a": conv(3, 8), "norm": nn.BatchNorm2d(8), "b": Scaled(3, 8, 1), "c": conv(8, 6), "d": conv(6, 2)}
    model = Custom(lambda m, x: m.d(F.relu(m.c(F.relu(m.norm(m.a(x)) + m.b(x))))), **parts)
    gates = gate(model)
    assert list(gates.graph.ungated) == ["a"]
    model.norm.gate_phi.grad = torch.zeros(8)
    gates.add_l1_(1.0)
    assert not bool(model.norm.gate_phi.grad.any())


class Root(nn.BatchNorm2d):
    def __init__(self) -> None:
        super().__init__(8)
        self.stem, self.head = conv(3, 8), conv(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(super().forward(self.stem(x))))


def hidden(m: nn.Module, x: Tensor) -> Tensor:
    return m.head(F.relu(m.hidden(F.relu(m.stem(x)).flatten(2).transpose(1, 2)))).mean(1)


def test_what_a_gate_multiplies_is_not_loose() -> None:
    for model in (Root(), Custom(hidden, stem=conv(3, 8), hidden=nn.Linear(8, 6), head=nn.Linear(6, 2))):
        gates = gate(model)
        assert not any(gates.loose(group) for group in gates.graph.groups)


@pytest.mark.parametrize("inner", [5, 6])
def test_a_bias_lies_along_one_axis_of_the_weight(inner: int) -> None:
    """Of a convolution whose weight also leads back: the gates of what it leads back to leave its bias alone."""
    model = Custom(
        lambda m, x: m.last(F.conv_transpose2d(m.norm(m.code(m.first(x))).relu(), m.code.weight).relu()),
        first=conv(3, inner),
        code=conv(inner, 6),
        norm=nn.BatchNorm2d(6),
        last=conv(inner, 2),
    )
    check(model, {"first", "code", "norm"})
