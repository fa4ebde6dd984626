"""Cutting keeps everything but size: identity, ties, optimizer state, layout, bookkeeping."""

import copy
import json

import pytest
import torch
from layers import PICTURES, network
from sandwich import IMAGE, Sandwich
from torch import Tensor, nn

import secateur
from secateur import Plan
from secateur.channels.cuts import Cuts
from secateur.channels.reasons import Kind
from secateur.channels.shrink import copy_model, cut_


def test_shrink_copies_and_shrink_in_place_does_not(model: nn.Sequential, plan: Plan) -> None:
    before = copy.deepcopy(model.state_dict())
    small = secateur.shrink(model, plan)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert secateur.shrink_(model, plan) is model
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in small.state_dict().items())
    assert torch.equal(model[0].weight, before["0.weight"][[1, 2, 5]])
    assert torch.equal(model[4].weight, before["4.weight"][[1, 2, 5]][:, [0, 3]])
    assert torch.equal(model[8].weight, before["8.weight"].reshape(10, 6, 4)[[0, 1, 7, 9]][:, [0, 3]].reshape(4, 8))


def test_bookkeeping_and_repr_are_right(model: nn.Sequential, plan: Plan) -> None:
    small = secateur.shrink(model, plan)
    expected = nn.Sequential(
        nn.Conv2d(3, 3, 3, padding=1),
        nn.BatchNorm2d(3),
        nn.PReLU(3),
        nn.Conv2d(3, 3, 3, groups=3),
        nn.ConvTranspose2d(3, 2, 2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(8, 4),
        nn.Linear(4, 2),
    )
    assert repr(small) == repr(expected)
    expected.load_state_dict(small.state_dict())
    assert torch.equal(expected.eval()(PICTURES), small.eval()(PICTURES))


def test_parameters_stay_the_same_objects_and_gradients_follow(model: nn.Sequential, plan: Plan) -> None:
    model(PICTURES).sum().backward()
    parameters = list(model.parameters())
    gradient = model[0].weight.grad.clone()
    model[4].weight.requires_grad_(False)
    secateur.shrink_(model, plan)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert torch.equal(model[0].weight.grad, gradient[[1, 2, 5]])
    assert not model[4].weight.requires_grad
    model.zero_grad()
    model(PICTURES).sum().backward()
    assert model[0].weight.grad.shape == (3, 3, 3, 3)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.AdamW, {}),
        (torch.optim.RMSprop, {"momentum": 0.5}),
        (torch.optim.Adafactor, {}),
    ],
)
def test_the_optimizer_goes_on_as_if_it_had_always_been_small(
    model: nn.Sequential, plan: Plan, kind: type, settings: dict
) -> None:
    optimizer = kind(model.parameters(), lr=0.01, **settings)
    for _ in range(2):
        model(PICTURES).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    old = {p: {k: v.clone() for k, v in s.items() if torch.is_tensor(v)} for p, s in optimizer.state.items()}
    secateur.shrink_(model, plan, optimizer)
    weight = model[8].weight
    columns = [i for i in range(24) if i // 4 in (0, 3)]
    for key, value in old[weight].items():
        if value.dim() == 2:
            rows = value[[0, 1, 7, 9]] if value.shape[0] > 1 else value
            expected = rows[:, columns] if value.shape[1] > 1 else rows
            assert torch.equal(optimizer.state[weight][key], expected), key
    model(PICTURES).square().sum().backward()
    optimizer.step()


def test_lists_in_parameter_groups_are_cut_too(model: nn.Sequential, plan: Plan) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    masks = [torch.arange(float(p.numel())).reshape(p.shape) for p in model.parameters()]
    optimizer.param_groups[0]["masks"] = list(masks)
    secateur.shrink_(model, plan, optimizer)
    assert torch.equal(optimizer.param_groups[0]["masks"][0], masks[0][[1, 2, 5]])


def test_layout_precision_and_hooks_survive(model: nn.Sequential) -> None:
    model = model.to(memory_format=torch.channels_last).to(torch.bfloat16)
    calls: list[int] = []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    graph = secateur.analyze(model, PICTURES.to(torch.bfloat16))
    small = secateur.shrink(model, Plan.random(graph, 0.5))
    assert small[0].weight.dtype == torch.bfloat16
    assert small[4].weight.is_contiguous(memory_format=torch.channels_last)
    before = len(calls)
    small(PICTURES.to(torch.bfloat16))
    assert len(calls) == before + 1


def test_tied_parameters_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 8, 1)
            self.one = nn.Conv2d(8, 8, 3, padding=1)
            self.two = nn.Conv2d(8, 8, 3, padding=1)
            self.two.weight = self.one.weight
            self.head = nn.Conv2d(8, 2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.two(self.one(self.stem(x)).relu()).relu())

    model = Tied()
    graph = secateur.analyze(model, PICTURES)
    plan = Plan.random(graph, 0.5)
    small = secateur.shrink(model, plan)
    assert small.two.weight is small.one.weight
    assert small.one.weight.shape == (4, 4, 3, 3)
    assert secateur.verify(model, plan, PICTURES).difference < 1e-12


def test_parameters_that_are_views_of_one_another_stay() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 2, 1))
    model[1].weight.data = torch.randn(16, 8, 1, 1)[:8]
    model[1].bias.data = model[1].weight.data.reshape(-1)[:8]
    graph = secateur.analyze(model, PICTURES)
    assert {f.name: f.reason for f in graph.frozen}["1"].kind is Kind.SHARED_MEMORY


def test_a_plan_for_another_network_is_refused(model: nn.Sequential, plan: Plan) -> None:
    short, deep = nn.Sequential(nn.Conv2d(3, 8, 3)), nn.Sequential(*model, nn.Conv2d(4, 4, 1))
    for given, name in ((short, "'1.weight'"), (deep, "'10.weight'"), (secateur.shrink(model, plan), "'0.weight'")):
        for use in (secateur.shrink, secateur.shrink_, lambda m, p: secateur.verify(m, p, PICTURES)):
            with pytest.raises(secateur.InvalidSetting) as caught:
                use(given, plan)
            assert name in caught.value.what
    assert (caught.value.got, caught.value.wanted) == ((3, 3, 3, 3), (8, 3, 3, 3))


def test_cuts_need_no_graph_and_check_what_they_cut(model: nn.Sequential, plan: Plan) -> None:
    cuts = Cuts.from_dict(json.loads(json.dumps(plan.cuts().to_dict())))
    other = network()
    other[3].groups = 4
    with pytest.raises(secateur.InvalidSetting) as caught:
        cut_(other, cuts)
    assert (caught.value.got, caught.value.wanted, other[0].weight.shape[0]) == (4, 8, 8)
    small = secateur.shrink(model, plan)
    assert repr(cut_(model, cuts)) == repr(small)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in small.state_dict().items())


def test_optimizers_whose_state_cannot_be_cut_are_refused_first() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 1))
    plan = Plan.random(secateur.analyze(model, PICTURES), 0.5)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = model(PICTURES).square().mean()
        value.backward()
        return value.detach()

    optimizer.step(loss)
    with pytest.raises(secateur.InvalidSetting, match=r"LBFGS keeps '.*' of 0.weight"):
        secateur.shrink_(model, plan, optimizer)
    with pytest.raises(secateur.InvalidSetting) as caught:
        secateur.shrink_(model, plan, 5)  # type: ignore[arg-type]
    assert caught.value.got == "int"
    assert model[0].weight.shape[0] == 8


def test_complex_weights_are_cut_under_the_eyes_of_an_earlier_loss() -> None:
    class Filter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)
            self.filter = nn.Parameter(torch.randn(8, 8, 5, dtype=torch.cfloat))

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.fft.irfft2(torch.fft.rfft2(self.first(x)) * self.filter[None], s=x.shape[2:]))

    model, images = Filter(), torch.randn(2, 3, 8, 8)
    plan = Plan.keep(secateur.analyze(model, images), {"first": [0, 3, 5]})
    assert secateur.verify(model, plan, images).agrees
    earlier = model(images).square().mean()
    earlier.backward()
    secateur.shrink_(model, plan)
    model(images).square().mean().backward()
    assert model.filter.grad is not None
    assert model.filter.grad.shape == (3, 8, 5)


def test_shrinking_leaves_spectral_norm_alone() -> None:
    """Reading the weight of such a layer in training mode changes its buffers."""
    conv = torch.nn.utils.parametrizations.spectral_norm(nn.Conv2d(8, 8, 1))
    model = Sandwich(lambda m, x: m.conv(x), conv=conv).double().train()
    small = secateur.shrink(model, secateur.Plan.random(secateur.analyze(model, IMAGE), 0))
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), small.state_dict().values(), strict=True))


def test_the_copy_of_what_a_pass_has_left_is_a_copy() -> None:
    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 2, 1)
            self.seen: dict[str, list[Tensor]] = {"first": []}

        def forward(self, images: Tensor) -> Tensor:
            features = self.first(images)
            self.seen["first"] = [features]
            return self.last(features)

    model = Keeping()
    model(torch.randn(1, 3, 4, 4))
    kept = model.seen["first"][0]
    copied = copy_model(model).seen["first"][0]  # pyright: ignore
    assert kept.requires_grad
    assert torch.equal(kept, copied)
    assert kept.data_ptr() != copied.data_ptr()
