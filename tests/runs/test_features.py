"""Distillation that looks at features too."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small import Net, batches, briefly, finished, make_run, prepared, quick, same, states
from torch import Tensor, nn

from secateur import InvalidData, InvalidSetting, Plan, analyze, shrink
from secateur.runs.lessons import find_features
from secateur.runs.prune import finish, training_phases
from secateur.runs.run import Run
from secateur.training.distill import distilled
from secateur.training.features import Features
from secateur.training.settings import Learning


class Late(nn.Module):
    """Its last norm is not the one that was made last, and no convolution follows."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.BatchNorm2d(6)
        self.first = nn.BatchNorm2d(4)
        self.convs = nn.ModuleList([nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1)])
        self.head = nn.Linear(6, 3)

    def features(self, images: Tensor) -> Tensor:
        return self.last(self.convs[1](self.first(self.convs[0](images)).relu()))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images).relu().mean((2, 3)))


def networks() -> tuple[Late, Late]:
    torch.manual_seed(0)
    return Late().double().eval(), Late().double().eval()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


IMAGES = torch.randn(5, 3, 8, 8, dtype=torch.float64)
BATCH = (IMAGES, torch.arange(5) % 3)


def by_hand(own: Tensor, target: Tensor) -> Tensor:
    return ((own - target) ** 2).sum() / ((target - target.mean()) ** 2).sum()


@pytest.mark.parametrize("present", [[0, 2, 5], [0, 1, 2, 5], [0, 1, 2, 3, 4, 5]])
def test_features_of_the_channels_that_are_left_are_compared(present: list[int]) -> None:
    model, teacher = networks()
    graph = analyze(model, IMAGES[:1])
    there, plan = (Plan.keep(graph, {"convs.1": channels}) for channels in (present, [0, 2, 5]))
    student: Any = shrink(model, there)
    features = find_features(student, teacher, graph, there.kept, plan.kept, weight=3.0)
    assert (features.layer, features.target.tolist()) == ("last", [0, 2, 5])
    found = distilled(loss, teacher, 0.5, 2.0, features=features)(student, BATCH)
    plain = distilled(loss, teacher, 0.5, 2.0)(student, BATCH)
    own = student.features(IMAGES)
    left = [present.index(channel) for channel in (0, 2, 5)]
    expected = by_hand(own[:, left], teacher.features(IMAGES)[:, [0, 2, 5]])
    torch.testing.assert_close(found - plain, 0.5 * 3.0 * expected, rtol=1e-5, atol=1e-8)
    assert not any(module._forward_hooks for module in (*student.modules(), *teacher.modules()))


def test_only_the_network_learns_and_not_from_a_twin() -> None:
    model, teacher = networks()
    graph = analyze(model, IMAGES[:1])
    features = find_features(model, teacher, graph, graph.all_kept(), graph.all_kept(), 1.0)
    before = states(teacher)
    distilled(loss, teacher, 1.0, 2.0, features=features)(model, BATCH).backward()
    weight: Any = model.convs[0].weight.grad
    assert weight is not None
    assert weight.abs().sum() > 0
    assert same(before, states(teacher))
    assert all(parameter.grad is None for parameter in teacher.parameters())
    twin = distilled(loss, model, 1.0, 2.0, features=features)(Late().double().eval(), BATCH)
    assert twin > 0
    teacher.load_state_dict(model.state_dict())
    assert distilled(loss, teacher, 1.0, 2.0, features=features)(model, BATCH).detach() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("head", [(nn.Flatten(), nn.Linear(180, 2)), (nn.Conv2d(5, 2, 1),)])
def test_the_layer_before_the_scores_counts(head: tuple[nn.Module, ...]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 1), nn.ReLU(), *head)
    graph = analyze(model, IMAGES[:1].float())
    assert find_features(model, model, graph, graph.all_kept(), graph.all_kept(), 1.0).layer == "2"


def test_what_has_no_features_or_other_ones_is_refused() -> None:
    model, teacher = networks()
    graph = analyze(model, IMAGES[:1])
    kept = graph.all_kept()
    plain = nn.Sequential(nn.Flatten(), nn.Linear(192, 2))
    flat = analyze(plain, IMAGES[:1].float())
    with pytest.raises(InvalidSetting, match="no batch norm and no convolution"):
        find_features(plain, plain, flat, flat.all_kept(), flat.all_kept(), 1.0)
    with pytest.raises(InvalidSetting, match="the teacher has no layer last"):
        find_features(model, plain, graph, kept, kept, 1.0)
    teacher.last = nn.BatchNorm2d(7)
    with pytest.raises(InvalidSetting, match="got 7 channels of last, wanted 6"):
        find_features(model, teacher, graph, kept, kept, 1.0)


class Resizing(Late):
    """Looks at the images in another size, or twice."""

    def __init__(self, size: int, times: int) -> None:
        super().__init__()
        self.size, self.times = size, times

    def forward(self, images: Tensor) -> Tensor:
        scores = [super(Resizing, self).forward(images[..., : self.size]) for _ in range(self.times)]
        return torch.stack(scores).mean(0)


@pytest.mark.parametrize(
    ("teacher", "match"),
    [
        (Resizing(6, 1), r"got \(5, 6, 8, 8\), wanted \(5, 6, 8, 6\)"),
        (Resizing(8, 2), "1 calls in the network, 2 in"),
    ],
)
def test_features_that_do_not_match_say_so(teacher: Resizing, match: str) -> None:
    model = networks()[0]
    features = Features("last", torch.arange(6), torch.arange(6), 1.0)
    with pytest.raises(InvalidData, match=match):
        distilled(loss, teacher.double(), 1.0, 2.0, features=features)(model, BATCH)


def test_features_need_a_teacher() -> None:
    with pytest.raises(InvalidSetting, match="distill_features has no teacher"):
        Learning(distill_features=1.0)


def test_a_pruned_network_comes_nearer_to_the_features_of_the_whole_one() -> None:
    net, graph, task = prepared()
    plan = Plan.random(graph, 0.3)
    torch.manual_seed(3)

    def distance(weight: float) -> float:
        settings = briefly(
            epochs=6,
            distill=1.0,
            distill_features=weight,
            fixed_statistics=True,
            lr=0.002,
            lr_low=0.0,
            shape="constant",
        )
        run = Run(settings, training_phases(settings), shrink(net, plan), plan, task, whole=net)
        result = finish(run)
        features = find_features(result.model, net, graph, plan.kept, plan.kept, 1.0)
        image = batches(1)[0][0]
        with torch.no_grad(), features.watched(result.model) as own, features.watched(net.eval()) as target:
            result.model.eval()(image)
            net(image)
        return float(features.distance(own, target))

    assert distance(5.0) < 0.9 * distance(0.0)


def test_fine_tuning_looks_at_features_and_tocks_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("secateur.runs.lessons.distilled", lambda *given: seen.append(given[5]) or distilled(*given))
    net, graph, task = prepared()
    finished(
        quick(keep_macs=0.5, distill=0.5, distill_features=2.0, finetune_lr=1e-4, finetune_lr_low=0.0), net, graph, task
    )
    ticks, tune = seen
    assert ticks is None
    assert tune.weight == 2.0
    assert 0 < len(tune.own) <= net.get_submodule(tune.layer).out_channels  # pyright: ignore


def test_a_teacher_without_such_features_is_refused_before_the_run() -> None:
    net, graph, task = prepared()
    other = nn.Sequential(nn.Flatten(), nn.LazyLinear(3)).double()
    other(batches(1)[0][0])
    with pytest.raises(InvalidSetting, match="the teacher has no layer"):
        make_run(briefly(distill=0.5, distill_features=1.0), net, graph, task, teacher=other)


def test_the_whole_net_is_not_changed() -> None:
    net = Net().double()
    before = states(net)
    graph = analyze(net, batches(1)[0][0])
    find_features(net, net, graph, graph.all_kept(), graph.all_kept(), 1.0)
    assert same(before, states(net))
    assert not any(module._forward_hooks for module in net.modules())
