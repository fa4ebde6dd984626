"""Numbers at the edge: each gives a finite network within its budget, or an error that says what to do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small import CLASSES, STEPS, Net, batches, finished, graph_of, make_run, prepared, quick, same, states
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import secateur
from secateur import InvalidData, InvalidSetting, Result, Score, Task, UnreachableBudget, classification


def changed(change: Callable[[Net], object]) -> Net:
    net = prepared()[0]
    with torch.no_grad():
        change(net)
    return net


def pruned(net: nn.Module | None = None, task: Task | None = None, **values: Any) -> Result:
    given, graph, usual = prepared()
    settings = quick(**{"finetune_epochs": 1, "tick_removes": 0.5, **values})
    return finished(settings, net or given, graph, task or usual)


def assert_finite(result: Result, share: float = 0.5) -> None:
    assert all(bool(tensor.isfinite().all()) for tensor in result.model.state_dict().values())
    assert bool(result.model.eval()(batches(1)[0][0]).isfinite().all())
    assert result.after.macs <= share * result.before.macs


DEGENERATE: dict[str, Callable[[Net], object]] = {
    "no scale": lambda net: net.norm.weight.zero_(),
    "no scale and no shift": lambda net: (net.norm.weight.zero_(), net.norm.bias.zero_()),
    "a denormal scale": lambda net: net.norm.weight.fill_(1e-310),
    "no variance": lambda net: net.inner_norm.running_var.zero_(),
    "a denormal variance": lambda net: net.inner_norm.running_var.fill_(1e-310),
    "a huge variance": lambda net: net.inner_norm.running_var.fill_(1e300),
    "a dead layer": lambda net: net.inner_norm.bias.fill_(-1e9),
    "filters of zeros": lambda net: (net.bare.weight.zero_(), net.bare.bias.zero_()),
    "filters that are all alike": lambda net: net.bare.weight.fill_(0.1),
    "weights of zeros": lambda net: [each.zero_() for name, each in net.named_parameters() if "last" not in name],
}


@pytest.mark.parametrize("repair", [0, 16])
@pytest.mark.parametrize("name", DEGENERATE)
def test_degenerate_layers(name: str, repair: int) -> None:
    net = changed(DEGENERATE[name])
    before = states(net)
    assert_finite(pruned(net, repair=repair))
    assert same(states(net), before)


SCORES = ["fisher", "slim", "pcnn", "apoz", "residual", "measured", "l1", "l2", "fpgm", "random"]


@pytest.mark.parametrize("score", SCORES)
def test_scores_of_dead_layers(score: str) -> None:
    assert_finite(pruned(changed(DEGENERATE["weights of zeros"]), score=score))


class Same(Score):
    """One number for all."""

    def __init__(self, value: float) -> None:
        self.value = value

    def end(self) -> Tensor:
        return torch.full((self.gates.graph.num_channels,), self.value)


@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, torch.inf, -torch.inf])
def test_equal_scores_leave_something_of_each_group(value: float) -> None:
    result = pruned(score=Same(value))
    assert_finite(result)
    plan = result.plan
    assert all(bool(plan.kept[group.span].any()) for group in plan.graph.groups)


def test_scores_that_are_no_numbers() -> None:
    with pytest.raises(InvalidSetting, match="is not a number: got NaN for"):
        pruned(score=Same(torch.nan))


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "negative": lambda out, labels: -10 - out.softmax(1).gather(1, labels[:, None]).mean(),
    "zero": lambda out, labels: 0 * out.sum(),
    "tiny": lambda out, labels: 1e-300 * F.cross_entropy(out, labels),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str) -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return LOSSES[name](model(batch[0]), batch[1])

    assert_finite(pruned(task=Task(train=batches(), loss=loss)))


def test_labels_that_are_all_ignored() -> None:
    ignored = [(images, torch.full_like(labels, -100)) for images, labels in batches()]
    assert_finite(pruned(task=classification(ignored, batches(1))))


def examples(count: int, labels: list[int]) -> TensorDataset:
    return TensorDataset(batches(1)[0][0][:count], torch.tensor(labels))


def test_fewer_images_than_a_batch() -> None:
    loader = DataLoader(examples(5, [0, 1, 2, 3, 0]), 16)
    assert_finite(pruned(task=classification(loader, loader)))
    with pytest.raises(InvalidData, match="the training data are empty"):
        pruned(task=classification(DataLoader(examples(5, [0, 1, 2, 3, 0]), 16, drop_last=True), loader))


def test_images_one_by_one() -> None:
    assert_finite(pruned(task=classification(DataLoader(examples(3, [0, 1, 2]), 1), batches(1))))


def test_a_tick_of_classes_that_have_few_images_or_none() -> None:
    loader = DataLoader(examples(6, [0, 0, 0, 0, 2, 2]), 4)
    assert_finite(pruned(task=classification(loader, batches(1)), tick_per_class=3))


@pytest.mark.parametrize("values", [{}, {"at_least": {"*": 1.0}}, {"min_channels": 1000}, {"repair": 16}])
@pytest.mark.parametrize("budget", ["keep_macs", "keep_params", "keep_filters"])
def test_a_budget_of_everything_removes_nothing(budget: str, values: dict[str, Any]) -> None:
    result = pruned(**{budget: 1.0}, **values)
    assert_finite(result, 1.0)
    assert bool(result.plan.kept.all())


@pytest.mark.parametrize("floors", [{"at_least": {"*": 1.0}}, {"min_channels": 1000}, {"min_ratio": 1.0}])
def test_floors_that_leave_nothing_to_remove(floors: dict[str, Any]) -> None:
    with pytest.raises(UnreachableBudget, match=r"100\.0% of the MACs with every group at its floor.*keeps 8 of 8"):
        make_run(quick(**floors), *prepared())


class Pooled(nn.Module):
    """A norm behind a global pooling sees one value per channel and image."""

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(2, 6, 3), nn.Linear(6, CLASSES)
        self.norm = nn.BatchNorm1d(6, eps=eps)

    def forward(self, images: Tensor) -> Tensor:
        return self.last(self.norm(self.conv(images).mean((2, 3))))


@pytest.mark.parametrize("count", [1, 17])
def test_a_norm_that_cannot_train_on_the_last_image_is_named(count: int) -> None:
    images, labels = (torch.cat(parts) for parts in zip(*batches(2), strict=True))
    loader = DataLoader(TensorDataset(images[:count], labels[:count]), 16)
    net = Pooled().double()
    with pytest.raises(InvalidData, match=r"the norm 'norm' cannot train on this batch.*drop_last"):
        finished(quick(), net, graph_of(Pooled), classification(loader, batches(1)))


def test_a_norm_without_an_eps_is_named() -> None:
    try:
        F.batch_norm(torch.rand(2, 1), None, None, training=True, eps=0.0)
        pytest.skip("this torch takes a norm without an eps")
    except ValueError:
        pass
    net = Pooled(eps=0.0).double()
    with pytest.raises(InvalidData, match=r"the norm 'norm' cannot train.*Give it an eps above 0"):
        finished(quick(), net, graph_of(Pooled), classification(batches(), batches(1)))


@pytest.mark.parametrize(
    ("loss", "what"),
    [
        (lambda model, batch: model(batch[0]).sum().detach(), "the loss has no gradient"),
        (lambda model, batch: model(batch[0]).sum().item(), "the loss is not a tensor"),
        (lambda model, batch: model(batch[0]), "the loss is not a scalar"),
    ],
)
def test_a_wrong_loss_is_named_before_it_is_timed(loss: Any, what: str) -> None:
    images = batches(1)[0][0]
    with pytest.raises(InvalidData, match=what):
        secateur.prune(prepared()[0], images[:2], Task(batches(STEPS), loss), settings=quick(), progress=print)
