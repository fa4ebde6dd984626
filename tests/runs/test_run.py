"""A whole run: the order of events, where it ends, what it leaves, and what it refuses."""

import json
import math
import signal
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from small import (
    CLASSES,
    SIZE,
    STEPS,
    Net,
    assert_near,
    batches,
    briefly,
    finished,
    make_run,
    on_a,
    prepared,
    quick,
    same,
    states,
)
from torch import Tensor, nn

import secateur
from secateur import (
    Diverged,
    Engine,
    Event,
    InvalidData,
    InvalidModel,
    InvalidSetting,
    Plan,
    Task,
    TickTock,
    UnreachableBudget,
    analyze,
    classification,
)
from secateur.runs.events import FineTune, Finished, Start, Tick, Tock, Train
from secateur.training.settings import Training


def names(events: Any) -> list[str]:
    return [event.name for event in events]


def events_of(settings: TickTock | Training, **options: Any) -> list[Event]:
    return list(make_run(settings, *prepared(), **options).events())


# The order of events.


def test_the_schedule_in_order() -> None:
    events = events_of(quick(keep_macs=0.75, tick_removes=0.05))
    assert names(events)[:6] == ["Start", "Tick 1", "Tick 2", "Tock 1, epoch 1", "Tock 1, epoch 2", "Tick 3"]
    assert names(events)[-3:] == ["FineTune epoch 1", "FineTune epoch 2", "Finished"]
    ticks = [event for event in events if isinstance(event, Tick)]
    assert all(earlier.macs > later.macs for earlier, later in pairwise(ticks))
    assert all(sum(event.removed.values()) > 0 and event.seconds > 0 for event in ticks)
    assert events[0].metrics["accuracy"] >= 0
    last = events[-1]
    assert isinstance(last, Finished)
    assert last.result.history == tuple(events[:-1])
    told = [json.loads(json.dumps(event.to_dict())) for event in events]
    assert [event["event"] for event in told[:4]] == ["Start", "Tick", "Tick", "Tock"]
    assert "accuracy" in str(last.result)


def test_other_schedules() -> None:
    short: dict[str, Any] = {"keep_macs": 0.5, "tick_removes": 0.2, "finetune_epochs": 1}
    first = names(events_of(quick(tock_first=True, **short)))
    assert first[:4] == ["Start", "Tock 1, epoch 1", "Tock 1, epoch 2", "Tick 1"]
    assert not any(name.startswith("Tock") for name in names(events_of(TickTock.tick_only(**short))))
    one_shot = names(events_of(TickTock.one_shot(keep_macs=0.5, finetune_epochs=1)))
    assert one_shot == ["Start", "Tick 1", "FineTune epoch 1", "Finished"]
    assert names(events_of(briefly())) == ["Start", "Train epoch 1", "Train epoch 2", "Finished"]
    retrained = names(events_of(TickTock.one_shot(keep_macs=0.5, finetune_epochs=0, retrain_epochs=2)))
    assert retrained == ["Start", "Retrain epoch 1", "Retrain epoch 2", "Tick 1", "Finished"]


@pytest.mark.parametrize(
    ("evaluate", "wanted"),
    [
        ("phases", ["Start", "Retrain epoch 2", "Tock 1, epoch 2", "Tick 3", "FineTune epoch 2", "Finished"]),
        ("end", ["Start", "Finished"]),
    ],
)
def test_metrics_are_computed_when_asked_for(evaluate: str, wanted: list[str]) -> None:
    settings = quick(tick_removes=0.2, evaluate=evaluate, retrain_epochs=2)
    assert [event.name for event in events_of(settings) if event.metrics] == wanted


# What it leaves.


def test_the_result_is_the_users_own_network_and_the_given_one_is_untouched() -> None:
    net, _, task = prepared()
    net.train()
    net.stem.weight.requires_grad_(False)
    net.last.bias.requires_grad_(False)
    before, flags = states(net), [p.requires_grad for p in net.parameters()]
    heard: list[Any] = []
    result = secateur.prune(net, batches(1)[0][0], task, settings=quick(), finetune_epochs=1, progress=heard.append)
    model: Any = result.model
    assert same(before, states(net))
    assert net.training
    assert [p.requires_grad for p in net.parameters()] == flags == [p.requires_grad for p in model.parameters()]
    assert [type(m) for m in model.modules()] == [type(m) for m in net.modules()]
    assert list(model.state_dict()) == list(net.state_dict())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not any(key.startswith("gate") for m in model.modules() for key in vars(m))
    assert not model.training
    plain = secateur.shrink(net, result.plan)
    assert {n: t.shape for n, t in plain.state_dict().items()} == {n: t.shape for n, t in model.state_dict().items()}
    assert sum(p.numel() for p in model.parameters()) == result.after.params
    assert names(result.history)[-1] == "FineTune epoch 1"
    assert tuple(event for event in heard if isinstance(event, Event))[:-1] == result.history
    # What the user has frozen stays as it was.
    kept = result.plan.remaining.get(("stem.weight", 0), torch.arange(8))
    assert torch.equal(model.stem.weight, before["stem.weight"][kept])
    assert torch.equal(model.last.bias, before["last.bias"])


@pytest.mark.parametrize("kind", ["macs", "params", "filters"])
def test_it_lands_on_the_budget(kind: str) -> None:
    net, graph, task = prepared()
    values: dict[str, Any] = {f"keep_{kind}": 0.6, "finetune_epochs": 0, "min_ratio": 0.0, "evaluate": "end"}
    result = finished(quick(**values), net, graph, task)
    last = [event for event in result.history if isinstance(event, Tick)][-1]
    whole = {"macs": graph.macs, "params": graph.params, "filters": graph.num_filters}[kind]
    left = {"macs": result.after.macs, "params": result.after.params, "filters": last.filters}[kind]
    assert left <= 0.6 * whole
    savings = dict(zip(("macs", "params"), graph.savings(), strict=True))
    largest = float(savings[kind].max()) if kind in savings else max(g.filters_per_channel for g in graph.groups)
    assert left > 0.6 * whole - largest
    assert last.left == ({} if kind == "macs" else {result.settings.budget.unit: left / whole})


def test_limits_hold() -> None:
    net, graph, task = prepared()
    values: dict[str, Any] = {"finetune_epochs": 0, "tock_every": 0, "evaluate": "end"}
    model: Any = finished(quick(at_least={"inner": 1.0, "bare": 8}, **values), net, graph, task).model
    assert model.inner.out_channels == 12
    assert model.bare.out_channels >= 8
    model = finished(quick(multiple_of=4, **values), net, graph, task).model
    assert model.stem.out_channels % 4 == model.inner.out_channels % 4 == 0
    assert model.bare.out_channels in (4, 8, 10)
    assert model.hidden.out_features in (4, 8, 9)


@pytest.mark.parametrize("score", ["fisher", "slim", "pcnn", "l1", "l2", "fpgm", "apoz", "residual", "measured"])
def test_other_scores_run_the_same_schedule(score: str) -> None:
    net, graph, task = prepared()
    settings = quick(score=score, rank="score_per_mac", tock_every=0, finetune_epochs=0, tick_removes=0.3)
    result = finished(settings, net, graph, task)
    assert result.after.macs <= 0.5 * graph.macs
    assert not any(m._forward_hooks for m in result.model.modules())


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_the_power_of_a_rank_reaches_the_pruner(power: float) -> None:
    values: dict[str, Any] = {"rank": "score_per_mac", "score": "random", "rank_power": power}
    net, graph, task = prepared()
    settings = quick(tock_every=0, finetune_epochs=0, evaluate="end", **values)
    found = finished(settings, net, graph, task).plan
    pruner = secateur.Pruner(net, graph=graph, **values)
    while not pruner.prune(settings.ticks.removes, settings.budget).met:
        pass
    assert torch.equal(found.kept, pruner.kept)


def test_the_seed_decides_and_the_callers_random_numbers_stay() -> None:
    net, graph, task = prepared()
    outcomes = []
    for seed in (0, 0, 1):
        torch.manual_seed(5)
        torch.rand(seed + 1)
        before = torch.get_rng_state()
        settings = quick(tick_data=0.5, score="random", seed=seed, tick_removes=0.2)
        outcomes.append(finished(settings, net, graph, task))
        assert torch.equal(before, torch.get_rng_state())
    one, again, other = outcomes
    assert same(states(one.model), states(again.model))
    assert not torch.equal(one.plan.kept, other.plan.kept)


def test_every_epoch_has_random_numbers_of_its_own() -> None:
    net, graph, task = prepared()
    drawn: list[float] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        drawn.append(float(torch.rand(())))
        return task.loss(model, batch)

    finished(quick(retrain_epochs=2), net, graph, replace(task, loss=loss))
    assert len(set(drawn)) == len(drawn) > 4 * STEPS


# Masks, cuts and widths filled up with zeros.


def test_masked_and_cut_runs_give_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = quick(tick_removes=0.06, keep_macs=0.45, min_ratio=0.0, momentum=0.9, ema=0.5)
    now, end = (finished(settings.but(cut=cut), *prepared()) for cut in ("now", "end"))
    on_a("cuda", monkeypatch)
    run = make_run(settings, *prepared())
    widths = {run.model.inner.out_channels for event in run.events() if isinstance(event, FineTune)}
    filled = run._result()
    assert widths == {8} != {now.model.inner.out_channels}
    removed = [[event.removed for event in r.history if isinstance(event, Tick)] for r in (now, end, filled)]
    assert len(removed[0]) >= 3
    assert removed[0] == removed[1] == removed[2]
    assert any(isinstance(event, Tock) for event in now.history)
    for other in (end, filled):
        assert torch.equal(now.plan.kept, other.plan.kept)
        assert_near(now.model, other.model)


def test_aligned_cuts_leave_the_rest_masked_and_change_nothing() -> None:
    net, graph, task = prepared()
    run = make_run(quick(), net, graph, task)
    pruner = run.pruner
    assert pruner is not None
    pruner.kept = Plan(graph, thinned(graph)).kept
    pruner.gates.mask_(pruner.kept)
    optimizer = torch.optim.SGD(run.model.parameters())
    images = batches(1)[0][0]
    run.model.eval()
    masked = run.model(images)
    for multiple, width in ((4, 8), (1, 7)):
        pruner.cut_(optimizer, multiple_of=multiple)
        torch.testing.assert_close(run.model(images), masked, rtol=1e-10, atol=1e-12)
        assert run.model.inner.out_channels == width  # 7 of 12 are kept
        assert run.model.stem.out_channels == (8 if multiple == 4 else 5)


def thinned(graph: secateur.ChannelGraph) -> Tensor:
    """5 of 8 channels are left of the stem, 7 of 12 of the inner convolution."""
    kept = graph.all_kept()
    for group, left in zip(graph.groups, (5, 7, 6, 5), strict=True):
        kept[group.start + left : group.start + group.size] = False
    return kept


class Summed(nn.Module):
    """Nothing that has weights reads the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.last = nn.Conv2d(2, 20, 3, padding=1), nn.BatchNorm2d(20), nn.Linear(36, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.last(F.silu(self.norm(self.stem(images))).sum(1).flatten(1))


class Tied(nn.Module):
    """What makes the channels reads them again."""

    def __init__(self) -> None:
        super().__init__()
        self.there, self.norm, self.last = nn.Linear(72, 20, bias=False), nn.BatchNorm1d(20), nn.Linear(72, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.last(F.linear(F.gelu(self.norm(self.there(images.flatten(1)))), self.there.weight.t()))


class Noisy(nn.Module):
    """Zeros become noise in training."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.noise, self.last = nn.Conv2d(2, 20, 3, padding=1), nn.AlphaDropout(0.1), nn.Linear(20, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.last(self.noise(F.selu(self.stem(images))).mean((2, 3)))


@pytest.mark.parametrize("make", [Summed, Tied, Noisy])
def test_zeros_stay_zeros_whatever_reads_them(make: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    on_a("cuda", monkeypatch)
    torch.manual_seed(0)
    net = make().double()
    settings = quick(min_ratio=0.0, finetune_epochs=3, weight_decay=0.01, tock_epochs=1)
    task = classification(batches(), batches())
    *_, tuned, end = make_run(settings, net, analyze(net, batches(1)[0][0]), task).events()
    assert isinstance(tuned, FineTune)
    assert tuned.metrics["loss"] == pytest.approx(end.metrics["loss"], rel=1e-9)


def test_captured_steps_are_forgotten_whoever_cuts() -> None:
    # A learnt shift behind its gate makes the pruner cut although the run only masks.
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.PReLU(8), nn.Flatten(), nn.Linear(128, CLASSES)]
    net = nn.Sequential(*layers).double()
    graph = analyze(net, batches(1)[0][0])
    run = make_run(quick(cut="end", tock_every=0), net, graph, classification(batches()))
    forgotten: list[int] = []
    forget = run.trainer.forget
    run.trainer.forget = lambda: (forgotten.append(run.model[0].out_channels), forget())[0]
    widths = [run.model[0].out_channels for event in run.events() if isinstance(event, Tick)]
    assert len(widths) > 2
    assert [width for width in dict.fromkeys(forgotten) if width < 8] == widths


# Precision and layout.


def test_bf16_keeps_weights_gates_and_scores_single() -> None:
    torch.manual_seed(0)
    net, data = Net(), batches(dtype=torch.float32)
    graph, task = analyze(net, data[0][0][:1]), classification(data, data[:2])
    settings = quick(ema=0.5, distill=0.3)
    run = make_run(settings, net, graph, task, engine=Engine(precision="bf16"))
    outputs = set()
    handle = run.model.last.register_forward_hook(lambda module, args, output: outputs.add(output.dtype))
    events = run.events()
    next(events)
    next(events)
    handle.remove()
    assert run.pruner is not None
    total = run.pruner.score.state()["total"]
    assert {t.dtype for t in (*run.pruner.gates.phis, *run.model.parameters(), total)} == {torch.float32}
    assert torch.bfloat16 in outputs
    *_, last = events
    assert {tensor.dtype for tensor in states(last.result.model).values()} == {torch.float32, torch.int64}
    assert last.metrics["loss"] == pytest.approx(finished(settings, net, graph, task).metrics["loss"], rel=0.05)


def test_channels_last_changes_the_layout_and_rounding_only() -> None:
    net, graph, task = prepared()
    plain = finished(quick(), net, graph, task)
    result = finished(quick(), net, graph, task, engine=Engine(channels_last=True))
    assert torch.equal(result.plan.kept, plain.plan.kept)
    weight: Any = result.model.inner.weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert not weight.is_contiguous()
    assert net.inner.weight.is_contiguous()
    assert_near(result.model, plain.model)


@pytest.mark.parametrize(("kind", "size"), [(nn.Conv1d, (6,)), (nn.Conv3d, (4, 4, 4))])
def test_channels_last_of_signals_and_volumes(kind: Any, size: tuple[int, ...]) -> None:
    net = nn.Sequential(kind(1, 8, 3, padding=1), nn.ReLU(), kind(8, 2, 3, padding=1), nn.Flatten())
    clips = torch.randn(4, 1, *size)
    task = Task([clips], lambda model, batch: model(batch).square().mean())
    settings, engine = TickTock.one_shot(keep_macs=0.6, finetune_epochs=1), Engine(channels_last=True)
    weight: Any = finished(settings, net, analyze(net, clips), task, engine=engine).model[0].weight
    assert kind is nn.Conv1d or weight.is_contiguous(memory_format=torch.channels_last_3d)


# Numbers that are not finite.


def exploding(at: int, task: Task) -> Task:
    """The loss turns NaN at this call."""
    calls = 0

    def loss(model: nn.Module, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return task.loss(model, batch) * (math.nan if calls == at else 1.0)

    return Task(task.train, loss, task.evaluate)


@pytest.mark.parametrize(
    ("settings", "at", "done"),
    [
        (quick(tick_removes=0.02), 3, "Start"),
        (quick(tick_removes=0.02), STEPS + 1, "Tick 1"),
        (quick(tick_removes=0.02), 3 * STEPS + 2, "Tock 1, epoch 1"),
        (TickTock.one_shot(keep_macs=0.5, finetune_epochs=3), 2 * STEPS + 1, "FineTune epoch 1"),
        (quick(retrain_epochs=2), STEPS + 2, "Retrain epoch 1"),
        (briefly(), STEPS + 1, "Train epoch 1"),
    ],
)
def test_a_run_that_diverges_keeps_the_last_good_network(settings: Any, at: int, done: str) -> None:
    net, graph, task = prepared()
    with pytest.raises(Diverged) as caught:
        finished(settings, net, graph, exploding(at, task))
    result = caught.value.result
    assert isinstance(result, secateur.Result)
    assert result.history[-1].name == done
    assert all(tensor.isfinite().all() for tensor in result.model.state_dict().values())
    assert list(result.model.state_dict()) == list(net.state_dict())
    assert result.model(batches(1)[0][0]).shape == (16, CLASSES)
    assert (result.after.macs < result.before.macs) == done.startswith(("Tick", "Tock", "FineTune"))
    if done == "Start":
        assert_near(result.model, net)


def test_weights_that_overflow_without_a_bad_loss_are_noticed() -> None:
    net, graph, task = prepared()
    settings = briefly(epochs=1, lr=1e307, lr_low=1e307, weight_decay=0.0)
    with pytest.raises(Diverged):
        finished(settings, net, graph, Task(batches(1), lambda model, batch: 1e9 * task.loss(model, batch)))


def strictly(text: str) -> Any:
    """As a browser reads it."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_metrics_that_are_not_finite_are_null_in_files(tmp_path: Path) -> None:
    net, graph, task = prepared()
    task = replace(task, evaluate=lambda model: {"accuracy": math.nan, "loss": math.inf})
    settings, folder = quick(tick_removes=0.2), tmp_path / "run"
    events = make_run(settings, net, graph, task, folder=folder).events()
    for _ in range(3):
        next(events)
    events.close()
    result = finished(settings, net, graph, task, folder=folder)
    assert all(math.isnan(event.metrics["accuracy"]) and "nan" in str(event) for event in result.history)
    assert "nan" in str(result)
    secateur.save(result, folder / "result")
    for path in folder.rglob("*.json"):
        strictly(path.read_text())
    for path in folder.rglob("*.jsonl"):
        for line in path.read_text().splitlines():
            assert strictly(line)["metrics"] == {"accuracy": None, "loss": None}


# What is refused, before anything is done.


class Named(nn.Module):
    """Its output is a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(2, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 3)).double()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.net(x)}


def frozen() -> Net:
    net, _, _ = prepared()
    return net.requires_grad_(False)


def bare() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(2 * SIZE * SIZE, 4)).double()


def refused(error: type[Exception], **changes: Any) -> Any:
    return pytest.param(error, changes, id=f"{error.__name__}-{'-'.join(changes)}")


@pytest.mark.parametrize(
    ("error", "changes"),
    [
        refused(UnreachableBudget, keep_macs=0.05, min_ratio=0.5),
        refused(UnreachableBudget, keep_macs=0.05, min_ratio=0.5, retrain_epochs=1),
        refused(InvalidSetting, at_least={"innr": 1.0}),
        refused(InvalidSetting, score="tailor"),
        refused(InvalidSetting, optimizer="adamww"),
        refused(InvalidSetting, optimizer="muon"),
        refused(InvalidSetting, optimizer="lbfgs"),
        refused(InvalidSetting, optimizer="sparseadam"),
        refused(InvalidSetting, net=frozen),
        refused(InvalidSetting, net=lambda: nn.Conv2d(2, 8, 3).double(), graph=lambda: prepared()[1]),
        refused(InvalidModel, net=bare),
        refused(InvalidData, net=Named, distill=0.5, task=Task(batches(), lambda m, b: m(b[0])["logits"].mean())),
        refused(InvalidData, task=batches()),
        refused(InvalidData, tick_per_class=2),
        refused(InvalidData, task=Task([], lambda model, batch: model(batch[0]).sum())),
    ],
)
def test_what_cannot_be_done_is_refused_at_once(
    error: type[Exception], changes: dict[str, Any], tmp_path: Path
) -> None:
    values, (net, _, task) = dict(changes), prepared()
    net, task = values.pop("net", lambda: net)(), values.pop("task", task)
    before = states(net)
    graph = values.pop("graph", lambda: analyze(net, batches(1)[0][0]))()
    with pytest.raises(error):
        make_run(quick(**values), net, graph, task, folder=tmp_path / "run")
    assert same(before, states(net))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "loss",
    [
        classification([(images, labels + 3) for images, labels in batches()]),
        Task(batches(), lambda model, batch: model(batch[0])),
        Task(batches(), lambda model, batch: model(batch[0]).sum().detach()),
        Task(batches(), lambda model, batch: model(batch[0]).sum().item()),
        Task(batches(), lambda model, batch: torch.zeros((), requires_grad=True).double() * batch[0].sum()),
    ],
    ids=["label out of range", "not a scalar", "no gradient", "not a tensor", "not of the model"],
)
def test_losses_that_cannot_be_trained_on(loss: Task) -> None:
    net, graph, _ = prepared()
    with pytest.raises(InvalidData):
        finished(quick(), net, graph, loss)


@pytest.mark.parametrize("state", [{"total": None}, {"count": 3}, {}])
def test_a_score_that_could_not_be_resumed_is_refused(state: dict[str, Any], tmp_path: Path) -> None:
    score: Any = type("Mine", (secateur.Score,), {"state": lambda self: state})()
    settings, given = quick(score=score), prepared()
    with pytest.raises(InvalidSetting):
        make_run(settings, *given, folder=tmp_path)
    assert not list(tmp_path.iterdir())
    make_run(settings, *given)


def test_extra_state_that_is_no_tensor(tmp_path: Path) -> None:
    net, graph, task = prepared()

    class Extra(type(net)):
        kept: ClassVar[dict[str, int]] = {"version": 2}

        def get_extra_state(self) -> dict[str, int]:
            return self.kept

        def set_extra_state(self, state: dict[str, int]) -> None:
            assert state == self.kept

    settings = TickTock.one_shot(keep_macs=0.5, finetune_epochs=0)
    net.__class__ = type("Empty", (Extra,), {"kept": {}})
    finished(settings, net, graph, task, folder=tmp_path / "empty")
    net.__class__ = Extra
    result = finished(settings, net, graph, task)
    assert isinstance(result.model, Extra)
    with pytest.raises(InvalidModel):
        secateur.save(result, tmp_path / "result")
    with pytest.raises(InvalidModel):
        make_run(settings, net, graph, task, folder=tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


# Cuts that turn out wrong.


@pytest.mark.parametrize("wrong", ["value", "size"])
def test_a_cut_that_turns_out_wrong_gives_no_result(wrong: str) -> None:
    class Particular(nn.Module):
        """Depends on its width, which an analysis without the probe does not see."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(2, 8, 3), nn.Conv2d(8, CLASSES, 4)

        def forward(self, images: Tensor) -> Tensor:
            x = F.relu(self.first(images))
            if x.shape[1] < 8:
                x = x * 2 if wrong == "value" else x.reshape(-1, 8, 4, 4)
            return self.last(x).flatten(1)

    model = Particular().double()
    graph = analyze(model, batches(1)[0][0], probe=False)
    with pytest.raises(secateur.NotEquivalent):
        finished(quick(cut="end", keep_macs=0.6), model, graph, prepared()[2])


def test_what_only_the_loss_reads_is_named_where_a_cut_breaks_it() -> None:
    net, _, task = prepared()
    net.centres = nn.Parameter(torch.zeros(CLASSES, 9, dtype=torch.float64))

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        seen: list[Tensor] = []
        handle = model.hidden.register_forward_hook(lambda module, args, output: seen.append(output))
        scores = model(batch[0])
        handle.remove()
        return F.cross_entropy(scores, batch[1]) + (seen[0] - model.centres[batch[1]]).square().mean()

    graph = analyze(net, batches(1)[0][0])
    with pytest.raises(RuntimeError) as error:
        finished(quick(keep_macs=0.2, cut="now"), net, graph, Task(task.train, loss))
    assert any("centres" in note for note in error.value.__notes__)


@pytest.mark.parametrize("folder", [None, "early", "late"])
def test_an_interrupt_is_told_where_the_run_is_saved(tmp_path: Path, folder: str | None) -> None:
    net, graph, task = prepared()
    part = "evaluate" if folder == "early" else "loss"
    task = replace(task, **{part: lambda *given: signal.raise_signal(signal.SIGINT)})
    with pytest.raises(KeyboardInterrupt) as stop:
        finished(quick(), net, graph, task, folder=folder and tmp_path / folder)
    notes = getattr(stop.value, "__notes__", [])
    assert [str(tmp_path / "late") in note for note in notes] == ([True] if folder == "late" else [])


def test_a_run_from_a_pruned_network_reports_the_whole_one() -> None:
    net, graph, task = prepared()
    plan = Plan(graph, thinned(graph))
    small = secateur.shrink(net, plan)
    settings = briefly(epochs=1, distill=0.5)
    run = secateur.runs.run.Run(settings, secateur.runs.prune.training_phases(settings), small, plan, task, whole=net)
    start, trained, last = run.events()
    assert isinstance(start, Start)
    assert isinstance(trained, Train)
    assert start.original == run.metrics(net, exact=True)
    assert start.metrics == run.metrics(small, exact=True) != start.original
    assert last.result.after == plan.cost
    assert last.result.metrics_before == start.original
