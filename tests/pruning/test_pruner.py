"""A Pruner in a loop of one's own: where it stops, what it refuses, and that it can be saved and continued."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gated import IMAGE, Custom, network
from torch import Tensor, nn

from secateur import Budget, InvalidSetting, Limits, Pruner, Score, UnreachableBudget, analyze
from secateur.models.resnet_cifar import CifarResNet

IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Fixed(Score):
    """The first channel is worth most."""

    def end(self) -> Tensor:
        return torch.arange(self.gates.graph.num_channels).flip(0).double()


class Given(Score):
    """Gives what it was given."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def end(self) -> Tensor:
        return self.values


def small_pruner(score: Any = "taylor", limits: Limits | None = None, **options: Any) -> Pruner:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 1), nn.Conv2d(6, 2, 1))
    return Pruner(model, IMAGES, score=score, limits=limits, **options)


# Widths and budgets.


@pytest.mark.parametrize("multiple", [2, 4])
def test_widths_are_multiples_or_whole(multiple: int) -> None:
    pruner = Pruner(CifarResNet(8, width=0.4), IMAGES, score=Fixed(), limits=Limits(multiple_of=multiple))
    for _ in range(3):
        before, filters = pruner.filters, pruner.filters - sum(f.size for f in pruner.graph.frozen)
        removal = pruner.prune(fraction=0.2)
        assert before - pruner.filters == removal.filters <= max(round(0.2 * filters), 3 * multiple)
        for group in pruner.graph.groups:
            width = int(pruner.kept[group.span].sum())
            assert width == group.size or width % multiple == 0


def convolutions(pruner: Pruner, share: float) -> list[nn.Conv2d]:
    pruner.prune(budget=Budget(macs=share))
    return [layer for layer in pruner.finish().children() if isinstance(layer, nn.Conv2d)]


def test_layers_in_groups_have_multiples_as_widths() -> None:
    body = nn.Conv2d(3, 32, 1), nn.ReLU(), nn.Conv2d(32, 32, 3, groups=8), nn.ReLU(), nn.Conv2d(32, 32, 1), nn.ReLU()
    model = nn.Sequential(*body, nn.Conv2d(32, 2, 1))
    layers = convolutions(Pruner(model, IMAGES, score=Fixed(), limits=Limits(multiple_of=8)), 0.3)
    widths = [layer.out_channels for layer in layers[:-1]]
    assert all(width < 32 and width % 8 == 0 for width in widths), widths
    assert layers[1].groups == widths[1] // 4


def test_inputs_behind_a_pixel_shuffle_are_multiples_too() -> None:
    body = nn.Conv2d(3, 128, 3), nn.PixelShuffle(2), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Conv2d(32, 2, 1)
    pruner = Pruner(nn.Sequential(*body), IMAGES, score=Fixed(), limits=Limits(multiple_of=8))
    layers = convolutions(pruner, 0.25)
    assert layers[0].out_channels < 128
    assert all(layer.in_channels % 8 == 0 for layer in layers[1:])


@pytest.mark.parametrize("kind", ["macs", "params", "filters"])
def test_it_lands_on_its_budget_and_stops_there(kind: str) -> None:
    model = CifarResNet(8, width=0.5)
    pruner = Pruner(model, graph=analyze(model, IMAGES, ignore=["stage1*"], probe=False), score=Fixed())
    floors = {g.name: max(1, g.size // 10) for g in pruner.graph.groups}
    assert not any("stage1" in layer for group in pruner.graph.groups for layer in group.layers)
    budget = Budget(**{kind: 0.6})
    while not (removal := pruner.prune(0.05, budget)).met:
        assert removal.filters
    assert pruner.prune(0.05, budget).filters == 0
    total = {"macs": pruner.graph.macs, "params": pruner.graph.params, "filters": pruner.graph.num_filters}[kind]
    left = {"macs": pruner.cost.macs, "params": pruner.cost.params, "filters": pruner.filters}[kind]
    assert 0.55 * total < left <= 0.6 * total
    assert all(int(pruner.kept[g.start : g.start + g.size].sum()) >= floors[g.name] for g in pruner.graph.groups)


def test_a_fraction_is_one_of_the_filters_that_remain() -> None:
    pruner = small_pruner(Given(torch.arange(14.0)), Limits(min_ratio=0.0))
    assert [pruner.prune(fraction=0.5).filters for _ in range(3)] == [7, 4, 1]  # of 14, 7 and 3 that can go


# What is refused; nothing changes then.


def assert_refused(pruner: Pruner, call: Callable[[], Any], error: type[InvalidSetting]) -> InvalidSetting:
    state, kept = copy.deepcopy(pruner.model.state_dict()), pruner.kept.clone()
    with pytest.raises(error) as caught:
        call()
    now = pruner.model.state_dict()
    assert list(now) == list(state)
    assert all(torch.equal(now[name], state[name]) for name in state)
    assert torch.equal(pruner.kept, kept)
    return caught.value


@pytest.mark.parametrize(
    ("arguments", "got"),
    [
        ({"fraction": 0}, 0),
        ({"fraction": 1.5}, 1.5),
        ({}, None),
        ({"fraction": 0.5}, None),  # the score has seen no gradient
    ],
    ids=str,
)
def test_wrong_arguments(arguments: dict[str, Any], got: Any) -> None:
    pruner = small_pruner()
    assert assert_refused(pruner, lambda: pruner.prune(**arguments), InvalidSetting).got == got


def test_a_wrong_optimizer_or_order_of_calls() -> None:
    pruner = small_pruner()
    assert_refused(pruner, pruner.observe, InvalidSetting)
    phis = {id(phi) for phi in pruner.gates.phis}
    optimizer = torch.optim.SGD([p for p in pruner.model.parameters() if id(p) not in phis], lr=0.1)
    pruner.model(IMAGES).square().mean().backward()
    pruner.observe()
    error = assert_refused(pruner, lambda: pruner.prune(fraction=0.5, optimizer=optimizer), InvalidSetting)
    assert "1.gate_phi" in error.what
    assert_refused(pruner, lambda: small_pruner(rank="score_per_macs"), InvalidSetting)
    assert_refused(pruner, lambda: Pruner(pruner.model), InvalidSetting)
    assert_refused(pruner, lambda: Pruner(pruner.model, pruner.graph), InvalidSetting)


def test_only_gradients_that_are_not_finite() -> None:
    pruner = small_pruner()
    (pruner.model(IMAGES).square().mean() * float("nan")).backward()
    pruner.observe()
    assert_refused(pruner, lambda: pruner.prune(0.5), InvalidSetting)


@pytest.mark.parametrize(
    "values",
    [
        [0.5] * 14,
        None,
        torch.rand(13),
        torch.rand(14, 1),
        torch.rand(14).to(torch.complex64),
        torch.arange(14.0).div(0),
    ],
    ids=["list", "none", "too few", "matrix", "complex", "nan"],
)
def test_values_that_are_no_score(values: Any) -> None:
    pruner = small_pruner(Given(values))
    error = assert_refused(pruner, lambda: pruner.prune(0.5), InvalidSetting)
    assert "Given" in error.what
    assert error.got is not None


@pytest.mark.parametrize(
    "change", [torch.Tensor.half, torch.Tensor.long, lambda t: t.requires_grad_(), lambda t: t - 99]
)
def test_scores_are_numbers_of_any_kind(change: Callable[[Tensor], Tensor]) -> None:
    pruner = small_pruner(Given(change(torch.arange(14.0))))
    pruner.prune(fraction=0.2)
    assert pruner.kept.tolist() == [False] * 3 + [True] * 11


def test_negative_scores_cannot_be_divided_by_what_is_saved() -> None:
    pruner = small_pruner(Given(torch.arange(14.0) - 3), rank="score_per_mac")
    assert assert_refused(pruner, lambda: pruner.prune(0.5), InvalidSetting).got == "-3"


def test_a_score_without_an_end() -> None:
    with pytest.raises(NotImplementedError):
        small_pruner(Score()).prune(0.5)


def test_an_unreachable_budget_says_how_far_it_goes_and_which_floors_hold() -> None:
    pruner = small_pruner(Fixed(), Limits(min_ratio=0.5))
    error = assert_refused(pruner, lambda: pruner.prune(budget=Budget(filters=0.3)), UnreachableBudget)
    assert str(error.got).startswith("56.2%")
    assert "4 of 8" in str(error.remedy)
    held = small_pruner(Fixed(), Limits(at_least={"*": 1.0}))
    assert_refused(held, lambda: held.prune(budget=Budget(filters=0.3)), UnreachableBudget)
    bare = small_pruner(Fixed(), Limits(min_ratio=0.0))
    error = assert_refused(bare, lambda: bare.prune(budget=Budget(filters=0.1)), UnreachableBudget)
    assert "min_ratio" not in str(error.remedy)
    assert pruner.prune(budget=Budget(filters=0.57)).met
    assert [int(pruner.kept[:8].sum()), int(pruner.kept[8:].sum())] == [4, 3]


def test_nothing_is_observed_or_pruned_after_the_end() -> None:
    pruner = small_pruner()
    pruner.finish()
    for act in (pruner.observe, lambda: pruner.prune(0.5), lambda: pruner.add_l1_(0.1)):
        with pytest.raises(InvalidSetting):
            act()


# Members behind a gate that could make a channel non-zero again.


def shifted() -> nn.Module:
    parts = {"stem": nn.Conv2d(3, 8, 1), "norm": nn.BatchNorm2d(8), "head": nn.Conv2d(8, 2, 1)}
    shift = nn.Parameter(torch.ones(8, 1, 1))
    return Custom(lambda m, x: m.head(F.relu(m.norm(m.stem(x)) + m.shift)), **parts, shift=shift)


def test_channels_behind_a_learnt_shift_are_cut_even_where_they_would_be_masked() -> None:
    model = shifted()
    pruner = Pruner(model, IMAGE, score="random")
    assert_refused(pruner, lambda: pruner.prune(fraction=0.5, cut=False), InvalidSetting)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):  # training continues
        optimizer.zero_grad()
        model(IMAGE).square().mean().backward()
        optimizer.step()
        pruner.prune(fraction=0.3, cut=False, optimizer=optimizer)
    masked = model.eval()(IMAGE)
    pruner.cut_()
    torch.testing.assert_close(model(IMAGE), masked)


def test_the_model_moves_after_the_pruner_is_made() -> None:
    """Any other device would do, and raise; this one every machine has."""
    model = network()
    pruner = Pruner(model, IMAGE)
    model.to("meta")
    model(IMAGE.to("meta")).square().mean().backward()
    pruner.observe()
    assert pruner.score.state()["total"].device.type == "meta"


# A loop of one's own that is saved and continued.

GRAPH = analyze(network().double(), IMAGE.double())


class Loop:
    """Twelve steps of training; a part is removed after every fourth."""

    def __init__(self, score: str, cut: bool) -> None:
        self.model, self.cut = network().double(), cut
        self.pruner = Pruner(self.model, graph=GRAPH, score=score)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.step = 0

    def until(self, step: int) -> "Loop":
        while self.step < step:
            self.optimizer.zero_grad()
            images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(self.step), dtype=torch.float64)
            self.model(images).square().mean().backward()
            self.pruner.observe()
            self.pruner.add_l1_(1e-3)
            self.optimizer.step()
            self.step += 1
            if self.step % 4 == 0:
                self.pruner.prune(0.2, optimizer=self.optimizer, cut=self.cut)
        return self

    def saved(self) -> bytes:
        state = {"step": self.step, "pruner": self.pruner.state_dict(), "optimizer": self.optimizer.state_dict()}
        file = io.BytesIO()
        torch.save({**state, "model": self.model.state_dict()}, file)
        return file.getvalue()

    def load(self, data: bytes) -> "Loop":
        state = torch.load(io.BytesIO(data), weights_only=True)
        self.step = state["step"]
        self.pruner.load_state_dict(state["pruner"], self.optimizer)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        return self


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("score", ["taylor", "apoz", "slim"])
def test_a_loop_that_is_saved_and_continued_ends_with_the_same_bits(score: str, cut: bool) -> None:
    whole = Loop(score, cut).until(12)
    expected = whole.pruner.finish().state_dict()
    for stop in (4, 6):
        continued = Loop(score, cut).load(Loop(score, cut).until(stop).saved()).until(12)
        assert torch.equal(continued.pruner.kept, whole.pruner.kept)
        found = continued.pruner.finish().state_dict()
        assert list(found) == list(expected)
        assert all(torch.equal(found[name], expected[name]) for name in expected), stop


def test_a_pruner_that_has_merged_its_gates_is_continued() -> None:
    """Fine-tuning, with channels that are left as zeros."""

    def merged() -> Loop:
        loop = Loop("taylor", cut=True).until(8)
        loop.pruner.merge_()
        return loop

    loop = merged()
    images = IMAGE.double()
    other = Loop("taylor", cut=True).load(loop.saved())
    assert other.pruner.gates.merged
    assert torch.equal(other.model.eval()(images), loop.model.eval()(images))
    assert torch.equal(other.pruner.finish()(images), loop.pruner.finish()(images))
