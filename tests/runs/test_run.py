"""A whole run: what changes in which phase, where it ends, and that masks and scissors come to the same."""

import copy
import json
import math
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small import CLASSES, batches, on_a, prepared, quick
from torch import Tensor, nn

import secateur
from secateur import Diverged, Event, FineTune, Finished, InvalidModel, InvalidSetting, Task, Tick, TickTock, Tock
from secateur.runs.run import Run


def states(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


def names(events: list[Event]) -> str:
    return " ".join(event.name for event in events)


def test_the_schedule_in_order() -> None:
    events = list(quick(keep_macs=0.75, tick_removes=0.05).steps(*prepared()))
    assert names(events).startswith("Start Tick 1 Tick 2 Tock 1, epoch 1 Tock 1, epoch 2 Tick 3")
    assert names(events).endswith("FineTune epoch 1 FineTune epoch 2 Finished")
    ticks = [event for event in events if isinstance(event, Tick)]
    assert all(earlier.macs > later.macs for earlier, later in pairwise(ticks))
    assert all(sum(event.removed.values()) > 0 and event.seconds > 0 for event in ticks)
    assert events[0].metrics["accuracy"] >= 0
    assert isinstance(events[-1], Finished)
    assert events[-1].result.history == tuple(events[:-1])


def test_tock_first_and_no_tock_at_all() -> None:
    assert names(list(quick(tock_first=True).steps(*prepared()))).startswith(
        "Start Tock 1, epoch 1 Tock 1, epoch 2 Tick 1"
    )
    assert "Tock" not in names(list(TickTock.tick_only(keep_macs=0.5, finetune_epochs=0).steps(*prepared())))


def test_one_shot_is_a_single_tick() -> None:
    events = list(TickTock.one_shot(keep_macs=0.5, finetune_epochs=1).steps(*prepared()))
    assert names(events) == "Start Tick 1 FineTune epoch 1 Finished"


def test_metrics_are_computed_when_asked_for() -> None:
    def of(evaluate: str) -> str:
        return names([event for event in quick(evaluate=evaluate).steps(*prepared()) if event.metrics])

    assert of("always") == names(list(quick().steps(*prepared())))
    assert of("phases") == "Start Tock 1, epoch 2 Tock 2, epoch 2 Tick 5 FineTune epoch 2 Finished"
    assert of("end") == "Start Finished"


def test_the_result_is_the_users_own_network_and_the_given_one_is_untouched() -> None:
    net, graph, task = prepared()
    net.train()
    before, flags = states(net), [p.requires_grad for p in net.parameters()]
    result = quick()(net, graph, task)
    assert same(before, states(net))
    assert net.training
    assert [p.requires_grad for p in net.parameters()] == flags
    assert [type(m) for m in result.model.modules()] == [type(m) for m in net.modules()]
    assert list(result.model.state_dict()) == list(net.state_dict())
    assert [p.requires_grad for p in result.model.parameters()] == flags
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in result.model.modules())
    assert not any(key.startswith("gate") for m in result.model.modules() for key in vars(m))
    assert not result.model.training
    plain = secateur.shrink(net, result.plan)
    assert {n: t.shape for n, t in plain.state_dict().items()} == {
        n: t.shape for n, t in result.model.state_dict().items()
    }
    assert secateur.verify(net, result.plan, batches()[0][0]).agrees
    assert sum(p.numel() for p in result.model.parameters()) == result.after.params


@pytest.mark.parametrize("kind", ["macs", "params", "filters"])
def test_it_lands_on_the_budget(kind: str) -> None:
    net, graph, task = prepared()
    result = quick(**{f"keep_{kind}": 0.6}, finetune_epochs=0, min_ratio=0.0)(net, graph, task)
    last = [event for event in result.history if isinstance(event, Tick)][-1]
    whole = {"macs": graph.macs, "params": graph.params, "filters": graph.num_filters}[kind]
    left = {"macs": result.after.macs, "params": result.after.params, "filters": last.filters}[kind]
    assert left <= 0.6 * whole
    savings = dict(zip(("macs", "params"), graph.savings(), strict=True))
    largest = float(savings[kind].max()) if kind in savings else max(g.filters_per_channel for g in graph.groups)
    assert left > 0.6 * whole - largest


def test_a_budget_of_one_only_trains() -> None:
    net, graph, task = prepared()
    result = quick(keep_macs=1.0)(net, graph, task)
    assert result.after == result.before
    assert names(list(result.history)) == "Start FineTune epoch 1 FineTune epoch 2"


def after_each(event_kind: type[Event], **settings: Any) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """State dicts before and after every event of this kind, of the gated network, never cut."""
    net, graph, task = prepared()
    run = Run(quick(cut="end", **settings), net, graph, task)
    found, before = [], states(run.model)
    for event in run.events():
        after = states(run.model)
        if isinstance(event, event_kind):
            found.append((before, after))
        before = after
    return found


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    assert list(before) == list(after)
    return {name for name in before if not torch.equal(before[name], after[name])}


STATISTICS = {
    f"{norm}.{part}"
    for norm in ("norm", "inner_norm", "outer_norm")
    for part in ("running_mean", "running_var", "num_batches_tracked")
}
GATES = {f"{site}.gate_phi" for site in ("norm", "inner_norm", "outer_norm", "bare", "hidden")}


def test_a_tick_changes_gates_and_the_final_layer_only() -> None:
    # Weight decay and the momentum of a Tock before must not move anything else either.
    for before, after in after_each(Tick, weight_decay=0.1, tock_first=True):
        masks = {name for name in before if name.endswith("gate_mask")}
        assert changed(before, after) - masks == GATES | STATISTICS | {"last.weight", "last.bias"}


def test_a_tick_may_train_shifts_too() -> None:
    for before, after in after_each(Tick, tick_shifts=True):
        shifts = {"norm.bias", "inner_norm.bias", "outer_norm.bias"}
        assert shifts <= changed(before, after)
        assert "bare.bias" not in changed(before, after)


def test_a_tock_trains_all_but_the_frozen_batch_norm_weights() -> None:
    for before, after in after_each(Tock):
        frozen = {name for name in before if name.endswith(("norm.weight", "gate_mask"))}
        assert changed(before, after) == set(before) - frozen


def test_what_the_user_has_frozen_stays_frozen() -> None:
    net, graph, task = prepared()
    net.stem.weight.requires_grad_(False)
    net.last.bias.requires_grad_(False)
    before = states(net)
    result = quick()(net, graph, task)
    kept = result.plan.remaining.get(("stem.weight", 0), torch.arange(8))
    assert torch.equal(result.model.stem.weight, before["stem.weight"][kept])
    assert torch.equal(result.model.last.bias, before["last.bias"])
    assert not result.model.stem.weight.requires_grad
    assert result.model.norm.weight.requires_grad


def test_masked_and_cut_runs_take_the_same_decisions_and_end_in_the_same_weights() -> None:
    results = []
    for cut in ("now", "end"):
        net, graph, task = prepared()
        settings = quick(cut=cut, tick_removes=0.06, keep_macs=0.45, min_ratio=0.0)
        results.append(settings(net, graph, task))
    one, other = results
    ticks = [[event.removed for event in r.history if isinstance(event, Tick)] for r in results]
    assert len(ticks[0]) >= 3
    assert any(isinstance(event, Tock) for event in one.history)
    assert ticks[0] == ticks[1]
    assert torch.equal(one.plan.kept, other.plan.kept)
    for (name, a), b in zip(one.model.state_dict().items(), other.model.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10, msg=name)


def test_aligned_cuts_leave_the_rest_masked_and_change_nothing() -> None:
    net, graph, task = prepared()
    run = Run(quick(), net, graph, task)
    run.pruner.kept = secateur.Plan.random(graph, 0.4, seed=3).kept
    run.gates.mask_(run.pruner.kept)
    images = batches()[0][0]
    run.model.eval()
    masked = run.model(images)
    run.pruner.cut_(run.optimizer, multiple_of=4)
    torch.testing.assert_close(run.model(images), masked, rtol=1e-10, atol=1e-12)
    assert run.model.stem.out_channels == 8  # 5 of 8 are kept
    assert run.model.inner.out_channels == 8  # 7 of 12
    run.pruner.cut_(run.optimizer)
    torch.testing.assert_close(run.model(images), masked, rtol=1e-10, atol=1e-12)
    assert run.model.inner.out_channels == 7


def test_widths_filled_up_with_zeros_are_fine_tuned_to_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for device in ("cpu", "cuda"):
        on_a(device, monkeypatch)
        run = Run(quick(keep_macs=0.45, min_ratio=0.0, momentum=0.9, ema=0.5), *prepared())
        widths = [run.model.inner.out_channels for event in run.events() if isinstance(event, FineTune)]
        results.append((widths, run._result()))
    (narrow, one), (wide, other) = results
    assert set(narrow) == {one.model.inner.out_channels}
    assert set(wide) == {8} != set(narrow)
    assert torch.equal(one.plan.kept, other.plan.kept)
    for (name, a), b in zip(one.model.state_dict().items(), other.model.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10, msg=name)


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
    task = secateur.classification(batches(), batches())
    settings = quick(min_ratio=0.0, finetune_epochs=4, finetune_lr=(0.01, 0.05), weight_decay=0.01)
    *_, tuned, end = settings.steps(net, secateur.analyze(net, batches()[0][0]), task)
    assert isinstance(tuned, FineTune)
    assert tuned.metrics["loss"] == pytest.approx(end.metrics["loss"], rel=1e-9)


def test_the_same_seed_gives_the_same_result_and_leaves_the_callers_random_numbers_alone() -> None:
    outcomes = []
    for seed in (0, 0, 1):
        net, graph, task = prepared()
        torch.manual_seed(5)
        torch.rand(seed + 1)
        before = torch.get_rng_state()
        outcomes.append(states(quick(tick_data=0.5, seed=seed)(net, graph, task).model))
        assert torch.equal(before, torch.get_rng_state())
    assert same(outcomes[0], outcomes[1])
    assert not same(outcomes[0], outcomes[2])


def test_history_and_settings_are_plain_data() -> None:
    net, graph, task = prepared()
    *_, last = events = list(quick().steps(net, graph, task))
    assert isinstance(last, Finished)
    told = [json.loads(json.dumps(event.to_dict())) for event in events]
    assert [t["event"] for t in told][:3] == ["Start", "Tick", "Tick"]
    assert json.loads(json.dumps(last.result.settings.to_dict()))["keep_macs"] == 0.5
    assert "MACs" in str(last.result)
    assert "accuracy" in str(last.result)


def exploding(at: int, task: Task) -> Task:
    """The loss turns NaN at this call."""
    calls = 0

    def loss(model: nn.Module, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return task.loss(model, batch) * (math.nan if calls == at else 1.0)

    return Task(task.train, loss, task.evaluate)


@pytest.mark.parametrize(
    ("at", "where", "done"),
    [
        (3, "Tick 1, step 3", "Start"),
        (6 * 2 + 6 + 4, "Tock 1, epoch 2 of 2, step 4", "Tock 1, epoch 1"),
    ],
)
def test_a_run_that_diverges_says_where_and_keeps_the_last_good_state(at: int, where: str, done: str) -> None:
    net, graph, task = prepared()
    with pytest.raises(Diverged, match=rf"not finite in {where}: .* after {done} is in") as caught:
        quick(tick_removes=0.02)(net, graph, exploding(at, task))
    result = caught.value.result
    assert isinstance(result, secateur.Result)
    assert names([result.history[-1]]) == done
    assert all(t.isfinite().all() for t in result.model.state_dict().values())
    assert list(result.model.state_dict()) == list(net.state_dict())
    assert result.model(batches()[0][0]).shape == (16, CLASSES)
    if done == "Start":
        torch.testing.assert_close(result.model.eval()(batches()[0][0]), copy.deepcopy(net).eval()(batches()[0][0]))


def test_divergence_in_fine_tuning_keeps_the_pruned_network() -> None:
    net, graph, task = prepared()
    one_shot = TickTock.one_shot(keep_macs=0.5, finetune_epochs=3)
    with pytest.raises(Diverged, match="FineTune, epoch 2 of 3, step 1") as caught:
        one_shot(net, graph, exploding(6 * 2 + 1, task))
    result = caught.value.result
    assert isinstance(result, secateur.Result)
    assert result.after.macs <= 0.5 * result.before.macs
    assert isinstance(result.history[-1], FineTune)


def test_weights_that_overflow_without_a_bad_loss_are_noticed() -> None:
    net, graph, task = prepared()
    steps = quick(finetune_epochs=1, finetune_lr=(1e307, 1e307), keep_macs=1.0, weight_decay=0.0)
    with pytest.raises(Diverged, match="FineTune, epoch 1"):
        steps(net, graph, Task(batches(1), lambda model, batch: 1e9 * task.loss(model, batch)))


def test_what_was_captured_is_forgotten_whoever_cuts() -> None:
    # A learnt shift behind its gate makes the pruner cut although the run only masks.
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.PReLU(8), nn.Flatten(), nn.Linear(128, CLASSES)
    ).double()
    graph = secateur.analyze(net, batches()[0][0])
    run = Run(quick(cut="end", ticks_per_tock=0), net, graph, secateur.classification(batches()))
    forgotten: list[int] = []
    forget = run.trainer.forget
    run.trainer.forget = lambda: (forgotten.append(run.model[0].out_channels), forget())[0]
    widths = [run.model[0].out_channels for event in run.events() if isinstance(event, Tick)]
    assert len(widths) > 2
    assert list(dict.fromkeys(forgotten)) == widths  # fine-tuning begins anew in any case


def test_chance_follows_the_seed() -> None:
    net, graph, task = prepared()
    kept = [quick(score="random", seed=seed)(net, graph, task).plan.kept.tolist() for seed in (0, 0, 1)]
    assert kept[0] == kept[1] != kept[2]


@pytest.mark.parametrize(
    ("state", "got"), [({"total": None}, "NoneType for 'total'"), ({"count": 3}, "int for 'count'"), ({}, "none")]
)
def test_a_score_that_could_not_go_on_is_refused_at_once(state: dict[str, Any], got: str, tmp_path: Path) -> None:
    score: Any = type("Mine", (secateur.Score,), {"state": lambda self: state})()
    settings, given = quick(score=score), prepared()
    with pytest.raises(InvalidSetting, match=rf"state\(\) of the score Mine must give tensors .*, got {got}"):
        settings.steps(*given, folder=tmp_path)
    assert not list(tmp_path.iterdir())
    settings.steps(*given)


def test_a_folder_of_something_else_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(secateur.DamagedRun, match="does not say that it is a secateur-run"):
        quick().steps(*prepared(), folder=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_rates_do_not_go_below_zero_if_there_are_more_batches_than_told() -> None:
    run = Run(quick(), *prepared())
    for shape in ("triangle", "warmup", "cosine"):
        assert run._rate(shape, 1, 2, (0.0, 0.1))(3 * run.num_batches) == pytest.approx(0.0)


def test_extra_state_that_is_no_tensor(tmp_path: Path) -> None:
    net, graph, task = prepared()

    class Extra(type(net)):
        def get_extra_state(self) -> dict[str, int]:
            return {"version": 2}

        def set_extra_state(self, state: dict[str, int]) -> None:
            assert state == {"version": 2}

    net.__class__ = type(
        "Empty", (Extra,), {"get_extra_state": lambda self: {}, "set_extra_state": lambda self, s: None}
    )
    quick()(net, graph, task, folder=tmp_path)
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    net.__class__ = Extra
    result = quick()(net, graph, task)
    assert isinstance(result.model, Extra)
    with pytest.raises(InvalidModel, match=r"the model \(Extra\) has extra state, which files of tensors cannot hold"):
        secateur.save(result, tmp_path / "result")
    with pytest.raises(InvalidModel, match=r"prune without a folder and torch\.save the result's model yourself"):
        quick()(net, graph, task, folder=tmp_path / "run")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("wrong", ["value", "size"])
def test_a_cut_that_turns_out_wrong_is_no_result(wrong: str) -> None:
    class Particular(nn.Module):
        """Minds its width, which an analysis without the probe does not see."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(2, 8, 3), nn.Conv2d(8, CLASSES, 4)

        def forward(self, images: Tensor) -> Tensor:
            x = F.relu(self.first(images))
            if x.shape[1] < 8:
                x = x * 2 if wrong == "value" else x.reshape(-1, 8, 4, 4)
            return self.last(x).flatten(1)

    model = Particular().double()
    graph = secateur.analyze(model, batches()[0][0], probe=False)
    message = "because of group 'first'; leave it out" if wrong == "value" else "the pruned network does not run: "
    with pytest.raises(secateur.NotEquivalent, match=message):
        quick(cut="end", keep_macs=0.6)(model, graph, prepared()[2])


def test_what_only_the_loss_reads_is_named_where_a_cut_breaks_it() -> None:
    net, _, task = prepared()
    net.centres = nn.Parameter(torch.zeros(CLASSES, 9, dtype=torch.float64))

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        seen: list[Tensor] = []
        handle = model.hidden.register_forward_hook(lambda module, args, output: seen.append(output))
        scores = model(batch[0])
        handle.remove()
        return F.cross_entropy(scores, batch[1]) + (seen[0] - model.centres[batch[1]]).square().mean()

    graph = secateur.analyze(net, batches(1)[0][0])
    with pytest.raises(RuntimeError, match="must match") as error:
        quick(keep_macs=0.2, cut="now")(net, graph, Task(task.train, loss))
    assert any("may be cut: centres; pass" in note for note in error.value.__notes__)
