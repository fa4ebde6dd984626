"""Runs on images without labels: channels are scored, and nothing trains but by a teacher alone."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small import Net, batches, briefly, finished, make_run, prepared, quick, same, states
from torch import Tensor, nn

from secateur import InvalidSetting, Plan, Result, TickTock, Training, analyze, classification
from secateur.runs.prune import finish, training_phases
from secateur.runs.run import Run
from secateur.training.distill import distilled
from secateur.training.task import unlabelled, without_labels


@pytest.mark.parametrize(
    ("settings", "baseline", "phase"),
    [
        (briefly(), None, "train"),
        (quick(), None, "finetune"),
        (quick(retrain_epochs=1, finetune_epochs=0), None, "retrain"),
        (quick(finetune_epochs=0), briefly(), "baseline"),
    ],
)
def test_nothing_trains_without_labels(settings: TickTock | Training, baseline: Training | None, phase: str) -> None:
    net, graph, _ = prepared()
    images = [batch for batch, _ in batches()]
    task = unlabelled(images, images, net)
    with pytest.raises(InvalidSetting, match=f"^{phase} needs labels"):
        make_run(settings, net, graph, task, baseline)


def test_a_network_is_scored_without_labels() -> None:
    net, graph, _ = prepared()
    images = [batch for batch, _ in batches()]
    before = states(net)
    settings = TickTock.of(keep_macs=0.5, tick_removes=0.15).without_training()
    result = finished(settings, net, graph, unlabelled(images, images, net))
    assert same(states(net), before)
    with torch.no_grad():
        whole, cut = (torch.cat([model.eval()(each).argmax(1) for each in images]) for model in (net, result.model))
    assert result.metrics_before == {"agreement": 100}
    assert result.metrics == {"agreement": pytest.approx(100 * float((whole == cut).double().mean()))}
    assert result.plan.cost.macs <= 0.5 * graph.macs


UNTRAINED = TickTock.of(keep_macs=0.5, tick_removes=0.15).without_training()


def distil(task: Any, **values: Any) -> Result:
    """Prune without training, and then learn from the whole network alone."""
    net, graph, _ = prepared()
    settings = UNTRAINED.but(**{"finetune_epochs": 3, "finetune_lr": 0.05, "distill": 1.0, **values})
    return finished(settings, net, graph, task)


def test_a_network_learns_from_the_whole_one_without_labels() -> None:
    net, graph, task = prepared()
    whole = finished(briefly(epochs=10), net, graph, task).model
    images = [batch for batch, _ in batches()]
    task = unlabelled(images, images, whole)
    cut = UNTRAINED.but(keep_macs=0.3, repair=0)

    def distance(settings: TickTock) -> float:
        pruned = finished(settings, whole, graph, task).model
        with torch.no_grad():
            ours, theirs = (torch.cat([m.eval()(each) for each in images]).log_softmax(1) for m in (pruned, whole))
        return float(F.kl_div(ours, theirs, log_target=True, reduction="batchmean"))

    assert distance(cut.but(finetune_epochs=10, finetune_lr=0.02, distill=1.0)) < 0.5 * distance(cut)


def test_labels_that_are_not_looked_at_do_not_matter() -> None:
    right = batches()
    wrong = [(images, labels.flip(0).roll(1)) for images, labels in right]
    assert not all(torch.equal(a, b) for (_, a), (_, b) in zip(right, wrong, strict=True))
    one, other = (distil(without_labels(classification(data, batches(2)))) for data in (right, wrong))
    assert same(states(one.model), states(other.model))
    assert set(one.metrics) == {"accuracy", "loss"}
    labelled = distil(classification(right, batches(2)), tick_lr=0.0)
    assert not same(states(one.model), states(labelled.model))  # there labels score the channels


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_with_a_weight_of_one_the_loss_of_the_task_does_not_matter(broken: float) -> None:
    torch.manual_seed(0)
    model, teacher = Net().double(), Net().double()
    images = batches(1)[0][0]
    found = distilled(lambda model, images: model(images).sum() * broken, teacher, 1.0, 2.0)(model, images)
    with torch.no_grad():
        ours, theirs = ((network(images) / 2).log_softmax(1) for network in (model, teacher))
    expected = 4 * F.kl_div(ours, theirs, log_target=True, reduction="batchmean")
    torch.testing.assert_close(found.detach(), expected)


class Dropping(Net):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout()

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(self.drop(images))


def test_fixed_statistics_stay_in_ticks_and_tocks() -> None:
    net, graph, task = prepared()
    for norm in (module for module in net.modules() if isinstance(module, nn.BatchNorm2d)):
        norm.running_mean = torch.full_like(norm.weight, 7.0)
    result = finished(quick(keep_macs=0.8, fixed_statistics=True), net, graph, task)
    norms = [module for module in result.model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert norms
    assert all(norm.running_mean is not None and bool((norm.running_mean == 7).all()) for norm in norms)


def test_fixed_statistics_stay_and_are_used_in_training() -> None:
    _, _, task = prepared()
    net = Dropping().double()
    graph = analyze(net, batches(1)[0][0])
    torch.manual_seed(1)
    for norm in (module for module in net.modules() if isinstance(module, nn.BatchNorm2d)):
        norm.running_mean = torch.randn_like(norm.weight)
        norm.running_var = torch.rand_like(norm.weight) + 0.5
    modes: list[dict[str, bool]] = []
    whole = Plan(graph, graph.all_kept())
    settings = briefly(epochs=1, fixed_statistics=True, momentum=0.0, weight_decay=0.0, lr=0.05, shape="constant")
    run = Run(settings, training_phases(settings), net, whole, task)
    run.on_step = lambda *_: modes.append({name: module.training for name, module in run.model.named_modules()})
    result = finish(run)
    layers = {name for name, module in net.named_modules() if name}
    assert modes
    assert all({name for name, training in seen.items() if not training} == layers for seen in modes)
    # The same training by hand, in evaluation mode; no other layer of this network has two modes.
    expected = Dropping().double().eval()
    expected.load_state_dict(net.state_dict())
    for images, labels in task.train:
        F.cross_entropy(expected(images), labels).backward()
        with torch.no_grad():
            for parameter in expected.parameters():
                parameter -= 0.05 * parameter.grad
                parameter.grad = None
    for (name, ours), theirs in zip(result.model.state_dict().items(), expected.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12, msg=name)
