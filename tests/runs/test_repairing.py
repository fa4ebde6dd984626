"""Runs that repair: after the removals of Tick-Tock, and without any training."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small import batches, finished, make_run, prepared, quick, same, states
from torch import Tensor, nn

import secateur
from secateur import ChannelGraph, InvalidSetting, Plan, TickTock, shrink
from secateur.pruning.repair import repair_
from secateur.runs.events import Tick, Tock
from secateur.runs.prune import finish
from secateur.training.batches import share_of


def test_nothing_trains_and_what_is_left_gives_what_the_whole_network_gives() -> None:
    net, graph, task = prepared()
    before = states(net)
    settings = TickTock.of(keep_macs=0.6).without_training()
    result = finished(settings, net, graph, task)
    assert same(states(net), before)
    assert result.plan.cost.macs <= 0.6 * graph.macs
    plain = shrink(net, result.plan).state_dict()
    changed = {name for name, tensor in result.model.state_dict().items() if not torch.allclose(tensor, plain[name])}
    # Neither statistics of batch norms, nor their weights, nor any bias.
    assert changed
    assert all(name.endswith("weight") and plain[name].dim() > 1 for name in changed)
    images = torch.cat([images for images, _ in batches()])
    with torch.no_grad():
        wanted, cut, repaired = (model.eval()(images) for model in (net, shrink(net, result.plan), result.model))
    assert (repaired - wanted).norm() < 0.7 * (cut - wanted).norm()


def test_a_tick_without_a_learning_rate_only_scores() -> None:
    net, graph, task = prepared()
    settings = quick(tick_lr=0.0, tock_every=0, finetune_epochs=0, keep_macs=0.8)
    result = finished(settings, net, graph, task)
    for name, tensor in shrink(net, result.plan).state_dict().items():
        torch.testing.assert_close(result.model.state_dict()[name], tensor)


@pytest.mark.parametrize("trains", [True, False])
def test_the_reference_of_a_repair(trains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The network just before the removal; the whole one where nothing trains."""
    net, graph, task = prepared()
    settings = quick(keep_macs=0.7, tick_removes=0.1, repair=20)
    run = make_run(settings if trains else settings.without_training(), net, graph, task)
    calls: list[tuple[Any, ...]] = []

    def watched(
        cut: nn.Module, whole: nn.Module, plan: Plan, inputs: Any, *, since: Plan | None, **options: Any
    ) -> Any:
        calls.append((whole, since, sum(each.size for each in inputs)))
        return repair_(cut, whole, plan, inputs, since=since, **options)

    monkeypatch.setattr("secateur.pruning.pruner.repair_", watched)
    finish(run)
    removals = [event for event in run.history if isinstance(event, Tick)]
    assert len(calls) == len(removals) > 1
    for whole, since, _ in calls[1:]:
        assert (whole is run.whole) is not trains
        assert (since is not None and not bool(since.kept.all())) is trains
    assert {images for _, _, images in calls} == {20 if trains else 64}


def test_images_of_a_tick_are_a_share_of_any_data() -> None:
    data = batches(4)
    assert share_of(data, 16) == 0.25
    assert share_of(torch.utils.data.DataLoader(list(range(40)), batch_size=8), 10) == 0.25
    assert share_of(data, 10_000) == 1.0


def test_images_and_examples_per_class_exclude_each_other() -> None:
    with pytest.raises(InvalidSetting):
        TickTock.of(keep_macs=0.5, tick_images=100, tick_per_class=10)
    with pytest.raises(InvalidSetting):
        TickTock.of(keep_macs=0.5, tick_images=100, tick_data=0.1)


@pytest.mark.parametrize(("counts", "rank"), [("params", "score_per_param"), ("filters", "score")])
def test_the_rank_without_training_follows_the_budget(counts: str, rank: str) -> None:
    assert TickTock.of(**{f"keep_{counts}": 0.5}).without_training().rank == rank


def test_the_whole_call_without_training() -> None:
    net, _, task = prepared()
    lines: list[object] = []
    settings = TickTock.of(keep_macs=0.7).without_training()
    result = secateur.prune(net, batches(1)[0][0][:1], task, settings=settings, progress=lines.append)
    assert result.metrics["loss"] < 1.5 * result.metrics_before["loss"]


def test_a_tick_removes_no_more_than_its_step() -> None:
    net, graph, task = prepared()
    settings = quick(tick_removes=1.0, tick_step=0.1, tick_lr=0.0, tock_every=0, finetune_epochs=0, keep_macs=0.55)
    result = finished(settings, net, graph, task)
    shares = [event.share for event in result.history if isinstance(event, Tick)]
    assert len(shares) >= 4
    largest = max(graph.macs - graph.cost(kept).macs for kept in without_one(graph)) / graph.macs
    assert all(before - after <= 0.1 + largest for before, after in zip([1.0, *shares], shares, strict=False))


def without_one(graph: ChannelGraph) -> Iterator[Tensor]:
    """What is kept if any one channel goes."""
    for channel in range(graph.num_channels):
        kept = graph.all_kept()
        kept[channel] = False
        yield kept


def test_a_run_that_continues_a_trained_one_does_not_refer_to_the_whole_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, graph, task = prepared()
    example = batches(1)[0][0][:1]
    settings = quick(keep_macs=0.8, tick_removes=0.1, tock_every=1, finetune_epochs=0)
    secateur.prune(net, example, task, settings=settings, folder=tmp_path / "one", graph=graph)
    references: list[object] = []

    def watched(*given: Any, since: Plan | None, **options: Any) -> Any:
        references.append(since)
        return repair_(*given, since=since, **options)

    monkeypatch.setattr("secateur.pruning.pruner.repair_", watched)
    smaller = settings.but(keep_macs=0.6).without_training()
    result = secateur.prune(
        net,
        example,
        task,
        settings=smaller,
        folder=tmp_path / "two",
        continue_from=tmp_path / "one",
        graph=graph,
    )
    assert references
    assert None not in references
    tocks = [event for event in result.history if isinstance(event, Tock) and event.share < 0.8]
    assert not tocks
