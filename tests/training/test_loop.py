"""Epochs and learning rates."""

import math
import random
from itertools import pairwise
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from secateur import InvalidData
from secateur.randomness import mix, seeded
from secateur.training.engine import Engine
from secateur.training.loop import NonFiniteLoss, Position, Trainer, Work, set_modes_
from secateur.training.schedules import triangle


def data(count: int = 5) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(4, 3, generator=generator), torch.randn(4, 1, generator=generator)) for _ in range(count)]


def squared(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def test_one_cycle_at_given_iterations() -> None:
    # 391 batches, 10 epochs, 1e-3 to 1e-2 and back.
    rates = [triangle(step, 3910, 1e-3, 1e-2) for step in range(3910)]
    assert rates[0] == 1e-3
    assert rates[1955] == pytest.approx(1e-2)
    assert rates[1955 // 2] == pytest.approx(1e-3 + 9e-3 * 977 / 1955)
    assert rates[3909] == pytest.approx(1e-3 + 9e-3 / 1955)
    assert max(rates) == rates[1955]
    rises = [b - a for a, b in pairwise(rates[:1956])]
    assert max(rises) == pytest.approx(min(rises))
    assert rates[100] == pytest.approx(rates[3910 - 100])


def train_epoch(
    net: nn.Module, batches: Any, optimizer: torch.optim.Optimizer, engine: Engine | None = None, **work: Any
) -> float:
    return Trainer(net, engine or Engine()).epoch(batches, Work("test", squared, optimizer, **work))


def plain_loop(net: nn.Module, accumulate: int = 1, clip: float | None = None) -> float:
    optimizer = torch.optim.SGD(net.parameters(), momentum=0.9, weight_decay=0.1)
    losses = []
    for step, batch in enumerate(data()):
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        value = squared(net, batch)
        if step % accumulate == 0:
            optimizer.zero_grad()
        (value / accumulate).backward()
        if step % accumulate == accumulate - 1 or step == 4:
            if clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
        losses.append(float(value.detach()))
    return sum(losses) / 5


@pytest.mark.parametrize(
    "engine", [Engine(), Engine(accumulate=2), Engine(clip_norm=0.1), Engine(accumulate=3, clip_norm=0.2)]
)
def test_an_epoch_is_what_a_plain_loop_does(engine: Engine) -> None:
    torch.manual_seed(0)
    net, other = nn.Linear(3, 1), nn.Linear(3, 1)
    other.load_state_dict(net.state_dict())
    seen: list[int] = []
    optimizer = torch.optim.SGD(net.parameters(), momentum=0.9, weight_decay=0.1)
    loss = train_epoch(
        net, data(), optimizer, engine, rate=lambda s: 0.1 / (1 + s), after_backward=lambda: seen.append(1)
    )
    expected = plain_loop(other, engine.accumulate, engine.clip_norm)
    assert torch.equal(net.weight, other.weight)
    assert loss == pytest.approx(expected)
    assert len(seen) == math.ceil(5 / engine.accumulate)


def test_a_gpu_that_is_used_first_afterwards_gets_the_users_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = list[int]()
    monkeypatch.setattr(torch.cuda, "manual_seed_all", waiting.append)
    for kind in (torch.accelerator, torch.cuda):
        monkeypatch.setattr(kind, "is_available", lambda: True)
    torch.manual_seed(123)
    with seeded(7):
        assert waiting[-1] != 123
    assert waiting[-1] == 123


def test_an_epoch_goes_on_where_another_stopped() -> None:
    def run(stop: int | None) -> tuple[torch.Tensor, float]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(net.parameters(), momentum=0.9)
        work = Work("test", squared, optimizer, rate=lambda s: 0.1)
        position = None
        if stop is not None:
            kept: list[Position] = []

            def note(step: int) -> None:
                if step == stop:
                    kept.append(trainer.position(step))
                    raise KeyboardInterrupt

            trainer = Trainer(net)
            with seeded(1), pytest.raises(KeyboardInterrupt):
                trainer.epoch(data(), work, after_step=note)
            (position,) = kept
        with seeded(1):
            loss = Trainer(net).epoch(data(), work, position)
        return net[0].weight.detach(), loss

    whole = run(None)
    for stop in (1, 3, 5):
        weight, loss = run(stop)
        assert torch.equal(weight, whole[0])
        assert loss == whole[1]


def test_gradients_of_parameters_that_no_optimizer_has_do_not_pile_up() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    sizes: list[torch.Tensor] = []
    optimizer = torch.optim.SGD(net[1].parameters())
    train_epoch(
        net, data(1) * 3, optimizer, rate=lambda s: 0.0, after_backward=lambda: sizes.append(net[0].weight.grad.norm())
    )
    assert sizes[0] == sizes[1] == sizes[2]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_no_number_stops_at_its_step(bad: float) -> None:
    batches = data()
    batches[3][1][0] = bad
    net = nn.Linear(3, 1)
    with pytest.raises(NonFiniteLoss) as caught:
        train_epoch(net, batches, torch.optim.SGD(net.parameters()), rate=lambda s: 0.01)
    assert caught.value.step == 3


def test_no_batches() -> None:
    net = nn.Linear(3, 1)
    with pytest.raises(InvalidData):
        train_epoch(net, [], torch.optim.SGD(net.parameters()), rate=lambda s: 0.01)


def test_half_precision_keeps_weights_single() -> None:
    net = nn.Linear(3, 1)
    kinds: list[torch.dtype] = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        out = model(batch[0])
        kinds.append(out.dtype)
        return (out.float() - batch[1]).square().mean()

    work = Work("test", loss, torch.optim.SGD(net.parameters()), rate=lambda s: 0.01)
    Trainer(net, Engine(precision="bf16")).epoch(data(), work)
    assert set(kinds) == {torch.bfloat16}
    assert net.weight.dtype == torch.float32


def test_seeds() -> None:
    def draw() -> tuple[float, ...]:
        return float(torch.rand(())), random.random(), float(numpy.random.rand())

    def states() -> Any:
        return torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state())

    before, drawn = states(), []
    for counters in [(1, 2), (1, 2), (2, 1), (1,)]:
        with seeded(0, *counters):
            drawn.append(draw())
    assert drawn[0] == drawn[1]
    assert [len(set(numbers)) for numbers in zip(*drawn, strict=True)] == [3, 3, 3]
    assert states() == before
    assert len({mix(seed, phase, epoch) for seed in range(4) for phase in range(20) for epoch in range(20)}) == 1600


@pytest.mark.parametrize("tune", [True, False])
def test_what_is_chosen_of_cudnn_while_training(tune: bool) -> None:
    seen: list[tuple[bool, bool]] = []

    def look(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.append((torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic))
        return squared(model, batch)

    net = nn.Linear(3, 1)
    work = Work("test", look, torch.optim.SGD(net.parameters()), rate=lambda step: 0.1)
    Trainer(net, Engine(tune=tune)).epoch(data(), work)
    assert set(seen) == {(tune, not tune)}
    assert not torch.backends.cudnn.deterministic


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("fixed", [True, False])
def test_recurrent_layers_can_always_be_differentiated(trains: bool, fixed: bool) -> None:
    # cuDNN gives no gradients in evaluation mode.
    net = nn.Sequential(nn.Conv1d(2, 4, 1), nn.BatchNorm1d(4), nn.LSTM(5, 3), nn.Dropout())
    set_modes_(net, trains, fixed)
    assert [layer.training for layer in net] == [trains and not fixed, trains and not fixed, True, trains and not fixed]
