"""Gates change no function, go where they should, and leave nothing behind."""

import copy

import pytest
import torch
import torch.nn.functional as F
from gated import IMAGE, Custom, count_ulps, drop_odd, effective, gate, network, state_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from secateur import InvalidModel, InvalidSetting, Pruner, analyze, insert_gates_, merge_gates_
from secateur.pruning.folded import Folded
from secateur.pruning.gated import FilterScale, Gated
from secateur.pruning.gates import Gates

TYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def norm_of(gamma: list[float], beta: list[float], dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """A network whose batch norm has these parameters."""
    model = nn.Sequential(
        nn.Conv2d(3, len(gamma), 1), nn.BatchNorm2d(len(gamma)), nn.ReLU(), nn.Conv2d(len(gamma), 2, 1)
    )
    model[1].weight.data, model[1].bias.data = torch.tensor(gamma), torch.tensor(beta)
    return model.to(dtype)


def test_appendix_a_where_the_shift_is_small() -> None:
    model = norm_of([0.5, -2.0, 1.5], [5.0, 4.0, -0.75])
    gate(model)
    norm = model[1]
    assert norm.gate_phi.tolist() == [0.5, -2.0, 1.5]
    assert norm._parameters["weight"].tolist() == [1.0, 1.0, 1.0]
    assert norm._parameters["bias"].tolist() == [10.0, -2.0, -0.5]
    assert not norm._parameters["weight"].requires_grad
    assert norm._parameters["bias"].requires_grad


def test_a_large_shift_decides_phi() -> None:
    model = norm_of([0.5, -0.25, 0.0, 0.0, -0.0], [10.0, 5.0, -4.0, 0.0, 2.0])
    gate(model)
    norm = model[1]
    assert torch.allclose(norm.gate_phi, torch.tensor([1.0, -0.5, 0.4, 0.0, 0.2]))
    assert torch.allclose(norm._parameters["weight"], torch.tensor([0.5, 0.5, 0.0, 1.0, 0.0]))
    assert torch.allclose(norm._parameters["bias"], torch.tensor([10.0, -10.0, -10.0, 0.0, 10.0]))


@pytest.mark.parametrize("scale", ["norm", "mean"])
def test_appendix_b_of_a_filter(scale: FilterScale) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1))
    model[0].weight.data[2] = 0
    weight, bias = model[0].weight.detach().clone(), model[0].bias.detach().clone()
    insert_gates_(model, analyze(model, IMAGE), filter_scale=scale)
    conv = model[0]
    expected = weight.flatten(1).norm(dim=1) / (1 if scale == "norm" else 27)
    expected[2] = 1
    assert torch.allclose(conv.gate_phi, expected)
    assert torch.allclose(conv._parameters["weight"], weight / expected.view(-1, 1, 1, 1))
    assert torch.allclose(conv._parameters["bias"], bias / expected)
    assert torch.allclose(conv.weight, weight)
    assert torch.allclose(conv.bias, bias)
    assert all(p.requires_grad for p in conv.parameters())


def finite(dtype: torch.dtype) -> st.SearchStrategy[float]:
    """Numbers of this type: denormal, zero of both signs, up to half of the largest."""
    limits = torch.finfo(dtype)
    special = [
        0.0,
        -0.0,
        limits.tiny,
        -limits.tiny,
        limits.max / 2,
        -limits.max / 2,
        limits.smallest_normal / 4,
        limits.eps,
    ]
    values = st.floats(-limits.max / 2, limits.max / 2, allow_nan=False, allow_infinity=False)
    return st.sampled_from(special) | values | st.floats(-20, 20)


def single_at_least(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@pytest.mark.parametrize("dtype", TYPES)
def test_a_norm_keeps_its_parameters(dtype: torch.dtype) -> None:
    """Within 2 ulp, if phi and the quotients are normal numbers of the type that holds them."""
    tiny = torch.finfo(single_at_least(dtype)).tiny
    graph = analyze(norm_of([1.0] * 3, [0.0] * 3), IMAGE)

    @settings(max_examples=60, database=None, deadline=None)
    @given(st.lists(st.tuples(finite(dtype), finite(dtype)), min_size=3, max_size=3))
    def check(pairs: list[tuple[float, float]]) -> None:
        gamma, beta = torch.tensor(pairs, dtype=torch.float64).to(dtype).T
        model = norm_of([1.0] * 3, [0.0] * 3, dtype)
        model[1].weight.data, model[1].bias.data = gamma.clone(), beta.clone()
        insert_gates_(model, graph)
        phi = torch.maximum(gamma.double().abs(), beta.double().abs() / 10)
        normal = (phi == 0) | (phi >= tiny)
        for parameter in (gamma, beta):
            normal &= (parameter == 0) | (parameter.double().abs() / phi >= tiny)
        assert model[1].gate_phi.dtype == model[1]._parameters["bias"].dtype == single_at_least(dtype)
        assert_near([gamma, beta], effective(model[1]), normal)
        merge_gates_(model)
        assert_near([gamma, beta], effective(model[1]), normal)

    check()


def assert_near(before: list[Tensor], after: list[Tensor], where: Tensor) -> None:
    for old, new in zip(before, after, strict=True):
        assert new.dtype == old.dtype
        assert bool((count_ulps(old, new) <= 2)[where].all()), (old, new)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("scale", ["norm", "mean"])
def test_a_filter_keeps_its_parameters(dtype: torch.dtype, scale: FilterScale) -> None:
    """Within 2 ulp, if the quotients are normal numbers of the type that holds them."""
    tiny = torch.finfo(single_at_least(dtype)).tiny
    graph = analyze(nn.Sequential(nn.Conv2d(3, 2, 1), nn.ReLU(), nn.Conv2d(2, 2, 1)), IMAGE)

    @settings(max_examples=40, database=None, deadline=None)
    @given(st.lists(finite(dtype), min_size=8, max_size=8))
    def check(values: list[float]) -> None:
        model = nn.Sequential(nn.Conv2d(3, 2, 1), nn.ReLU(), nn.Conv2d(2, 2, 1)).to(dtype)
        weight, bias = torch.tensor(values, dtype=torch.float64).to(dtype).split([6, 2])
        model[0].weight.data, model[0].bias.data = weight.reshape(2, 3, 1, 1).clone(), bias.clone()
        insert_gates_(model, graph, filter_scale=scale)
        phi = model[0].gate_phi.detach().double()
        quotients = weight.double().abs() / phi.repeat_interleave(3), bias.double().abs() / phi
        for old, new, quotient in zip((weight, bias), effective(model[0]), quotients, strict=True):
            assert_near([old], [new.flatten()], (old == 0) | (quotient >= tiny))

    check()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_the_function_stays(dtype: torch.dtype, mode: str) -> None:
    model = network().to(dtype).train(mode == "train")
    image = IMAGE.to(dtype)
    before = copy.deepcopy(model)(image)
    gate(model)
    close = {"rtol": 16 * torch.finfo(dtype).eps, "atol": 16 * torch.finfo(dtype).eps}
    torch.testing.assert_close(copy.deepcopy(model)(image), before, **close)
    torch.testing.assert_close(copy.deepcopy(merge_gates_(model))(image), before, **close)


def test_merging_leaves_nothing() -> None:
    model = network()
    model[1].weight.requires_grad_(False)
    model[3].bias.requires_grad_(False)
    before, attributes = state_of(model), [set(vars(m)) for m in model.modules()]
    gate(model)
    assert sum(isinstance(m, Gated) for m in model.modules()) == 3
    assert merge_gates_(model) is model
    after = state_of(model)
    assert [row[:-1] for row in after] == [row[:-1] for row in before]
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(new[-1], old[-1])
    assert [set(vars(m)) for m in model.modules()] == attributes
    assert not any("gate" in name for m in model.modules() for name in dir(m))


def test_types_and_layouts_come_and_go() -> None:
    model = network()
    gates = gate(model)
    expected, phis = model.eval()(IMAGE), [phi.detach().clone() for phi in gates.phis]
    for dtype in (torch.float16, torch.bfloat16):
        model.to(dtype)
        assert all(phi.dtype == torch.float32 for phi in gates.phis)
        assert model[1].weight.dtype == model[3].bias.dtype == model(IMAGE.to(dtype)).dtype == dtype
    model.float()
    assert all(torch.equal(phi, before) for phi, before in zip(gates.phis, phis, strict=True))
    model.to(memory_format=torch.channels_last)
    assert model[3].weight.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(model(IMAGE.to(memory_format=torch.channels_last)), expected, rtol=0.1, atol=0.05)
    merge_gates_(model)
    assert model[3].weight.is_contiguous(memory_format=torch.channels_last)


def test_phi_of_a_norm_without_parameters_stays_one() -> None:
    model = network()
    gates = gate(model)
    phi = model[6].gate_phi
    assert [id(p) for p in gates.trainable] == [id(model[1].gate_phi), id(model[3].gate_phi)]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.5)
    model(IMAGE).square().mean().backward()
    assert bool((phi.grad != 0).any())
    optimizer.step()
    torch.testing.assert_close(model[6].weight, torch.ones(6))
    assert model[6].bias.tolist() == [0.0] * 6
    gates.mask_(drop_odd(gates.graph))
    torch.testing.assert_close(model[6].weight, torch.tensor([1.0, 0.0] * 3))
    model[6].gate_phi.data = torch.tensor([0.7, 3.0, -2.3, 1e9, -1e20, 1e-3])  # whatever its value
    torch.testing.assert_close(model[6].weight, torch.tensor([1.0, 0.0] * 3))
    with pytest.raises(InvalidModel):  # nothing could hold the mask
        merge_gates_(model)


def test_l1_adds_its_subgradient() -> None:
    model = nn.Sequential(*network()[:5], nn.Conv2d(6, 2, 1))
    gates = gate(model)
    phis = model[1].gate_phi, model[3].gate_phi
    for phi in phis:
        phi.data[0], phi.data[2] = 0, -1
        phi.grad = torch.zeros_like(phi)
    kept = gates.graph.all_kept()
    kept[gates.channels[0][1]] = False
    gates.mask_(kept)
    gates.add_l1_(0.5)
    assert phis[0].grad.tolist() == (0.5 * phis[0].sign() * kept[gates.channels[0]]).tolist()
    assert phis[0].grad[:3].tolist() == [0, 0, -0.5]
    torch.testing.assert_close(phis[1].grad, 0.5 * phis[1].sign() / 72)
    assert phis[1].grad[0] == 0


def test_l1_spares_channels_that_stay() -> None:
    """Those of the image, which a batch norm sees beside others."""
    parts = {"conv": nn.Conv2d(3, 8, 1), "norm": nn.BatchNorm2d(11), "head": nn.Conv2d(11, 2, 1)}
    model = Custom(lambda m, x: m.head(F.relu(m.norm(torch.cat([x, m.conv(x)], 1)))), **parts)
    gates = gate(model)
    model.norm.gate_phi.grad = torch.zeros(11)
    gates.add_l1_(1.0)
    assert model.norm.gate_phi.grad[:3].tolist() == [0] * 3
    assert bool((model.norm.gate_phi.grad[3:] != 0).all())


def test_what_cannot_take_gates() -> None:
    model = network()
    graph = analyze(model, IMAGE)
    with pytest.raises(InvalidModel):  # it has none yet
        Gates(model, graph)
    with pytest.raises(InvalidSetting):  # of another network
        insert_gates_(nn.Sequential(nn.Conv2d(3, 5, 1)), graph)
    insert_gates_(model, graph)
    with pytest.raises(InvalidModel):  # it has gates already
        insert_gates_(model, graph)
    with pytest.raises(InvalidModel):
        Pruner(model, IMAGE)
    with pytest.raises(InvalidModel):  # nothing can be removed
        gate(nn.Sequential(nn.Conv2d(3, 4, 1)))


def test_masks_switch_off_channel_by_channel() -> None:
    model = network()
    gates = gate(model)
    gates.mask_(drop_odd(gates.graph))
    seen: dict[int, Tensor] = {}
    for index in (2, 4, 7):
        model[index].register_forward_hook(lambda m, args, out, index=index: seen.update({index: out}))
    model(IMAGE)
    for out in seen.values():
        assert not bool((out[:, 1::2] != 0).any())
        assert bool((out[:, ::2] != 0).any())


def test_recurrent_modules_with_gates_are_copied_after_they_ran() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.reads = nn.Conv2d(3, 8, 3), nn.GRU(8, 6, batch_first=True)
            self.last = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.reads(self.first(x).relu().mean(3).mT)[0][:, -1])

    model, image = Reader(), torch.randn(2, 3, 8, 8)
    gates = insert_gates_(model, analyze(model, image))
    assert "reads" in {site.module for site in gates.whole.sites}
    before = model(image)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(image), before)
    assert twin.reads._parameters["weight_ih_l0"] is not model.reads._parameters["weight_ih_l0"]
    torch.testing.assert_close(merge_gates_(twin)(image), before)


# Parameters at the end of their range.


def test_a_denormal_shift_beside_no_scale() -> None:
    model = norm_of([0.0] * 3, [5 * 2.0**-149] * 3)
    before = effective(model[1])
    gate(model)
    assert torch.equal(model[1].bias, before[1])


def test_a_scale_far_below_the_shift() -> None:
    model = norm_of([1.2345678e-5] * 3, [1e38] * 3)
    before = effective(model[1])
    gate(model)
    # Digits of the scale are lost, far below the last one of the shift.
    torch.testing.assert_close(model[1].weight, before[0], rtol=1e-4, atol=0)


def test_the_largest_shift() -> None:
    model = norm_of([1.0219619132654755e38] * 3, [torch.finfo(torch.float32).max] * 3)
    gate(model)
    assert bool(model[1].bias.isfinite().all())


# What was there before, or has the same name.


def test_old_gradients_are_dropped_and_a_frozen_weight_stays() -> None:
    model = network()
    old = model(IMAGE).square().mean()
    old.backward()
    gate(model)
    assert all(module._parameters[name].grad is None for module in (model[1], model[3]) for name in ("weight", "bias"))
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


def test_a_module_with_our_names_gets_no_gate() -> None:
    layers = [nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), WithFactor(), nn.ReLU(), nn.Conv2d(6, 2, 1)]
    named = nn.Sequential(*layers)
    network_ = network()
    network_[3].gate_phi = "mine"
    for model in (named, network_):
        before = state_of(model)
        try:
            gate(model, probe=False)
        except (InvalidModel, KeyError):
            assert [row[:-1] for row in state_of(model)] == [row[:-1] for row in before]


# The gates of all norms, folded in together.


def test_folded_gradients_are_those_of_autograd() -> None:
    model = network().double()
    gates = gate(model)
    gates.mask_(torch.arange(gates.graph.num_channels) % 3 > 0)
    other = copy.deepcopy(model)
    images = IMAGE.double()
    other(images).square().sum().backward()
    folded = Folded(gates)
    assert len(folded.modules) == 1  # neither the filter nor the norm without parameters
    with folded.in_use():
        folded.prepare()
        out = model(images)
        out.square().sum().backward()
        folded.collect()
    torch.testing.assert_close(out, copy.deepcopy(other)(images))
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        if mine.requires_grad:
            torch.testing.assert_close(mine.grad, theirs.grad, msg=name)


def test_folded_gates_leave_nothing() -> None:
    model = network()
    folded = Folded(gate(model))
    with folded.in_use():
        folded.prepare()
        assert model[1].weight is folded.made[0][0]
        folded.collect()
    assert model[1].weight is not folded.made[0][0]
    assert "gate_ready" not in vars(model[1])
    assert model[1].gate_phi.grad is None  # it was not reached
