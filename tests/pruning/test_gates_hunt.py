"""What was found by trying to break gates."""

import copy

import pytest
import torch
import torch.nn.functional as F
from gated import IMAGE, Custom, drop_odd, effective, gate, network
from torch import Tensor, nn

import secateur
from secateur import Gates, InvalidModel, InvalidSetting, Plan, Pruner, SecateurError, insert_gates_, merge_gates_
from secateur.channels.verify import mask_
from secateur.models.lookup import find_model
from secateur.pruning.scores import Taylor


def conv(inner: int, outer: int, kernel: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inner, outer, kernel)


def shares_of_score(model: nn.Module, gates: Gates) -> dict[str, float]:
    """By group, the Taylor score relative to the largest; what no gate can feel has next to nothing."""
    out = model.train()(IMAGE)
    (out * torch.arange(out.numel()).view_as(out)).sum().backward()
    products = [m.gate_phi.grad * m.gate_factor().detach() for m in gates.modules]
    score = gates.per_channel(torch.cat(products).abs())
    parts = {g.name: float(score[g.start : g.start + g.size].sum()) for g in gates.graph.groups}
    return {name: part / max(parts.values()) for name, part in parts.items()}


def assert_masks_work(model: nn.Module, seed: int = 0) -> None:
    """Masks of gates do what zeros by hand do, unless the group is said to be loose or without gate."""
    torch.manual_seed(seed)
    for tensor in model.parameters():
        nn.init.uniform_(tensor, 0.2, 1.0)
    plain = copy.deepcopy(model)
    gates = gate(model, probe=False)
    kept = drop_odd(gates.graph)
    for group in gates.graph.groups:
        if group.name in gates.graph.ungated or gates.loose(group):
            kept[group.span] = True
    gates.mask_(kept)
    mask_(plain, Plan(gates.whole, kept))
    torch.testing.assert_close(model.eval()(IMAGE), plain.eval()(IMAGE))


# Norms that take the scale out of a filter, but carry no gate: the filter's own gate is blind.


def test_instance_norm_without_parameters() -> None:
    model = nn.Sequential(conv(3, 8, 3), nn.InstanceNorm2d(8), nn.ReLU(), conv(8, 2))
    plain = copy.deepcopy(model)
    gate(model)
    torch.testing.assert_close(model(IMAGE), plain(IMAGE))


BLIND = {
    "instance": lambda: nn.InstanceNorm2d(8, affine=True),
    "group": lambda: nn.GroupNorm(8, 8),
    "groups": lambda: nn.GroupNorm(4, 8),
    "functional": lambda: Custom(lambda m, x: F.batch_norm(x, None, None, training=True)),
    "parametrised": lambda: nn.utils.parametrize.register_parametrization(nn.BatchNorm2d(8), "weight", nn.Identity()),
}


@pytest.mark.parametrize("kind", BLIND)
def test_a_score_behind_every_norm(kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(conv(3, 8, 3), BLIND[kind](), nn.ReLU(), conv(8, 6), nn.ReLU(), conv(6, 2))
    gates = gate(model, probe=False)
    assert shares_of_score(model, gates)["0"] > 1e-3 or "0" in gates.graph.ungated


def test_tied_norms() -> None:
    parts = {"a": conv(3, 8, 3), "b": conv(8, 8), "one": nn.BatchNorm2d(8), "two": nn.BatchNorm2d(8), "c": conv(8, 2)}
    model = Custom(lambda m, x: m.c(F.relu(m.two(m.b(F.relu(m.one(m.a(x))))))), **parts)
    model.two.weight, model.two.bias = model.one.weight, model.one.bias
    graph = secateur.analyze(model, IMAGE)
    assert set(graph.ungated) == {group.name for group in graph.groups}


# Several gates in one module, gates on buffers.


def two_layers(m: nn.Module, x: Tensor) -> Tensor:
    return m.head(F.relu(F.conv2d(F.relu(F.conv2d(x, m.first)), m.second)))


def test_two_weights_in_one_module() -> None:
    weights = {"first": nn.Parameter(torch.randn(8, 3, 1, 1)), "second": nn.Parameter(torch.randn(6, 8, 1, 1))}
    model = Custom(two_layers, **weights, head=conv(6, 2))
    plain = copy.deepcopy(model)
    gate(model)
    torch.testing.assert_close(model(IMAGE), plain(IMAGE))


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


def test_a_blur_made_of_a_buffer() -> None:
    model = nn.Sequential(conv(3, 8), nn.BatchNorm2d(8), nn.ReLU(), Blur(), nn.ReLU(), conv(8, 2))
    plain = copy.deepcopy(model)
    gate(model)
    torch.testing.assert_close(model(IMAGE), plain(IMAGE))


def test_a_norm_made_of_buffers_keeps_its_channels() -> None:
    model = nn.Sequential(conv(3, 8), nn.BatchNorm2d(8), nn.ReLU(), Fixed(), nn.ReLU(), conv(8, 2))
    with pytest.raises(InvalidModel, match="has weights that are not parameters"):
        gate(model)


def test_blur_pool_of_timm() -> None:
    gate(find_model("timm:resnetblur18"), torch.randn(2, 3, 32, 32), probe=False)


class Shifted(nn.BatchNorm2d):
    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.shift = nn.Parameter(torch.ones(features, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shift


def test_a_batch_norm_with_a_shift_of_its_own() -> None:
    assert_masks_work(nn.Sequential(conv(3, 8), Shifted(8), nn.ReLU(), conv(8, 2)))


def test_a_weight_used_both_ways() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        x = F.relu(m.norm(m.stem(x))).mean((2, 3))
        return m.head(F.relu(F.linear(F.relu(m.code(x)), m.code.weight.t()) + x))

    parts = {
        "stem": conv(3, 8),
        "norm": nn.BatchNorm2d(8),
        "code": nn.Linear(8, 5, bias=False),
        "head": nn.Linear(8, 2),
    }
    assert_masks_work(Custom(forward, **parts))


# Batch norms without anything.


def bare_norm() -> nn.BatchNorm2d:
    return nn.BatchNorm2d(8, affine=False, track_running_stats=False)


def test_a_norm_without_tensors_in_double_precision() -> None:
    model = nn.Sequential(conv(3, 8), bare_norm(), nn.ReLU(), conv(8, 2)).double()
    gate(model)
    model(IMAGE.double())


def test_a_norm_without_tensors_used_twice() -> None:
    model = Custom(
        lambda m, x: m.c(F.relu(m.norm(m.b(F.relu(m.norm(m.a(x))))))),
        a=conv(3, 8, 3), b=conv(8, 8), c=conv(8, 2), norm=bare_norm(),
    )  # fmt: skip
    with pytest.raises(InvalidModel, match="belongs to a module that has another gate"):
        gate(model, probe=False)


def test_phi_without_parameters_is_one_whatever_its_value() -> None:
    model = network()
    gate(model)
    model[6].gate_phi.data = torch.tensor([0.7, 3.0, -2.3, 1e9, -1e20, 1e-3])
    assert model[6].weight.tolist() == [1.0] * 6


# Parameters at the end of their range.


def test_denormal_beta_beside_no_gamma() -> None:
    model = network()
    model[1].weight.data.zero_()
    model[1].bias.data.fill_(5 * 2.0**-149)
    before = effective(model[1])
    gate(model)
    assert torch.equal(model[1].bias, before[1])


def test_gamma_far_below_beta() -> None:
    model = network()
    model[1].weight.data.fill_(1.2345678e-5)
    model[1].bias.data.fill_(1e38)
    before = effective(model[1])
    gate(model)
    # Digits of gamma are lost, far below the last one of beta.
    torch.testing.assert_close(model[1].weight, before[0], rtol=1e-4, atol=0)


def test_the_largest_beta() -> None:
    model = network()
    model[1].weight.data.fill_(1.0219619132654755e38)
    model[1].bias.data.fill_(torch.finfo(torch.float32).max)
    gate(model)
    assert bool(model[1].bias.isfinite().all())


# What the user did before or does beside.


def test_old_gradients() -> None:
    model = network()
    model(IMAGE).square().mean().backward()
    gate(model)
    assert all(module._parameters[name].grad is None for module in (model[1], model[3]) for name in ("weight", "bias"))


def test_a_frozen_weight_stays() -> None:
    model = network()
    model(IMAGE).square().mean().backward()
    gate(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    optimizer.zero_grad(set_to_none=False)
    before = model[1]._parameters["weight"].clone()
    model(IMAGE).square().mean().backward()
    optimizer.step()
    assert torch.equal(model[1]._parameters["weight"], before)


class WithFactor(nn.Conv2d):
    def __init__(self) -> None:
        super().__init__(8, 6, 1)
        self.gate_phi = nn.Parameter(torch.full((6, 1, 1), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gate_phi


def test_a_parameter_named_as_ours() -> None:
    model = nn.Sequential(conv(3, 8), nn.BatchNorm2d(8), WithFactor(), nn.ReLU(), conv(6, 2))
    plain = copy.deepcopy(model)
    try:
        gate(model, probe=False)
    except SecateurError:
        return
    torch.testing.assert_close(model(IMAGE), plain(IMAGE))


def test_an_attribute_named_as_ours() -> None:
    model = network()
    model[3].gate_phi = "mine"
    graph = secateur.analyze(model, IMAGE)
    try:
        insert_gates_(model, graph)
    except (SecateurError, KeyError):
        assert not any("gate_mask" in module._buffers for module in model.modules())


def test_the_model_moves_after_the_pruner_is_made() -> None:
    """Any other device would do, and raise; this one every machine has."""
    model = network()
    pruner = Pruner(model, IMAGE)
    model.to("meta")
    model(IMAGE.to("meta")).square().mean().backward()
    pruner.observe()
    assert isinstance(pruner.score, Taylor)
    assert pruner.score.total.device.type == "meta"


class Computed(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight * 2, self.bias)


def test_l1_spares_groups_without_gate() -> None:
    parts = {"a": conv(3, 8), "norm": nn.BatchNorm2d(8), "b": Computed(3, 8, 1), "c": conv(8, 6), "d": conv(6, 2)}
    model = Custom(lambda m, x: m.d(F.relu(m.c(F.relu(m.norm(m.a(x)) + m.b(x))))), **parts)
    gates = gate(model)
    assert list(gates.graph.ungated) == ["a"]
    model.norm.gate_phi.grad = torch.zeros(8)
    gates.add_l1_(1.0)
    assert not bool(model.norm.gate_phi.grad.any())


def test_a_root_that_is_a_batch_norm_is_not_loose() -> None:
    class Root(nn.BatchNorm2d):
        def __init__(self) -> None:
            super().__init__(8)
            self.stem, self.head = conv(3, 8), conv(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(F.relu(super().forward(self.stem(x))))

    gates = gate(Root())
    assert not any(gates.loose(group) for group in gates.graph.groups)


def test_a_bias_inside_a_gate_is_not_loose() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        return m.head(F.relu(m.hidden(F.relu(m.stem(x)).flatten(2).transpose(1, 2)))).mean(1)

    gates = gate(Custom(forward, stem=conv(3, 8), hidden=nn.Linear(8, 6), head=nn.Linear(6, 2)))
    assert not any(gates.loose(group) for group in gates.graph.groups)


def shifted() -> nn.Module:
    return Custom(
        lambda m, x: m.head(F.relu(m.norm(m.stem(x)) + m.shift)),
        stem=conv(3, 8), norm=nn.BatchNorm2d(8), shift=nn.Parameter(torch.ones(8, 1, 1)), head=conv(8, 2),
    )  # fmt: skip


def test_masked_and_cut_agree_behind_a_learnt_shift() -> None:
    model = shifted()
    pruner = Pruner(model, IMAGE, score="random")
    with pytest.raises(InvalidSetting, match="could wake its channels up: pass the optimizer"):
        pruner.prune(fraction=0.5, cut=False)
    assert bool(pruner.kept.all())
    pruner.prune(fraction=0.5, cut=False, optimizer=torch.optim.SGD(model.parameters()))
    masked = model.eval()(IMAGE)
    pruner.cut_()
    torch.testing.assert_close(model(IMAGE), masked)


def test_training_goes_on_behind_a_learnt_shift() -> None:
    model = shifted()
    pruner = Pruner(model, IMAGE, score="random")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        model(IMAGE).square().mean().backward()
        optimizer.step()
        pruner.prune(fraction=0.3, cut=False, optimizer=optimizer)


def test_a_bias_never_used() -> None:
    parts = {"hidden": nn.Linear(3, 8), "head": nn.Linear(8, 2)}
    model = Custom(lambda m, x: m.head(F.relu(F.linear(x.mean((2, 3)), m.hidden.weight))), **parts)
    gates = gate(model)
    gates.cut_(drop_odd(gates.graph))
    merge_gates_(model)


def test_a_loss_from_before_the_gates() -> None:
    model = network()
    old = model(IMAGE).sum()
    gates = gate(model)
    gates.cut_(drop_odd(gates.graph))
    merge_gates_(model)(IMAGE).sum().backward()
    assert bool(old.isfinite())
