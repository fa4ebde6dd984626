"""What each phase trains, with which loss, rates and optimizer, and what it evaluates."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small import STEPS, Net, batches, briefly, finished, make_run, prepared, quick, same, states
from torch import Tensor, nn

from secateur import Engine, Event, InvalidData, Result, Task, TickTock
from secateur.runs.events import Tick, Tock
from secateur.runs.run import Run
from secateur.training.distill import distilled
from secateur.training.ema import Ema
from secateur.training.loop import Work
from secateur.training.schedules import SHAPES
from secateur.training.settings import Training

# What trains.


def around_each(kind: type[Event], **values: Any) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """State dicts before and after every event of this kind, of the gated network, never cut."""
    run = make_run(quick(cut="end", **values), *prepared())
    found, before = [], states(run.model)
    for event in run.events():
        after = states(run.model)
        if isinstance(event, kind):
            found.append((before, after))
        before = after
    assert found
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
    for before, after in around_each(Tick, weight_decay=0.1, tock_first=True):
        masks = {name for name in before if name.endswith("gate_mask")}
        assert changed(before, after) - masks == GATES | STATISTICS | {"last.weight", "last.bias"}


def test_a_tick_may_train_shifts_too() -> None:
    for before, after in around_each(Tick, tick_shifts=True):
        assert {"norm.bias", "inner_norm.bias", "outer_norm.bias"} <= changed(before, after)
        assert "bare.bias" not in changed(before, after)


def test_a_tock_trains_all_but_the_frozen_batch_norm_weights() -> None:
    for before, after in around_each(Tock):
        frozen = {name for name in before if name.endswith(("norm.weight", "gate_mask"))}
        assert changed(before, after) == set(before) - frozen


def test_a_tock_shrinks_gates_by_its_sparsity() -> None:
    plain, sparse = (around_each(Tock, tock_first=True, tock_sparsity=sparsity)[1] for sparsity in (0.0, 1.0))
    for name in GATES - {"bare.gate_phi", "hidden.gate_phi"}:  # the L1 term weighs gates of filters less
        assert sparse[1][name].abs().sum() < 0.95 * plain[1][name].abs().sum()


@pytest.mark.parametrize(("values", "count"), [({}, STEPS), ({"tick_data": 0.5}, 2), ({"tick_data": 0.1}, 1)])
def test_a_tick_sees_its_part_of_the_data(values: dict[str, Any], count: int) -> None:
    seen = works(quick(**values))["Tick"]
    assert {work.steps for work in seen} == {count}


def test_a_tick_scores_what_it_has_seen_itself() -> None:
    """Scores that watch outputs have watched Tocks and evaluations too."""
    run = make_run(quick(score="apoz", tock_first=True), *prepared())
    begun: list[int] = []
    assert run.pruner is not None
    begin = run.pruner.score.begin
    run.pruner.score.begin = lambda gates: (begun.append(run.num_steps), begin(gates))[1]
    events = run.events()
    while not isinstance(next(events), Tick):
        pass
    assert begun[0] == 2 * STEPS  # after the Tock, before the Tick


@pytest.mark.parametrize(("decay_norms", "fell"), [(True, {"norm", "filter"}), (False, {"filter"})])
def test_weight_decay_on_filters_alone(decay_norms: bool, fell: set[str]) -> None:
    """The loss has no gradient, so that nothing but weight decay moves anything."""
    net, graph, task = prepared()
    nothing = Task(task.train, lambda model, batch: 0 * model(batch[0]).sum())
    settings = briefly(epochs=1, weight_decay=0.1, decay_norms=decay_norms)
    after = dict(finished(settings, net, graph, nothing).model.named_parameters())
    kinds = {
        "filter" if p.dim() > 1 else "norm"
        for name, p in net.named_parameters()
        if not torch.allclose(p, after[name], rtol=1e-9)
    }
    assert kinds == fell


# Losses, rates and optimizers.


class Seen:
    """An epoch of a run: its loss, its rates, and what it trained with."""

    def __init__(self, work: Work) -> None:
        self.loss, self.optimizer, self.rates = work.loss, work.optimizer, list[float]()

    @property
    def steps(self) -> int:
        return len(self.rates)


def works(settings: TickTock | Training, task: Task | None = None, **options: Any) -> dict[str, list[Seen]]:
    """Every epoch of a run, by the name of its work."""
    net, graph, plain = prepared()
    return watched(make_run(settings, net, graph, task or plain, **options))


def watched(run: Run) -> dict[str, list[Seen]]:
    found: dict[str, list[Seen]] = {}
    epoch = run.trainer.epoch

    def note(batches: Any, work: Work, *others: Any) -> float:
        seen = Seen(work)
        found.setdefault(work.name, []).append(seen)
        step = work.after_update

        def after() -> None:
            seen.rates.append(float(work.optimizer.param_groups[0]["lr"]))
            if step is not None:
                step()

        work.after_update = after
        return epoch(batches, work, *others)

    run.trainer.epoch = note
    list(run.events())
    return found


@pytest.mark.parametrize("shape", list(SHAPES))
def test_rates(shape: Any) -> None:
    seen = works(quick(tock_shape=shape, finetune_shape=shape, finetune_epochs=3))
    assert all(rate == 0.01 for epoch in seen["Tick"] for rate in epoch.rates)
    tock = [SHAPES[shape](step, 2 * STEPS, 0.01, 0.05) for step in range(2 * STEPS)]
    assert seen["Tock"][0].rates + seen["Tock"][1].rates == pytest.approx(tock)
    tuning = [SHAPES[shape](step, 3 * STEPS, 0.01, 0.05) for step in range(3 * STEPS)]
    assert [rate for epoch in seen["finetune"] for rate in epoch.rates] == pytest.approx(tuning)


def test_rates_of_steps() -> None:
    schedule = briefly(shape="steps", milestones=(0.5, 0.75), divide=2, lr=0.8).schedule
    assert [schedule.rate(step, 8) for step in range(8)] == [0.8] * 4 + [0.4] * 2 + [0.2] * 2


@pytest.mark.parametrize("shape", ["triangle", "warmup", "cosine"])
def test_rates_do_not_go_below_zero_if_there_are_more_batches_than_told(shape: str) -> None:
    assert briefly(shape=shape, lr_low=0.0).schedule.rate(3 * STEPS, 2 * STEPS) == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("name", "kind"), [("sgd", torch.optim.SGD), ("AdamW", torch.optim.AdamW), ("rmsprop", torch.optim.RMSprop)]
)
def test_optimizers_by_name(name: str, kind: type[torch.optim.Optimizer]) -> None:
    settings = quick(optimizer=name, weight_decay=0.02, momentum=0.7, nesterov=True, retrain_epochs=1)
    seen = works(settings)
    used = {id(epoch.optimizer): epoch.optimizer for epochs in seen.values() for epoch in epochs}
    assert len(used) == 3  # of the retrain phase, of pruning, and of fine-tuning
    for optimizer in used.values():
        assert type(optimizer) is kind
        (group,) = optimizer.param_groups
        assert group["weight_decay"] == 0.02
        assert group.get("momentum", 0.7) == 0.7
        assert group.get("nesterov", True)


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def plain_training(accumulate: int, clip: float | None) -> Net:
    net, _, _ = prepared()
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), momentum=0.9, weight_decay=1e-4)
    for epoch in range(2):
        for step, batch in enumerate(batches()):
            optimizer.param_groups[0]["lr"] = SHAPES["triangle"](STEPS * epoch + step, 2 * STEPS, 0.01, 0.05)
            (cross_entropy(net, batch) / accumulate).backward()
            if step % accumulate == accumulate - 1 or step == STEPS - 1:
                if clip is not None:
                    nn.utils.clip_grad_norm_(net.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
    return net


@pytest.mark.parametrize(("accumulate", "clip"), [(1, None), (1, 0.1), (2, None), (3, 0.1)])
def test_training_is_a_plain_loop(accumulate: int, clip: float | None) -> None:
    result = finished(briefly(), *prepared(), engine=Engine(accumulate=accumulate, clip_norm=clip))
    wanted = plain_training(accumulate, clip)
    for found, value in zip(states(result.model).values(), states(wanted).values(), strict=True):
        torch.testing.assert_close(found, value, rtol=1e-9, atol=1e-12)


def test_fine_tuning_and_retraining_are_that_training() -> None:
    """With a budget that is met at once, nothing is removed."""
    wanted = finished(briefly(), *prepared())
    tuned = finished(quick(keep_macs=1.0), *prepared())
    again = finished(quick(keep_macs=1.0, retrain_epochs=2, finetune_epochs=0), *prepared())
    based = finished(quick(keep_macs=1.0, finetune_epochs=0), *prepared(), baseline=briefly())
    assert tuned.after == tuned.before
    for other in (tuned, again, based):
        for found, value in zip(states(other.model).values(), states(wanted.model).values(), strict=True):
            torch.testing.assert_close(found, value, rtol=1e-9, atol=1e-12)


def test_gates_are_clipped_too() -> None:
    run = make_run(quick(), *prepared(), engine=Engine(clip_norm=1e-3))
    norms: list[float] = []

    def note(phase: str, step: int, of: int) -> None:
        grads = [p.grad for p in run.model.parameters() if p.requires_grad and p.grad is not None]
        norms.append(float(torch.cat([grad.flatten() for grad in grads]).norm()))

    run.on_step = note
    events = run.events()
    while not isinstance(next(events), Tock):
        pass
    assert max(norms[2 * STEPS :]) <= 1e-3 * (1 + 1e-6)
    assert len(norms) == 3 * STEPS


# Distillation.


def two_networks() -> tuple[Net, Net]:
    torch.manual_seed(0)
    return Net().double(), Net().double()


@pytest.mark.parametrize(("weight", "temperature"), [(0.3, 4.0), (0.9, 1.0)])
def test_the_value_of_the_distilled_loss(weight: float, temperature: float) -> None:
    model, teacher = two_networks()
    images, labels = batches(1)[0]
    found = distilled(cross_entropy, teacher, weight, temperature)(model, (images, labels))
    with torch.no_grad():
        ours = (model(images) / temperature).softmax(1)
        theirs = (teacher(images) / temperature).softmax(1)
        own = float(F.cross_entropy(model(images), labels))
    divergence = float((theirs * (theirs / ours).log()).sum()) / len(images)
    assert float(found.detach()) == pytest.approx((1 - weight) * own + weight * temperature**2 * divergence, rel=1e-6)


def test_the_teacher_is_frozen_and_only_the_student_learns() -> None:
    model, teacher = two_networks()
    before = states(teacher)
    distilled(cross_entropy, teacher, 0.5, 4.0)(model, batches(1)[0]).backward()
    assert not teacher.training
    assert not any(p.requires_grad or p.grad is not None for p in teacher.parameters())
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.last.parameters())
    assert same(before, states(teacher))
    assert not model._forward_hooks


def test_a_student_that_is_its_teacher_gets_no_gradient_from_it() -> None:
    model, teacher = two_networks()
    model.eval()
    teacher.load_state_dict(model.state_dict())
    distilled(cross_entropy, teacher, 0.5, 4.0)(model, batches(1)[0]).backward()
    mixed = model.last.weight.grad
    model.zero_grad()
    cross_entropy(model, batches(1)[0]).backward()
    torch.testing.assert_close(mixed, 0.5 * model.last.weight.grad)


def test_networks_that_write_to_their_input_do_not_disturb_each_other() -> None:
    class Shifting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(4, 3)

        def forward(self, values: Tensor) -> Tensor:
            return self.last(values.add_(1))

    torch.manual_seed(0)
    model, teacher = Shifting(), Shifting()
    values, labels = torch.randn(5, 4), torch.arange(5) % 3
    found = distilled(cross_entropy, teacher, 0.5, 1.0)(model, (values.clone(), labels))
    with torch.no_grad():
        ours, theirs = (network.last(values + 1).log_softmax(1) for network in (model, teacher))
        divergence = F.kl_div(ours, theirs, reduction="batchmean", log_target=True)
        expected = 0.5 * F.nll_loss(ours, labels) + 0.5 * divergence
    torch.testing.assert_close(found.detach(), expected)


def test_losses_and_outputs_that_cannot_be_distilled() -> None:
    model, teacher = two_networks()
    with pytest.raises(InvalidData):
        distilled(lambda model, batch: torch.zeros(()), teacher, 0.5, 4.0)(model, batches(1)[0])
    flat, other = nn.Sequential(nn.Flatten(0)), nn.Sequential(nn.Flatten(0))
    with pytest.raises(InvalidData):
        distilled(lambda model, batch: model(batch[0]).sum(), other, 0.5, 4.0)(flat, batches(1)[0])


def test_the_whole_network_teaches_in_tocks_and_fine_tuning_only(monkeypatch: pytest.MonkeyPatch) -> None:
    net, graph, task = prepared()
    teachers: list[dict[str, Tensor]] = []

    def noted(loss: Any, teacher: nn.Module, *others: Any) -> Any:
        teachers.append(states(teacher))
        return distilled(loss, teacher, *others)

    monkeypatch.setattr("secateur.runs.lessons.distilled", noted)
    settings = quick(distill=0.5, retrain_epochs=1)
    run = make_run(settings, net, graph, task)
    seen = watched(run)
    for name in ("retrain", "Tick"):
        assert {epoch.loss for epoch in seen[name]} == {task.loss}
    for name in ("Tock", "finetune"):
        assert task.loss not in {epoch.loss for epoch in seen[name]}
    retrained = finished(briefly(epochs=1), net, graph, task).model  # the same training, of the same seed and stage
    assert len(teachers) == 2
    for teacher in teachers:
        assert not same(teacher, states(net))
        assert list(teacher) == list(states(net))
        assert same(teacher, states(retrained))


# A moving average of the weights.


def test_an_average_by_hand() -> None:
    net = nn.BatchNorm1d(1)
    ema = Ema(net, 0.8)
    wanted = 1.0
    for value in (3.0, -2.0, 5.0):
        with torch.no_grad():
            net.weight.fill_(value)
            assert net.running_var is not None
            net.running_var.fill_(value)
        ema.update()
        wanted = 0.8 * wanted + 0.2 * value
    assert net.weight.item() == 5.0
    with ema.applied():
        assert net.weight.item() == net.running_var.item() == pytest.approx(wanted)
    assert net.weight.item() == 5.0


def with_average(monkeypatch: pytest.MonkeyPatch) -> tuple[Result, list[dict[str, Tensor]], list[list[Tensor]]]:
    """A run that only trains: its result, the average after every step by hand, and what was evaluated."""
    net, graph, task = prepared()
    evaluated: list[list[Tensor]] = []
    averages: list[dict[str, Tensor]] = []

    def evaluate(model: nn.Module) -> dict[str, float]:
        evaluated.append(list(states(model).values()))
        return {"accuracy": 1.0}

    run = make_run(briefly(ema=0.8), net, graph, Task(task.train, task.loss, evaluate))
    update = Ema.update

    def noted(ema: Ema) -> None:
        update(ema)
        last, now = averages[-1] if averages else states(net), states(run.model)
        averages.append({n: 0.8 * last[n] + 0.2 * now[n] if now[n].is_floating_point() else now[n] for n in now})

    monkeypatch.setattr(Ema, "update", noted)
    *_, last = run.events()
    return last.result, averages, evaluated


def test_the_result_has_the_average_and_evaluation_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    result, averages, evaluated = with_average(monkeypatch)
    assert len(averages) == 2 * STEPS
    for name, tensor in states(result.model).items():
        torch.testing.assert_close(tensor, averages[-1][name])
    start, first, second, *_ = evaluated
    for seen, average in ((first, averages[STEPS - 1]), (second, averages[-1])):
        for found, wanted in zip(seen, average.values(), strict=True):
            torch.testing.assert_close(found, wanted)
    assert not torch.equal(start[0], first[0])


def test_an_average_does_not_disturb_training() -> None:
    losses = []
    for ema in (0.0, 0.9):
        result = finished(quick(ema=ema, finetune_epochs=3), *prepared())
        losses.append([event.loss for event in result.history[1:]])
    assert losses[0] == losses[1]
