"""Runs on images without labels: nothing trains, and channels are scored."""

import pytest
import torch
from small import batches, briefly, finished, make_run, prepared, quick, same, states

from secateur import InvalidSetting, TickTock, Training
from secateur.training.task import unlabelled


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
    settings = TickTock.of(keep_macs=0.5).without_training()
    result = finished(settings, net, graph, unlabelled(images, images, net))
    assert same(states(net), before)
    with torch.no_grad():
        whole, cut = (torch.cat([model.eval()(each).argmax(1) for each in images]) for model in (net, result.model))
    assert result.metrics_before == {"agreement": 100}
    assert result.metrics == {"agreement": pytest.approx(100 * float((whole == cut).double().mean()))}
    assert result.plan.cost.macs <= 0.5 * graph.macs
