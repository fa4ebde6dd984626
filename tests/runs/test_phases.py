"""What the settings of training do inside a run: distillation, averages, optimizers, rates, precision."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small import Net, batches, prepared, quick
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from secateur import InvalidSetting, InvalidTask, Result, Task, TickTock, UnknownName, analyze, classification
from secateur.runs.run import Run
from secateur.training.distill import distilled
from secateur.training.ema import Ema
from secateur.training.engine import Engine
from secateur.training.schedules import SHAPES


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


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
    divergence = sum(
        float(theirs[i, c] * (theirs[i, c] / ours[i, c]).log())
        for i in range(images.shape[0])
        for c in range(ours.shape[1])
    ) / len(images)
    assert float(found.detach()) == pytest.approx((1 - weight) * own + weight * temperature**2 * divergence, rel=1e-6)


def test_the_teacher_is_frozen_and_only_the_student_learns() -> None:
    model, teacher = two_networks()
    before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    distilled(cross_entropy, teacher, 0.5, 4.0)(model, batches(1)[0]).backward()
    assert not teacher.training
    assert not any(p.requires_grad or p.grad is not None for p in teacher.parameters())
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.last.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in teacher.state_dict().items())
    assert not model._forward_hooks


def test_a_student_that_is_its_teacher_gets_no_gradient_from_it() -> None:
    model, _ = two_networks()
    model.eval()
    teacher = Net().double()
    teacher.load_state_dict(model.state_dict())
    distilled(cross_entropy, teacher, 0.5, 4.0)(model, batches(1)[0]).backward()
    mixed = model.last.weight.grad
    model.zero_grad()
    cross_entropy(model, batches(1)[0]).backward()
    assert mixed is not None
    assert model.last.weight.grad is not None
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


def test_what_cannot_be_distilled_is_said() -> None:
    model, teacher = two_networks()
    with pytest.raises(InvalidTask, match="never called the model"):
        distilled(lambda model, batch: torch.zeros(()), teacher, 0.5, 4.0)(model, batches(1)[0])
    flat, other = nn.Sequential(nn.Flatten(0)), nn.Sequential(nn.Flatten(0))
    with pytest.raises(InvalidTask, match="only scores over classes can be distilled"):
        distilled(lambda model, batch: model(batch[0]).sum(), other, 0.5, 4.0)(flat, batches(1)[0])


def test_what_cannot_be_distilled_is_said_before_anything_is_pruned() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 3))

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"logits": self.net(x)}

    net = Named()
    graph = analyze(net, torch.randn(1, 3, 5, 5))
    task = Task([torch.randn(2, 3, 5, 5)], lambda model, batch: model(batch)["logits"].square().mean())
    with pytest.raises(InvalidTask, match="only scores over classes can be distilled; the model gives a dict"):
        Run(quick(distill=0.5), net, graph, task)


def test_the_given_network_teaches_in_tocks_and_fine_tuning_but_not_in_ticks() -> None:
    net, graph, task = prepared()
    run = Run(quick(distill=0.5), net, graph, task)
    used: dict[str, set[Any]] = {}
    epoch = run._epoch

    def note(where: str, loss: Any, *others: Any, **more: Any) -> float:
        used.setdefault(run.cursor.phase, set()).add(loss)
        return epoch(where, loss, *others, **more)

    run._epoch = note
    list(run.events())
    assert used == {"Tick": {task.loss}, "Tock": {run.loss}, "FineTune": {run.loss}}
    assert run.loss is not task.loss


def test_an_average_by_hand() -> None:
    net = nn.BatchNorm1d(1)
    ema = Ema(net, 0.8)
    wanted = 1.0
    for value in (3.0, -2.0, 5.0):
        with torch.no_grad():
            net.weight.fill_(value)
        ema.update()
        wanted = 0.8 * wanted + 0.2 * value
    assert net.weight.item() == 5.0
    with ema.applied():
        assert net.weight.item() == pytest.approx(wanted)
    assert net.weight.item() == 5.0


def with_average() -> tuple[Result, list[dict[str, Tensor]], list[list[Tensor]]]:
    """A run that only fine-tunes: its result, the average after every step by hand, and what was evaluated."""
    net, graph, task = prepared()
    evaluated: list[list[Tensor]] = []

    def evaluate(model: nn.Module) -> dict[str, float]:
        evaluated.append([tensor.detach().clone() for tensor in model.state_dict().values()])
        return {"accuracy": 1.0}

    run = Run(quick(keep_macs=1.0, ema=0.8), net, graph, Task(task.train, task.loss, evaluate))
    averages: list[dict[str, Tensor]] = []

    def update(real: Callable[[], None]) -> Callable[[], None]:
        def after() -> None:
            real()
            last = averages[-1] if averages else {n: t.clone() for n, t in net.state_dict().items()}
            now = run.model.state_dict()
            averages.append(
                {n: 0.8 * last[n] + 0.2 * now[n] if now[n].is_floating_point() else now[n].clone() for n in now}
            )

        return after

    begin = run.begin_finetune

    def begin_finetune() -> None:
        begin()
        assert run.ema is not None
        run.ema.update = update(run.ema.update)

    run.begin_finetune = begin_finetune
    *_, last = run.events()
    return last.result, averages, evaluated  # pyright: ignore


def test_the_result_has_the_average_and_evaluation_sees_it() -> None:
    result, averages, evaluated = with_average()
    assert len(averages) == 12
    for name, tensor in result.model.state_dict().items():
        torch.testing.assert_close(tensor, averages[-1][name])
    start, first, second, *_ = evaluated
    for found, wanted in zip(first, averages[5].values(), strict=True):
        torch.testing.assert_close(found, wanted)
    for found, wanted in zip(second, averages[11].values(), strict=True):
        torch.testing.assert_close(found, wanted)
    assert not torch.equal(start[0], first[0])


def test_an_average_does_not_disturb_training() -> None:
    net, graph, task = prepared()
    losses = []
    for ema in (0.0, 0.9):
        result = quick(ema=ema, finetune_epochs=3)(net, graph, task)
        losses.append([event.loss for event in result.history[1:]])  # pyright: ignore
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("name", "kind"), [("sgd", torch.optim.SGD), ("AdamW", torch.optim.AdamW), ("rmsprop", torch.optim.RMSprop)]
)
def test_optimizers_by_name(name: str, kind: type[torch.optim.Optimizer]) -> None:
    net, graph, task = prepared()
    run = Run(quick(optimizer=name, weight_decay=0.02, momentum=0.7), net, graph, task)
    assert type(run.optimizer) is kind
    assert run.optimizer.param_groups[0]["weight_decay"] == 0.02
    if "momentum" in run.optimizer.param_groups[0]:
        assert run.optimizer.param_groups[0]["momentum"] == 0.7
    list(run.events())
    assert run.history[-1].share <= 0.5


def test_an_unknown_optimizer() -> None:
    with pytest.raises(UnknownName, match="there is no optimizer 'adamww'; did you mean 'adamw'"):
        quick(optimizer="adamww")(*prepared())


@pytest.mark.parametrize("name", ["muon", "lbfgs", "sparseadam"])
def test_optimizers_that_cannot_train_a_network_step_by_step_are_refused_in_words(name: str) -> None:
    with pytest.raises(InvalidSetting, match=name):
        quick(optimizer=name)(*prepared())


def test_nesterov_reaches_the_optimizer() -> None:
    net, graph, task = prepared()
    assert Run(quick(nesterov=True), net, graph, task).optimizer.param_groups[0]["nesterov"]
    assert not Run(quick(nesterov=True, momentum=0.0), net, graph, task).optimizer.param_groups[0]["nesterov"]
    results = [quick(nesterov=nesterov)(net, graph, task).metrics["loss"] for nesterov in (False, True)]
    assert results[0] != results[1]


def rates(settings: TickTock, engine: Engine | None = None) -> dict[str, list[list[float]]]:
    """The learning rates of every step of every epoch, by phase."""
    net, graph, task = prepared()
    run = Run(settings, net, graph, task, engine=engine)
    found: dict[str, list[list[float]]] = {"Tick": [], "Tock": [], "FineTune": []}
    epoch = run._epoch

    def note(*given: Any, **more: Any) -> float:
        found[run.cursor.phase].append([])
        return epoch(*given, **more)

    def watch(phase: str, step: int, num_steps: int) -> None:
        found[phase][-1].append(run.optimizer.param_groups[0]["lr"])

    run._epoch, run.watch = note, watch
    list(run.events())
    return found


@pytest.mark.parametrize("shape", list(SHAPES))
def test_rates_as_a_run_uses_them(shape: Any) -> None:
    found = rates(quick(tock_shape=shape, finetune_shape=shape, finetune_epochs=3))
    assert all(rate == 0.01 for epoch in found["Tick"] for rate in epoch)
    tock = [SHAPES[shape](step, 12, 0.01, 0.05) for step in range(12)]
    assert found["Tock"][0] + found["Tock"][1] == pytest.approx(tock)
    tuning = [SHAPES[shape](step, 18, 0.01, 0.05) for step in range(18)]
    assert [rate for epoch in found["FineTune"] for rate in epoch] == pytest.approx(tuning)


def plain_fine_tuning(accumulate: int, clip: float | None) -> list[Tensor]:
    net, _, _ = prepared()
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), momentum=0.9, weight_decay=1e-4)
    for epoch in range(2):
        for step, batch in enumerate(batches()):
            optimizer.param_groups[0]["lr"] = SHAPES["triangle"](6 * epoch + step, 12, 0.01, 0.05)
            (cross_entropy(net, batch) / accumulate).backward()
            if step % accumulate == accumulate - 1 or step == 5:
                if clip is not None:
                    nn.utils.clip_grad_norm_(net.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
    return list(net.state_dict().values())


@pytest.mark.parametrize(("accumulate", "clip"), [(1, None), (1, 0.1), (2, None), (4, 0.1)])
def test_a_run_that_only_fine_tunes_is_a_plain_loop(accumulate: int, clip: float | None) -> None:
    engine = Engine(accumulate=accumulate, clip_norm=clip)
    result = quick(keep_macs=1.0)(*prepared(), engine=engine)
    wanted = plain_fine_tuning(accumulate, clip)
    for found, value in zip(result.model.state_dict().values(), wanted, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-9, atol=1e-12)


def test_gates_are_clipped_too() -> None:
    net, graph, task = prepared()
    run = Run(quick(), net, graph, task, engine=Engine(clip_norm=1e-3))
    norms = []
    step = run.optimizer.step

    def watched(*given: Any, **more: Any) -> Any:
        grads = [p.grad for g in run.optimizer.param_groups for p in g["params"] if p.grad is not None]
        norms.append(float(torch.cat([grad.flatten() for grad in grads]).norm()))
        return step(*given, **more)

    run.optimizer.step = watched
    list(run.events())
    assert len(norms) > 12
    assert max(norms) <= 1e-3 * (1 + 1e-6)


def test_evaluation_leaves_the_callers_random_numbers_alone() -> None:
    net, graph, task = prepared()
    images, labels = batches(1)[0]
    test = DataLoader(TensorDataset(images, labels), 4)
    before = torch.get_rng_state()
    quick()(net, graph, classification(task.train, test))
    assert torch.equal(before, torch.get_rng_state())


def single(**settings: Any) -> tuple[TickTock, Net, Any, Task]:
    """The small network in single precision."""
    torch.manual_seed(0)
    net = Net()
    data = batches(dtype=torch.float32)
    return quick(**settings), net, analyze(net, data[0][0][:1]), classification(data, data[:2])


def test_bf16_keeps_weights_gates_and_scores_single() -> None:
    settings, net, graph, task = single(ema=0.5, distill=0.3)
    run = Run(settings, net, graph, task, engine=Engine(precision="bf16"))
    outputs = set()
    handle = run.model.last.register_forward_hook(lambda module, args, output: outputs.add(output.dtype))
    events = run.events()
    next(events)
    next(events)
    handle.remove()
    kinds = {tensor.dtype for tensor in (*run.gates.phis, *run.model.parameters(), run.pruner.score.state()["total"])}
    assert kinds == {torch.float32}
    assert torch.bfloat16 in outputs
    *_, last = events
    found = last.result.model.state_dict()  # pyright: ignore
    assert {tensor.dtype for tensor in found.values()} == {torch.float32, torch.int64}
    assert last.metrics["loss"] == pytest.approx(settings(net, graph, task).metrics["loss"], rel=0.05)


def test_channels_last_changes_the_layout_and_rounding_only() -> None:
    net, graph, task = prepared()
    plain = quick()(net, graph, task)
    run = Run(quick(), net, graph, task, engine=Engine(channels_last=True))
    assert run.model.inner.weight.is_contiguous(memory_format=torch.channels_last)
    *_, last = run.events()
    result: Result = last.result  # pyright: ignore
    assert torch.equal(result.plan.kept, plain.plan.kept)
    assert result.model.inner.weight.is_contiguous(memory_format=torch.channels_last)
    assert not result.model.inner.weight.is_contiguous()
    assert net.inner.weight.is_contiguous()
    for found, wanted in zip(result.model.state_dict().values(), plain.model.state_dict().values(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-10)


def test_channels_last_of_volumes_and_signals() -> None:
    for kind, size in ((nn.Conv1d, (6,)), (nn.Conv3d, (4, 4, 4))):
        net = nn.Sequential(kind(1, 8, 3, padding=1), nn.ReLU(), kind(8, 2, 3, padding=1), nn.Flatten())
        clips = torch.randn(4, 1, *size)
        task = Task([clips], lambda model, batch: model(batch).square().mean())
        settings = TickTock.one_shot(keep_macs=0.6, finetune_epochs=1)
        weight: Any = settings(net, analyze(net, clips), task, engine=Engine(channels_last=True)).model[0].weight  # pyright: ignore
        assert kind is nn.Conv1d or weight.is_contiguous(memory_format=torch.channels_last_3d)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"precision": "fp8"}, "precision must be one of fp32, bf16, fp16, got 'fp8'"),
        ({"accumulate": "4"}, "accumulate must be a whole number, got '4'"),
        ({"graphs": 1}, "graphs must be True or False, got 1"),
        ({"accumulate": 0}, "accumulate and checkpoint_steps must be 1 or more"),
        ({"checkpoint_steps": 0}, "accumulate and checkpoint_steps must be 1 or more"),
        ({"clip_norm": 0.0}, "clip_norm must be above 0, got 0.0"),
        ({"clip_norm": float("nan")}, "clip_norm must be a number, got nan"),
    ],
)
def test_wrong_values_are_refused_in_words(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSetting, match=message):
        Engine(**values)
