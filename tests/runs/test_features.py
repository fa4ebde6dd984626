"""Distillation that looks at features too."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small import batches, briefly, finished, make_run, prepared, quick, same, states
from torch import Tensor, nn

from secateur import InvalidData, InvalidSetting, Plan, analyze, shrink
from secateur.runs.before_scores import find_place
from secateur.runs.prune import finish, training_phases
from secateur.runs.run import Run
from secateur.training.distill import distilled
from secateur.training.features import Features
from secateur.training.settings import Learning

IMAGES = torch.randn(5, 3, 8, 8, dtype=torch.float64)
BATCH = (IMAGES, torch.arange(5) % 3)


class Late(nn.Module):
    """Its modules do not run in the order in which they were made."""

    def __init__(self, act: Callable[[], nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)
        self.last = nn.Sequential(nn.BatchNorm2d(6), act())
        self.first = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), act())
        self.second = nn.Conv2d(4, 6, 3, padding=1)

    def features(self, images: Tensor) -> Tensor:
        return self.last(self.second(self.first(images)))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images).mean((2, 3)))


class Residual(nn.Module):
    """One block whose shortcut runs last, as in torchvision's."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.stem, self.conv, self.shortcut = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 6, 1), nn.Conv2d(4, 6, 1)
        self.norm, self.act, self.head = nn.BatchNorm2d(6), nn.ReLU(inplace), nn.Linear(6, 3)
        self.inplace = inplace

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images).relu()
        y, short = self.norm(self.conv(x)), self.shortcut(x)
        if self.inplace:
            y += short
        return self.head(self.act(y if self.inplace else y + short).mean((2, 3)))


class Excited(nn.Module):
    """Squeeze-and-excitation last: what its layers give is about gates."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gate, self.head = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 1), nn.Linear(6, 3)

    def forward(self, images: Tensor) -> Tensor:
        x = self.conv(images).relu()
        return self.head((x * self.gate(x.mean((2, 3), keepdim=True)).sigmoid()).mean((2, 3)))


class Shuffled(nn.Module):
    """The scores read the channels in another order than the convolution gives them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 6, 1), nn.Linear(6, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.conv(images).unflatten(1, (2, 3)).transpose(1, 2).flatten(1, 2).amax((2, 3)))


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.two = nn.Conv2d(3, 6, 1), nn.Linear(6, 3), nn.Linear(6, 2)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(images).relu().mean((2, 3))
        return self.one(x), self.two(x)


def pooled(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))


@pytest.mark.parametrize(
    ("model", "module", "entering"),
    [
        (Late(), "last", False),
        (Late(lambda: nn.ReLU(inplace=True)), "last", False),
        (Residual(inplace=False), "act", False),
        (Residual(inplace=True), "act", False),
        (Excited(), "head", True),
        (Shuffled(), "head", True),
        (pooled(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, affine=False)), "1", False),
        (pooled(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.ConvTranspose2d(5, 6, 2)), "2", False),
        (pooled(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.GroupNorm(2, 6)), "2", False),
        (nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 3, 1)), "1", False),
        (
            nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 9), nn.ReLU(), nn.Linear(9, 3)),
            "5",
            1,
        ),
    ],
)
def test_the_place_before_the_scores(model: nn.Module, module: str, entering: bool) -> None:
    model = model.eval()
    before, calls = states(model), IMAGES[:1].float()
    place = find_place(model, analyze(model, calls))
    assert (place.module, place.entering) == (module, entering)
    assert same(before, states(model))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())


def compared(student: nn.Module, teacher: nn.Module, graph: Any, present: Tensor, kept: Tensor, weight: float) -> Any:
    """The features as a run finds them."""
    place = find_place(student, graph)
    there, left = place.flags(present), place.flags(kept)
    own, target = (flags.nonzero()[:, 0] for flags in (left[there], left))
    return Features(place.module, place.entering, place.axis, own, target, weight)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def by_hand(own: Tensor, target: Tensor) -> Tensor:
    return ((own - target) ** 2).sum() / ((target - target.mean()) ** 2).sum()


def networks(kind: Callable[[], nn.Module] = Late) -> tuple[Any, Any]:
    torch.manual_seed(0)
    return kind().double().eval(), kind().double().eval()


@pytest.mark.parametrize("act", [nn.ReLU, lambda: nn.ReLU(inplace=True)])
@pytest.mark.parametrize("present", [[0, 2, 5], [0, 1, 2, 5], [0, 1, 2, 3, 4, 5]])
def test_features_of_the_channels_that_are_left_are_compared(present: list[int], act: Any) -> None:
    model, teacher = networks(lambda: Late(act))
    graph = analyze(model, IMAGES[:1])
    there, plan = (Plan.keep(graph, {"second": channels}) for channels in (present, [0, 2, 5]))
    student: Any = shrink(model, there)
    features = compared(student, teacher, graph, there.kept, plan.kept, weight=3.0)
    assert features.target.tolist() == [0, 2, 5]
    found = distilled(loss, teacher, 0.5, 2.0, features=features)(student, BATCH)
    plain = distilled(loss, teacher, 0.5, 2.0)(student, BATCH)
    own = student.features(IMAGES)
    left = [present.index(channel) for channel in (0, 2, 5)]
    expected = by_hand(own[:, left], teacher.features(IMAGES)[:, [0, 2, 5]])
    torch.testing.assert_close(found - plain, 0.5 * 3.0 * expected, rtol=1e-5, atol=1e-8)
    assert not any(module._forward_hooks for module in (*student.modules(), *teacher.modules()))


def test_channels_that_a_transposed_convolution_gives() -> None:
    model, teacher = networks(lambda: pooled(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.ConvTranspose2d(5, 6, 2)))
    graph = analyze(model, IMAGES[:1])
    plan = Plan.keep(graph, {"0": [0, 1, 4], "2": [3, 4, 5]})
    student: Any = shrink(model, plan)
    features = compared(student, teacher, graph, plan.kept, plan.kept, 1.0)
    own, target = student[:3](IMAGES), teacher[:3](IMAGES)[:, 3:]
    torch.testing.assert_close(features.distance(own, teacher[:3](IMAGES)), by_hand(own, target).float())


def test_what_enters_a_linear_layer_has_its_channels_last() -> None:
    model, teacher = networks(Excited)
    graph = analyze(model, IMAGES[:1])
    plan = Plan.keep(graph, {"conv": [1, 2, 4]})
    student: Any = shrink(model, plan)
    features = compared(student, teacher, graph, plan.kept, plan.kept, 1.0)
    assert (features.axis, features.target.tolist()) == (-1, [1, 2, 4])
    assert distilled(loss, teacher, 1.0, 2.0, features=features)(student, BATCH).isfinite()


def whole(model: nn.Module, teacher: nn.Module) -> Features:
    graph = analyze(model, IMAGES[:1])
    return compared(model, teacher, graph, graph.all_kept(), graph.all_kept(), 1.0)


def test_only_the_network_learns_and_not_from_a_twin() -> None:
    model, teacher = networks()
    features, before = whole(model, teacher), states(teacher)
    distilled(loss, teacher, 1.0, 2.0, features=features)(model, BATCH).backward()
    assert model.first[0].weight.grad.abs().sum() > 0
    assert same(before, states(teacher))
    assert all(parameter.grad is None for parameter in teacher.parameters())
    teacher.load_state_dict(model.state_dict())
    assert distilled(loss, teacher, 1.0, 2.0, features=features)(model, BATCH).detach() == pytest.approx(0, abs=1e-12)


def test_features_that_are_constant_do_not_count() -> None:
    model, teacher = networks()
    features = whole(model, teacher)
    nn.init.zeros_(teacher.last[0].weight)
    found = distilled(loss, teacher, 1.0, 2.0, features=features)(model, BATCH)
    torch.testing.assert_close(found, distilled(loss, teacher, 1.0, 2.0)(model, BATCH))
    found.backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters() if parameter.grad is not None)


def test_only_passes_of_the_model_itself_are_compared() -> None:
    model, teacher = networks()

    def own_loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        model.features(batch[0][:2])
        scores = model(batch[0])
        model.features(batch[0][:3])
        return F.cross_entropy(scores, batch[1])

    features = whole(model, teacher)
    values = [distilled(each, teacher, 0.5, 2.0, features=features)(model, BATCH) for each in (own_loss, loss)]
    torch.testing.assert_close(*values)


def test_what_has_no_such_features_is_refused() -> None:
    net, graph, task = prepared()
    settings = briefly(distill=0.5, distill_features=1.0)
    two = TwoHeads()
    with pytest.raises(InvalidSetting, match="no features to compare: got one, two, wanted one linear layer"):
        find_place(two, analyze(two, IMAGES[:1].float()))
    other = nn.Sequential(nn.Flatten(), nn.Linear(72, 4)).double()
    with pytest.raises(InvalidSetting, match=r"the teacher has no layer \w+, whose features"):
        make_run(settings, net, graph, task, teacher=other)
    wider = type(net)().double()
    wider.bare, wider.hidden = nn.Conv2d(8, 11, 3, stride=2).double(), nn.Linear(11, 9).double()
    place = find_place(net, graph)
    wider.hidden, wider.last = nn.Linear(11, 12).double(), nn.Linear(12, 4).double()
    assert place.module == "last"
    with pytest.raises(InvalidSetting, match="got 12 channels of last, wanted 9"):
        make_run(settings, net, graph, task, teacher=wider)


class Cropping(Late):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images[..., :6])


class Skipping(Late):
    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.second(self.first(images)).mean((2, 3)))


@pytest.mark.parametrize(
    ("kind", "match"),
    [(Cropping, r"got \(5, 6, 8, 8\), wanted \(5, 6, 8, 6\)"), (Skipping, "got no call, wanted a tensor")],
)
def test_features_that_do_not_match_say_so(kind: type[Late], match: str) -> None:
    model, teacher = Late().double(), kind().double()
    with pytest.raises(InvalidData, match=match):
        distilled(loss, teacher, 1.0, 2.0, features=whole(model, model))(model, BATCH)


def test_features_need_a_teacher() -> None:
    with pytest.raises(InvalidSetting, match="distill_features has no teacher"):
        Learning(distill_features=1.0)


def test_a_preset_does_without_features_where_there_are_none() -> None:
    images = torch.randn(8, 3, 8, 8)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), Heads())
    said: list[str] = []
    from secateur import TickTock, classification
    from secateur.runs.adapt import adapted

    task = classification([(images, torch.arange(8) % 3)], [(images, torch.arange(8) % 3)])
    graph = analyze(model, images[:1])
    settings = TickTock.of(keep_macs=0.5, distill=0.9, distill_features=5.0, adapt=True)
    changed = adapted(settings, model, graph, task, said.append)
    assert (changed.learning.distill, changed.learning.distill_features) == (0.9, 0.0)
    assert said == ["note: no features are compared, since there are no features to compare"]


class Heads(nn.Module):
    """Scores that two layers give together."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) + self.two(x)


def test_a_pruned_network_comes_nearer_to_the_features_of_the_whole_one() -> None:
    net, graph, task = prepared()
    plan = Plan.random(graph, 0.3)
    schedule = {"epochs": 6, "lr": 0.002, "lr_low": 0.0, "shape": "constant"}

    def distance(weight: float) -> float:
        settings = briefly(distill=1.0, distill_features=weight, fixed_statistics=True, **schedule)
        run = Run(settings, training_phases(settings), shrink(net, plan), plan, task, whole=net)
        model = finish(run).model.eval()
        features = compared(model, net, graph, plan.kept, plan.kept, 1.0)
        with torch.no_grad(), features.watched(model) as own, features.watched(net.eval()) as target:
            model(batches(1)[0][0])
            net(batches(1)[0][0])
        return float(features.distance(features.last(own), features.last(target)))

    assert distance(5.0) < 0.95 * distance(0.0)


def test_fine_tuning_looks_at_features_and_tocks_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("secateur.runs.lessons.distilled", lambda *given: seen.append(given[5]) or distilled(*given))
    net, graph, task = prepared()
    rates = {"finetune_lr": 1e-4, "finetune_lr_low": 0.0}
    said: list[Any] = []
    settings = quick(keep_macs=0.5, distill=0.5, distill_features=2.0, **rates)
    finished(settings, net, graph, task, progress=said.append)
    assert "learning from the features that enter last, too" in said
    ticks, tune = seen
    assert ticks is None
    assert tune.weight == 2.0
    assert 0 < len(tune.own) <= 9
