"""What a run says about the time of the network that it will leave."""

from typing import Any

import pytest
import torch
from small import prepared

from secateur import Budget, Limits, TickTock
from secateur.channels.plan import Plan
from secateur.pruning.selection import Target, decided
from secateur.runs import forecast as forecasts
from secateur.runs.forecast import evenly
from secateur.runs.prune import pruning_phases
from secateur.runs.run import Run


@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_groups_are_cut_evenly_until_the_budget_is_met(share: float, multiple: int) -> None:
    _, graph, _ = prepared()
    limits = Limits(multiple_of=multiple, min_ratio=0.0)
    target = Target(Budget(macs=share), graph)
    kept = evenly(target, limits.floors(graph), multiple)
    assert target.met(kept)
    widths = [int(kept[group.span].sum()) for group in graph.groups]
    shares = [width / group.size for width, group in zip(widths, graph.groups, strict=True)]
    assert max(shares) - min(shares) <= multiple / min(group.size for group in graph.groups)
    assert all(width % multiple == 0 or width == group.size for width, group in zip(widths, graph.groups, strict=True))
    wider = [min(group.size, width + multiple) for width, group in zip(widths, graph.groups, strict=True)]
    parts = {group.name: range(width) for group, width in zip(graph.groups, wider, strict=True)}
    assert not target.met(Plan.keep(graph, parts).kept)


@pytest.mark.parametrize(("after", "multiple", "told"), [(2.0, 1, True), (2.0, 2, True), (0.5, 1, False)])
def test_a_run_says_so_if_its_network_will_be_slower(
    monkeypatch: pytest.MonkeyPatch, after: float, multiple: int, told: bool
) -> None:
    model, graph, task = prepared()
    whole = sum(parameter.numel() for parameter in model.parameters())

    def timed(network: torch.nn.Module, example: Any, *how: Any) -> float:
        assert example.size == 16
        return 1.0 if sum(parameter.numel() for parameter in network.parameters()) == whole else after

    monkeypatch.setattr(forecasts, "time_whole", timed)
    said: list[str] = []
    settings = TickTock.of(keep_macs=0.5, multiple_of=multiple, min_ratio=0.0, latency_batch=16)
    run = Run(settings, pruning_phases(settings), model, Plan(graph, graph.all_kept()), task, progress=said.append)
    phase = run.pruning
    assert phase is not None
    phase.start(run)
    phase._warn_if_slower(run)
    assert len(said) == told
    if told:
        assert "about 200% of the time" in said[0]
        assert "batches of 16" in said[0]
        assert ("multiple_of=8" in said[0]) == (multiple == 1)


@pytest.mark.parametrize(("share", "multiple"), [(0.9, 8), (0.5, 4), (0.05, 1)])
def test_alignment_never_puts_a_budget_out_of_reach(share: float, multiple: int) -> None:
    _, graph, _ = prepared()
    target = Target(Budget(macs=share), graph)
    assert decided(Limits(), target, "cuda").multiple == multiple
    assert decided(Limits(multiple_of=8), target, "cuda").multiple == 8
    assert decided(Limits(), target, "cpu").multiple == 1
