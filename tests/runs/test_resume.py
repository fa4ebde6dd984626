"""A run that was stopped at any moment is resumed and gives the same result, bit for bit."""

import copy
import gc
import os
import random
import shutil
import signal
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from small import Net, batches, briefly, choosing, finished, make_run, on_a, prepared, quick, same, states
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler

import secateur
from secateur import Engine, Event, InvalidData, InvalidSetting, Result, Task, analyze
from secateur.errors import Interrupted
from secateur.runs import record
from secateur.runs.events import FineTune, Tick, Train
from secateur.runs.run import Run
from secateur.training.checkpoint import RunFolder

RICH: dict[str, Any] = {"tick_data": 0.7, "ema": 0.5, "distill": 0.5, "tick_removes": 0.15, "repair": 12}
"""Settings with much to remember."""
STEPWISE = Engine(checkpoint_steps=1)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save whenever it is due, and do not wait for the disk."""
    monkeypatch.setattr(record, "PATIENCE", 0)
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def timeless(history: tuple[Event, ...]) -> list[dict[str, Any]]:
    return [{**event.to_dict(), "seconds": 0.0} for event in history]


def assert_same_result(one: Result, other: Result, message: str = "") -> None:
    assert timeless(one.history) == timeless(other.history), message
    assert torch.equal(one.plan.kept, other.plan.kept), message
    assert same(states(one.model), states(other.model)), message


def test_steps_between_checkpoints_are_those_of_the_optimizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(accumulate=4, checkpoint_steps=2)
    net, graph, _ = prepared()
    task = secateur.classification(batches(13, 4))
    run = make_run(quick(keep_macs=0.9, finetune_epochs=1), net, graph, task, engine=engine, folder=tmp_path)
    saved = list[int]()
    save = Run.save
    monkeypatch.setattr(Run, "save", lambda run, *given: (saved.append(run.position.step), save(run, *given)))
    deque(run.events(), maxlen=0)
    assert set(saved) == {0, 8}


class Moments:
    """Copies of a run's folder as a killed process would leave it, after checkpoints and events, by their number."""

    def __init__(self, folder: Path, every: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.every = folder, every
        self.copies: dict[int, Path] = {}
        self.count = 0
        self._monkeypatch = monkeypatch

    def record(self, settings: Any, *given: Any, **options: Any) -> Result:
        """The result of a run that is never stopped."""
        save, path = RunFolder.save, self.folder / "whole"

        def copying(folder: RunFolder, state: dict[str, Any], name: str | None = None) -> Path:
            saved = save(folder, state, name)
            if name is None:
                self._copy(path)
            return saved

        with self._monkeypatch.context() as patch:
            patch.setattr(RunFolder, "save", copying)
            run = make_run(settings, *given, folder=path, **options)
            for event in run.events():
                if isinstance(event, secateur.runs.events.Finished):
                    return event.result
                self._copy(path)
        raise AssertionError("the run did not finish")

    def _copy(self, path: Path) -> None:
        if self.count % self.every == self.every // 2:
            self.copies[self.count] = shutil.copytree(path, self.folder / f"{self.count}")
        self.count += 1


def check_all_moments(
    settings: Any,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    make_task: Callable[[], Task] = lambda: prepared()[2],
    engine: Engine = STEPWISE,
    every: int = 29,
    **options: Any,
) -> Result:
    """Resume from these moments of a run, and compare with the run that was never stopped.

    every: of all moments take every so many; 1 takes all.
    """
    net, graph, _ = prepared()
    moments = Moments(folder, every, monkeypatch)
    whole = moments.record(settings, net, graph, make_task(), engine=engine, **options)
    assert moments.count > 2 * len(whole.history)
    assert moments.copies
    seldom = replace(engine, checkpoint_steps=7)
    for number, kept in moments.copies.items():
        # Each process makes its loader anew.
        resumed = finished(settings, net, graph, make_task(), engine=seldom, folder=kept, **options)
        assert_same_result(resumed, whole, f"resumed from moment {number} of {moments.count}")
    return whole


def sparsely(every: int) -> pytest.MarkDecorator:
    """Resume from every so many moments; with the slow tests, from all."""
    return pytest.mark.parametrize("every", [every, pytest.param(1, marks=pytest.mark.slow)])


@sparsely(9)
def test_from_every_checkpoint_and_every_event(every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = check_all_moments(quick(**RICH), tmp_path, monkeypatch, every=every)
    assert_same_result(whole, finished(quick(**RICH), *prepared()), "a folder changes nothing")
    kinds = [event.name.split()[0] for event in whole.history]
    assert list(dict.fromkeys(kinds)) == ["Start", "Tick", "Tock", "FineTune"]


@pytest.mark.parametrize(
    ("settings", "engine"),
    [
        ({"optimizer": "adamw", "nesterov": True, "tock_first": True, "evaluate": "phases"}, {}),
        ({"optimizer": "rmsprop", "tick_epochs": 2, "cut": "end"}, {"accumulate": 2, "clip_norm": 0.1}),
        pytest.param({"score": "slim", "decay_norms": False}, {"channels_last": True}, marks=pytest.mark.slow),
        pytest.param({"score": "l1", "filter_scale": "mean", "tick_shifts": True}, {}, marks=pytest.mark.slow),
        pytest.param({"score": "pcnn"}, {}, marks=pytest.mark.slow),
        pytest.param({"score": "apoz"}, {}, marks=pytest.mark.slow),
        pytest.param({"score": "residual"}, {}, marks=pytest.mark.slow),
        pytest.param({"score": "measured"}, {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_with_other_settings(
    settings: dict[str, Any], engine: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_all_moments(quick(**RICH, **settings), tmp_path, monkeypatch, engine=Engine(checkpoint_steps=1, **engine))


@sparsely(19)
def test_within_baseline_and_retrain(every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = quick(**RICH, retrain_epochs=2, keep_macs=0.8)
    baseline = briefly(epochs=2, optimizer="adamw")
    whole = check_all_moments(settings, tmp_path, monkeypatch, every=every, baseline=baseline)
    names = [event.name for event in whole.history]
    assert names[:5] == ["Baseline epoch 1", "Baseline epoch 2", "Start", "Retrain epoch 1", "Retrain epoch 2"]
    assert {type(event) for event in whole.history[5:]} == {Tick, FineTune}
    assert (tmp_path / "whole" / "baseline.safetensors").is_file()
    assert (tmp_path / "whole" / "retrain.safetensors").is_file()


def test_a_network_that_was_trained_first_keeps_its_memory_format(tmp_path: Path) -> None:
    # It decides how repair and distillation round.
    settings, engine = quick(retrain_epochs=1, keep_macs=0.8), replace(STEPWISE, channels_last=True)
    run = make_run(settings, *prepared(), engine=engine, folder=tmp_path)
    events = run.events()
    while not isinstance(next(events), Tick):
        pass
    events.close()
    resumed = make_run(settings, *prepared(), engine=engine, folder=tmp_path)
    assert run.whole is not None
    assert resumed.whole is not None
    strides = {name: tensor.stride() for name, tensor in states(run.whole).items()}
    assert {name: tensor.stride() for name, tensor in states(resumed.whole).items()} == strides
    assert same(states(resumed.whole), states(run.whole))
    assert run.whole.inner.weight.is_contiguous(memory_format=torch.channels_last)


class Caching(Net):
    """Makes a buffer in its first forward pass, and counts in another one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, images: Tensor) -> Tensor:
        if not hasattr(self, "grid"):
            self.register_buffer("grid", torch.linspace(0, 1, images.shape[-1], dtype=images.dtype))
        self.seen += 1
        return super().forward(images + self.grid)


def test_buffers_that_the_forward_pass_makes_or_writes(tmp_path: Path) -> None:
    net = Caching().double()
    graph, task, settings = analyze(net, batches()[0][0]), prepared()[2], quick(keep_macs=0.8)
    whole = finished(settings, net, graph, task)
    assert float(net.seen) == 0
    for _ in range(2):
        run = make_run(settings, net, graph, task, folder=tmp_path)
        events = run.events()
        while not isinstance(next(events), Tick | FineTune):
            pass
        events.close()
    resumed = finished(settings, net, graph, task, folder=tmp_path)
    assert_same_result(resumed, whole)
    assert "grid" in states(resumed.model)


@pytest.mark.parametrize("ema", [0.5, pytest.param(0.0, marks=pytest.mark.slow)])
def test_the_best_epoch(ema: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = quick(finetune_epochs=4, finetune_lr=0.5, best_epoch=True, keep_macs=0.8, ema=ema)
    whole = check_all_moments(settings, tmp_path, monkeypatch, choosing, every=19)
    held = [event.metrics["held_out"] for event in whole.history if isinstance(event, FineTune)]
    assert whole.metrics["held_out"] == pytest.approx(max(held))


def test_a_finished_run_with_masks_left_gives_its_best_epoch_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a("cuda", monkeypatch)
    monkeypatch.setattr(secateur.runs.run.Run, "chosen_by", lambda run: -float(run.epoch))  # the first is the best
    settings = quick(finetune_epochs=4, best_epoch=True, keep_macs=0.45, min_ratio=0.0)
    net, graph, _ = prepared()
    first, again = (finished(settings, net, graph, choosing(), folder=tmp_path) for _ in range(2))
    assert same(states(first.model), states(again.model))


def test_plain_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = check_all_moments(briefly(ema=0.5, distill=0.5), tmp_path, monkeypatch, every=5)
    assert [type(event) for event in whole.history[1:]] == [Train, Train]


def test_as_on_a_gpu_where_widths_are_filled_up_with_zeros(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a("cuda", monkeypatch)
    check_all_moments(quick(**RICH, keep_macs=0.45, min_ratio=0.0), tmp_path, monkeypatch)


def test_started_on_a_gpu_and_finished_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, given = quick(**RICH, keep_macs=0.45, min_ratio=0.0), prepared()
    whole = finished(settings, *given)
    on_a("cuda", monkeypatch)
    first = make_run(settings, *given, folder=tmp_path)
    events = first.events()
    while not isinstance(next(events), FineTune):
        pass
    events.close()
    on_a("cpu", monkeypatch)
    run = make_run(settings, *given, folder=tmp_path)
    assert run.phase.name == "finetune"
    assert run.model.inner.out_channels == 8 > whole.model.inner.out_channels
    for a, b in zip(states(whole.model).values(), states(finished_from(run)).values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


def finished_from(run: secateur.runs.run.Run) -> torch.nn.Module:
    *_, last = run.events()
    return last.result.model


class Chance(Dataset):
    """Images with noise of three kinds."""

    def __init__(self) -> None:
        self.images = torch.cat([images for images, _ in batches()])
        self.labels = torch.cat([labels for _, labels in batches()])

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        scale = random.uniform(0.5, 1.5) + numpy.random.normal() * 0.1
        return scale * self.images[index] + 0.1 * torch.randn(()), self.labels[index]


class Stream:
    """Batches with noise, from a source that is not a DataLoader and has no length that counts examples."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return ((images + 0.3 * torch.randn_like(images), labels) for images, labels in batches())


def loader(**options: Any) -> DataLoader:
    return DataLoader(Chance(), batch_size=8, **{"shuffle": True, **options})


def drawn() -> torch.Generator:
    return torch.Generator().manual_seed(3)


SOURCES: dict[str, Callable[[], Any]] = {
    "random numbers of every kind": loader,
    "a loader with a generator of its own": lambda: loader(generator=drawn()),
    "a sampler with a generator of its own": lambda: loader(
        sampler=RandomSampler(range(32), generator=drawn()), shuffle=False
    ),
    "neither loader nor list": Stream,
}


def with_chance(source: Any) -> Task:
    """Chance of every kind in the loss too: what it has drawn is not drawn again with the batches."""
    plain = prepared()[2]

    def loss(model: torch.nn.Module, batch: Any) -> Tensor:
        return plain.loss(model, batch) * (1 + 0.1 * (random.random() + numpy.random.rand() + torch.rand(()).item()))

    return replace(plain, train=source, loss=loss)


LATER = [name for name in SOURCES if "of its own" in name]


@pytest.mark.parametrize("source", [pytest.param(s, marks=pytest.mark.slow if s in LATER else ()) for s in SOURCES])
def test_with_random_data(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_all_moments(quick(**RICH), tmp_path, monkeypatch, lambda: with_chance(SOURCES[source]()))


def test_with_workers_that_live_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = loader(num_workers=1, persistent_workers=True)
    task = replace(prepared()[2], train=made)
    check_all_moments(quick(**RICH, keep_filters=0.8), tmp_path, monkeypatch, lambda: task, every=25)


# What is compared when a run is resumed.


def stop_after(number: int, folder: Path, settings: Any = None, *given: Any, **options: Any) -> tuple[Any, ...]:
    """A run that ends after so many events; what it was given."""
    settings, given = settings or quick(), given or prepared()
    events = make_run(settings, *given, folder=folder, **options).events()
    for _ in range(number):
        next(events)
    events.close()
    return given


def other_weights(net: Net, graph: Any, task: Task) -> dict[str, Any]:
    with torch.no_grad():
        net.last.bias[0] += 1e-6
    return {}


SHORT: dict[str, Any] = {"keep_macs": 0.8, "finetune_epochs": 1}

OTHER: dict[str, Callable[[Net, Any, Task], dict[str, Any]]] = {
    "tick_lr, seed": lambda net, graph, task: {"settings": quick(**SHORT, tick_lr=0.5, seed=3)},
    "accumulate": lambda net, graph, task: {"engine": Engine(accumulate=2)},
    "example": lambda net, graph, task: {"graph": analyze(net, torch.rand(1, 2, 6, 12, dtype=torch.float64))},
    "weights": other_weights,
    "kind": lambda net, graph, task: {"settings": briefly()},
    "name": lambda net, graph, task: {"compared": {"name": "another"}},
}


@pytest.mark.parametrize("name", OTHER)
def test_another_run_is_refused_by_name_and_the_right_one_is_resumed(name: str, tmp_path: Path) -> None:
    net, graph, task = stop_after(2, tmp_path, quick(**SHORT), *prepared(), compared={"name": "mine"})
    before = states(net)
    options = {
        "settings": quick(**SHORT),
        "graph": graph,
        "compared": {"name": "mine"},
        **OTHER[name](net, graph, task),
    }
    with pytest.raises(InvalidSetting) as caught:
        make_run(options.pop("settings"), net, options.pop("graph"), task, folder=tmp_path, **options)
    assert set(name.split(", ")) <= set(str(caught.value.got).removeprefix("other ").split(", "))
    net.load_state_dict(before)
    longer = analyze(net, torch.rand(2, 2, 6, 6, dtype=torch.float64))  # the batch of the example does not matter
    assert finished(quick(**SHORT), net, longer, task, folder=tmp_path, compared={"name": "mine"}).history


def test_damaged_events_are_refused_and_the_run_resumed_once_they_are_restored(tmp_path: Path) -> None:
    given = stop_after(2, tmp_path)
    path = tmp_path / "events.jsonl"
    events = path.read_bytes()
    for damage in (b"{\n", b'{"event": "Else"}\n'):
        path.write_bytes(damage + events[len(damage) :])
        with pytest.raises(InvalidData):
            make_run(quick(), *given, folder=tmp_path)
    path.write_bytes(events)
    finished(quick(), *given, folder=tmp_path)


def test_a_damaged_checkpoint_is_skipped(tmp_path: Path) -> None:
    given = stop_after(6, tmp_path, quick(**RICH))
    last = max((tmp_path / "checkpoints").glob("[0-9]*"))
    data = bytearray((last / "state.safetensors").read_bytes())
    data[len(data) // 2] ^= 1
    (last / "state.safetensors").write_bytes(data)
    with pytest.warns(secateur.errors.DamagedCheckpoint):
        resumed = finished(quick(**RICH), *given, folder=tmp_path)
    assert_same_result(resumed, finished(quick(**RICH), *given))


@pytest.mark.parametrize("name", ["baseline", "retrain"])
def test_a_lost_network_of_a_phase_is_refused(name: str, tmp_path: Path) -> None:
    settings, baseline = quick(retrain_epochs=1, keep_macs=0.8), briefly(epochs=1)
    given = stop_after(4, tmp_path, settings, *prepared(), baseline=baseline)
    path = tmp_path / f"{name}.safetensors"
    whole = path.read_bytes()
    for damaged in (None, whole[:-1]):
        path.unlink()
        if damaged is not None:
            path.write_bytes(damaged)
        if name == "retrain":  # the last network that a phase has trained is the one that counts
            with pytest.raises(InvalidData):
                make_run(settings, *given, folder=tmp_path, baseline=baseline)
        path.write_bytes(whole)
    finished(settings, *given, folder=tmp_path, baseline=baseline)


def test_a_folder_of_something_else_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InvalidData):
        make_run(quick(), *prepared(), folder=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_finished_run_without_checkpoints_is_left_alone(tmp_path: Path) -> None:
    net, graph, task = prepared()
    example = torch.zeros(1, 2, 6, 6, dtype=torch.float64)
    run = tmp_path / "run"
    given: Any = {"settings": quick(), "graph": graph, "folder": run}
    secateur.save(secateur.prune(net, example, task, **given), run / "result")
    checkpoint = max((run / "checkpoints").glob("[0-9]*"))
    shutil.move(checkpoint, tmp_path / "kept")
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints" / f"{checkpoint.name}.damaged").mkdir(parents=True)
    events = (run / "events.jsonl").read_bytes()
    with pytest.raises(InvalidSetting, match=r"is finished, and its checkpoints are gone\. Its result is in"):
        secateur.prune(net, example, task, **given)
    assert (run / "events.jsonl").read_bytes() == events
    shutil.move(tmp_path / "kept", checkpoint)
    secateur.prune(net, example, task, **given)


def test_a_call_that_is_interrupted_is_resumed_by_the_same_call(tmp_path: Path) -> None:
    # As in a notebook, where the same cell is run again.
    net, graph, task = prepared()
    seen: list[Any] = []

    def interrupt(event: Any) -> None:
        seen.append(event)
        if isinstance(event, Tick):
            raise KeyboardInterrupt

    def prune(**options: Any) -> Result:
        example = torch.rand(1, 2, 6, 6, dtype=torch.float64)
        return secateur.prune(net, example, task, settings=quick(), graph=graph, folder=tmp_path, **options)

    with pytest.raises(KeyboardInterrupt):
        prune(progress=interrupt)
    result = prune()
    assert_same_result(result, finished(quick(), net, graph, task))
    lines = (tmp_path / "events.jsonl").read_bytes()
    again = prune()  # a finished run gives its result again
    assert again.history == result.history
    assert_same_result(again, result)
    assert (tmp_path / "events.jsonl").read_bytes() == lines


def test_a_signal_stops_at_the_next_step_and_saves(tmp_path: Path) -> None:
    given, folder = prepared(), tmp_path / "run"
    run = make_run(quick(**RICH), *given, folder=folder)  # an engine that saves every 500 steps

    def stop(number: int, frame: Any) -> None:
        run.stopping = number

    before = signal.signal(signal.SIGTERM, stop)
    run.on_step = lambda phase, step, of: signal.raise_signal(signal.SIGTERM) if run.num_steps == 13 else None
    try:
        with pytest.raises(Interrupted) as caught:
            list(run.events())
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (caught.value.signal, caught.value.folder) == (signal.SIGTERM, str(folder))
    resumed = make_run(quick(**RICH), *given, folder=folder)
    assert resumed.position.step > 0
    *_, last = resumed.events()
    assert run.num_steps + resumed.num_steps == total_steps(given)
    assert_same_result(last.result, finished(quick(**RICH), *given))


def total_steps(given: tuple[Any, ...]) -> int:
    whole = make_run(quick(**RICH), *given)
    list(whole.events())
    return whole.num_steps


def test_a_run_that_never_starts_releases_its_folder(tmp_path: Path) -> None:
    given = prepared()
    make_run(quick(), *given, folder=tmp_path)
    gc.collect()
    next(make_run(quick(), *given, folder=tmp_path).events())


def test_the_state_of_a_run_moves_to_another_without_a_folder() -> None:
    settings, given = quick(**RICH), prepared()
    whole = finished(settings, *given)
    run = make_run(settings, *given, engine=STEPWISE)
    events = run.events()
    for _ in range(4):
        next(events)
    other = make_run(settings, *given)
    other.history = list(run.history)
    other.load_state_dict(copy.deepcopy(run.state_dict()))
    *_, last = other.events()
    assert_same_result(last.result, whole)
