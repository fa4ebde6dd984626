"""Cutting keeps everything but size: identity, ties, optimizer state, layout, bookkeeping."""

import copy

import pytest
import torch
from torch import Tensor, nn

import secateur
from secateur import Plan
from secateur.channels.reasons import Kind

IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.PReLU(8),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.ConvTranspose2d(8, 6, 2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(24, 10),
        nn.Linear(10, 2),
    )


@pytest.fixture
def model() -> nn.Sequential:
    return network()


@pytest.fixture
def plan(model: nn.Sequential) -> Plan:
    return Plan.keep(secateur.analyze(model, IMAGE), {"0": [1, 2, 5], "4": [0, 3], "8": [0, 1, 7, 9]})


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
    assert torch.equal(expected.eval()(IMAGE), small.eval()(IMAGE))


def test_parameters_stay_the_same_objects_and_gradients_follow(model: nn.Sequential, plan: Plan) -> None:
    model(IMAGE).sum().backward()
    parameters = list(model.parameters())
    gradient = model[0].weight.grad.clone()
    model[4].weight.requires_grad_(False)
    secateur.shrink_(model, plan)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert torch.equal(model[0].weight.grad, gradient[[1, 2, 5]])
    assert not model[4].weight.requires_grad
    model.zero_grad()
    model(IMAGE).sum().backward()
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
        model(IMAGE).square().sum().backward()
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
    model(IMAGE).square().sum().backward()
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
    graph = secateur.analyze(model, IMAGE.to(torch.bfloat16))
    small = secateur.shrink(model, Plan.random(graph, 0.5))
    assert small[0].weight.dtype == torch.bfloat16
    assert small[4].weight.is_contiguous(memory_format=torch.channels_last)
    before = len(calls)
    small(IMAGE.to(torch.bfloat16))
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
    graph = secateur.analyze(model, IMAGE)
    plan = Plan.random(graph, 0.5)
    small = secateur.shrink(model, plan)
    assert small.two.weight is small.one.weight
    assert small.one.weight.shape == (4, 4, 3, 3)
    assert secateur.verify(model, plan, IMAGE).difference < 1e-12


def test_parameters_that_are_views_of_one_another_stay() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 2, 1))
    model[1].weight.data = torch.randn(16, 8, 1, 1)[:8]
    model[1].bias.data = model[1].weight.data.reshape(-1)[:8]
    graph = secateur.analyze(model, IMAGE)
    assert {f.name: f.reason for f in graph.frozen}["1"].kind is Kind.SHARED_MEMORY


def test_a_plan_for_another_network_is_refused(model: nn.Sequential, plan: Plan) -> None:
    with pytest.raises(secateur.InvalidPlan, match=r"another network: it has '1.weight', which this one lacks"):
        secateur.shrink(nn.Sequential(nn.Conv2d(3, 8, 3)), plan)
    with pytest.raises(secateur.InvalidPlan, match=r"another network: it has '1.weight', which this one lacks"):
        secateur.verify(nn.Sequential(nn.Conv2d(3, 8, 3)), plan, IMAGE)
    deeper = nn.Sequential(*model, nn.Conv2d(4, 4, 1))
    with pytest.raises(secateur.InvalidPlan, match=r"it lacks '\d+\.weight', which this one has: analyse it anew"):
        secateur.shrink(deeper, plan)
    with pytest.raises(secateur.InvalidPlan, match=r"which this one has: analyse it anew"):
        secateur.Pruner(deeper, graph=plan.graph)
    small = secateur.shrink(model, plan)
    with pytest.raises(
        secateur.InvalidPlan, match=r"'0.weight' of shape \(8, 3, 3, 3\), found \(3, 3, 3, 3\): already"
    ):
        secateur.shrink_(small, plan)


def test_verify_reports_and_catches_a_wrong_graph(model: nn.Sequential, plan: Plan) -> None:
    result = secateur.verify(model, plan, IMAGE)
    assert result.difference < 1e-12
    assert result.modes == ("eval", "train")
    assert result.outputs == 12

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 8, 1)
            self.second = nn.Conv2d(8, 2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            return self.second(x * x.shape[1])

    liar = Sum()
    graph = secateur.analyze(liar, IMAGE, probe=False)
    with pytest.raises(secateur.NotEquivalent, match="because of group 'first'"):
        secateur.verify(liar, Plan.random(graph, 0.5), IMAGE)


def test_inexact_groups_are_marked_and_measured() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.GroupNorm(2, 8), nn.Conv2d(8, 2, 1))
    graph = secateur.analyze(model, IMAGE, inexact=True)
    assert [(g.size, g.exact) for g in graph.groups] == [(4, False)]
    assert "~" in str(graph)
    plan = Plan.random(graph, 0.5)
    result = secateur.verify(model, plan, IMAGE)
    assert not result.exact
    assert result.difference > 1e-6
    assert secateur.shrink(model, plan)[1].num_channels == 4


class Picky(nn.Module):
    """Returns the few best of many nearly equal values, as a detector does."""

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 1)
        self.second = nn.Conv2d(8, 2, 1)
        self.threshold = threshold

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.second(self.first(x).relu()).flatten()
        scores = scores[scores > self.threshold]
        values, indices = scores.round(decimals=14).sort(descending=True)
        return values[:50], indices[:50]


@pytest.mark.parametrize("threshold", [-100.0, 100.0])
def test_what_is_picked_by_value_is_compared_before_the_choice(threshold: float) -> None:
    model = Picky(threshold)
    image = IMAGE[:, :, :1, :1].expand(-1, -1, 8, 8)
    graph = secateur.analyze(model, image)
    assert [g.name for g in graph.groups] == ["first"]
    result = secateur.verify(model, Plan.random(graph, 0.5), image)
    assert result.outputs > 0
    assert result.difference < 1e-12


def test_a_model_that_insists_on_single_precision_is_compared_in_it() -> None:
    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 8, 1)
            self.kernel = torch.ones(4, 8, 1, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.conv2d(self.first(x.float()).float().sum(1, keepdim=True), self.kernel[:, :1])

    model = Single()
    graph = secateur.analyze(model, IMAGE)
    assert [g.size for g in graph.groups] == [8]
    assert secateur.verify(model, Plan.random(graph, 0.5), IMAGE).precision == torch.float32


def test_an_example_without_outputs_verifies_what_leads_there_if_anything() -> None:
    class Silent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 8, 1, bias=False)
            self.second = nn.Conv2d(8, 2, 1, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x))[:0]

    model = Silent()
    plan = Plan.random(secateur.analyze(model, IMAGE), 0.5)
    assert secateur.verify(model, plan, IMAGE).chosen
    with pytest.raises(secateur.NotEquivalent, match="gives no outputs to compare"):
        secateur.verify(model, plan, torch.zeros_like(IMAGE))


@pytest.mark.parametrize("width", [2, 6])
def test_einsum_does_without_a_product_where_one_channel_is_left(width: int) -> None:
    class Likeness(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queries, self.keys = nn.Conv2d(3, width, 1), nn.Conv2d(3, width, 1)
            self.values, self.last = nn.Conv1d(64, 6, 1), nn.Conv1d(6, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            likeness = torch.einsum("ncx,ncy->nxy", self.queries(x).flatten(2), self.keys(x).flatten(2))
            return self.last(torch.einsum("ncx,nxy->ncy", self.values(likeness.tanh()), likeness))

    model = Likeness()
    graph = secateur.analyze(model, torch.randn(2, 3, 8, 8))
    assert {group.name: group.size for group in graph.groups}["queries"] == width
    plan = Plan.keep(graph, {"queries": [1]})
    assert secateur.verify(model, plan, torch.randn(2, 3, 8, 8)).difference < 1e-12


def test_a_linear_layer_adds_its_bias_by_another_operator_where_one_channel_is_left() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.then, self.last = nn.Conv2d(3, 6, 3), nn.Linear(6, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.then(self.first(x).relu().permute(0, 2, 3, 1)).relu().mean((1, 2)))

    model, images = Last(), torch.randn(4, 3, 8, 8)
    graph = secateur.analyze(model, images)
    assert secateur.verify(model, Plan.keep(graph, {"first": [3]}), images).difference < 1e-12


def test_a_bias_may_wake_removed_channels_that_a_norm_puts_to_sleep() -> None:
    """The layer mixes columns of every channel by itself."""
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Linear(8, 8), nn.BatchNorm2d(8), nn.Conv2d(8, 2, 1))
    images = torch.randn(2, 3, 8, 8)
    graph = secateur.analyze(model, images)
    assert [group.name for group in graph.groups] == ["0"]
    assert secateur.verify(model, Plan.keep(graph, {"0": [1, 5, 6]}), images).difference < 1e-12


def test_what_is_added_to_a_product_may_be_far_larger_than_that() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 36, 200), nn.Linear(200, 4))
    model[3].weight.data *= 1e-9
    image = torch.randn(1, 3, 8, 8)
    plan = Plan.random(secateur.analyze(model, image), 0.3, seed=0)
    assert secateur.verify(model, plan, image).difference < 1e-12


def test_what_is_added_to_a_product_may_be_infinite_or_of_no_weight() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queries, self.keys = nn.Conv2d(3, 6, 1), nn.Conv2d(3, 6, 1)
            self.values, self.last = nn.Conv2d(3, 6, 1), nn.Conv1d(6, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            queries, keys, values = (layer(x).flatten(2) for layer in (self.queries, self.keys, self.values))
            later = x.new_full((64, 64), -torch.inf).triu(1).expand(len(x), -1, -1)
            likeness = torch.baddbmm(later, queries.mT, keys).softmax(2)
            nothing = torch.full_like(likeness, torch.nan)
            return self.last(values @ torch.baddbmm(nothing, likeness, likeness, beta=0))

    model, images = Attention(), torch.randn(2, 3, 8, 8)
    graph = secateur.analyze(model, images)
    assert [group.size for group in graph.groups] == [6, 6]
    assert secateur.verify(model, Plan.random(graph, 0.5), images).difference < 1e-12


def test_optimizers_whose_state_cannot_be_cut_are_refused_first() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 1))
    plan = Plan.random(secateur.analyze(model, IMAGE), 0.5)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = model(IMAGE).square().mean()
        value.backward()
        return value.detach()

    optimizer.step(loss)
    with pytest.raises(secateur.errors.InvalidOptimizer, match=r"LBFGS keeps '.*' of 0.weight.*make a new one"):
        secateur.shrink_(model, plan, optimizer)
    with pytest.raises(secateur.errors.InvalidOptimizer, match="got int"):
        secateur.shrink_(model, plan, 5)  # type: ignore[arg-type]
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
