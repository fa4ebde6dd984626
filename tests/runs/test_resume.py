"""A run that was ended at any moment goes on and comes to the same, bit for bit."""

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from filelock import FileLock
from killing import (
    Started,
    begin,
    check_same,
    checkpoints,
    finish,
    has_begun,
    has_saved,
    kill,
    kill_until_finished,
    outcome,
    place,
    prune,
    resume,
)
from small import batches, on_a, prepared, quick
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler

from secateur import DamagedRun, Event, Finished, InvalidSetting, Task, TickTock, analyze
from secateur.runs import record
from secateur.runs.run import Run
from secateur.training.engine import Engine


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was never stopped, made once for all workers of the tests."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "whole"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            status, out, err = finish(prune(folder))
            assert status == 0, err
            assert "saved in" in out
    return folder


def kill_often(whole: Path, folder: Path, number: int, seed: int) -> list[tuple[float, str]]:
    """Runs that are killed and finish, until there were so many kills."""
    dice, log = random.Random(seed), []
    while len(log) < number:
        shutil.rmtree(folder, ignore_errors=True)
        log += kill_until_finished(folder, dice, number - len(log))
        check_same(outcome(folder), outcome(whole))
    return log


def test_killed_ten_times(whole: Path, tmp_path: Path) -> None:
    log = kill_often(whole, tmp_path / "run", 10, seed=0)
    assert len(log) == 10
    assert len({where for _, where in log} - {"Start"}) > 1


@pytest.mark.slow
def test_killed_a_hundred_times(whole: Path, tmp_path: Path) -> None:
    log = kill_often(whole, tmp_path / "run", 100, seed=1)
    assert {where.split()[0] for _, where in log} >= {"Tick", "Tock", "FineTune"}


@pytest.mark.parametrize(("number", "status", "start"), [(signal.SIGINT, 130, prune), (signal.SIGTERM, 143, begin)])
def test_a_signal_saves_and_says_how_to_go_on(
    whole: Path, tmp_path: Path, number: int, status: int, start: Callable[[Path], Started]
) -> None:
    folder = tmp_path / "run"
    process = start(folder)
    assert has_begun(process, folder)
    assert has_saved(process, folder)
    time.sleep(random.Random(number).uniform(0.1, 0.6))
    before = checkpoints(folder)
    process.send_signal(number)
    ended, out, err = finish(process)
    assert ended == status
    assert out == ""
    assert err.splitlines()[-1] == f"secateur: stopped and saved; go on with: secateur resume {folder}"
    assert checkpoints(folder)[-1] > before[-1]
    assert finish(resume(folder))[0] == 0
    check_same(outcome(folder), outcome(whole))


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = begin(folder)
    assert has_begun(first, folder)
    assert has_saved(first, folder)
    first.send_signal(signal.SIGSTOP)  # so that it does not end before the other has begun
    status, out, err = finish(resume(folder))
    first.send_signal(signal.SIGCONT)
    assert (status, out) == (2, "")
    assert err.splitlines()[-1].startswith(f"secateur: the run in {folder} is in use by process {first.pid}: wait")
    assert has_saved(first, folder)  # it goes on undisturbed
    kill(first)


def test_a_finished_run_gives_its_result_again(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / "result")
    status, out, err = finish(resume(folder, "--json"))
    assert status == 0, err
    assert json.loads(out)["metrics"] == outcome(whole)["events"][-1]["metrics"]
    check_same(outcome(folder), outcome(whole))


def test_a_damaged_checkpoint_is_passed_over(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = begin(folder)
    assert has_begun(process, folder)
    while len(checkpoints(folder)) < 2:
        assert has_saved(process, folder)
    kill(process)
    *_, before, last = checkpoints(folder)
    data = bytearray((last / "state.safetensors").read_bytes())
    data[len(data) // 2] ^= 1
    (last / "state.safetensors").write_bytes(data)
    status, _, err = finish(resume(folder))
    assert status == 0
    said = "".join(err.split())
    assert f"checkpoint{last}isdamaged" in said
    assert "therungoesonfromtheonebefore" in said
    assert before.name < checkpoints(folder)[-1].name
    check_same(outcome(folder), outcome(whole))


# The same in one process, where a run can be left at any event and any step.

RICH: dict[str, Any] = {"tick_data": 0.7, "ema": 0.5, "distill": 0.5, "tick_removes": 0.15}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save whenever it is due, and do not wait for the disk."""
    monkeypatch.setattr(record, "PATIENCE", 0)
    monkeypatch.setattr(os, "fsync", lambda handle: None)


class Left(Exception):
    """The process ends here."""


def leave(run: Run, num_events: int, num_steps: int | None) -> None:
    """Go through so many events, then so many steps, and end as if killed: nothing is saved beyond what was."""
    events = run.events()
    for _ in range(num_events):
        next(events)
    if num_steps is not None:
        after_step, steps = run._after_step, 0

        def count_down(step: int) -> None:
            nonlocal steps
            after_step(step)
            steps += 1
            if steps == num_steps:
                raise Left

        run._after_step = count_down
        with suppress(Left):
            list(events)
    assert run.record is not None
    assert run.record.folder is not None
    run.record.folder.close()


def tell(events: tuple[Event, ...] | list[Event]) -> list[dict[str, Any]]:
    told = [event.to_dict() for event in events]
    for event in told:
        del event["seconds"]
    return told


def check_all_moments(
    settings: TickTock, folder: Path, task: Task | None = None, engine: Engine | None = None, every: int = 4
) -> None:
    """Stop after an event, or one to four steps behind it, and compare with the run that went through.

    every: of all such moments take every so many; 1 takes all.
    """
    net, graph, plain = prepared()
    task, engine = task or plain, engine or Engine(checkpoint_steps=2)
    whole = settings(net, graph, task, engine=engine)
    wanted = whole.model.state_dict()
    num_events = len(whole.history)
    moments: list[tuple[int, int | None]] = [(number, None) for number in range(1, num_events + 1)]
    moments += [(number, number % 4 + 1) for number in range(1, num_events)]
    for number, steps in moments[::every]:
        where = folder / f"{number} {steps}"
        leave(Run(settings, net, graph, task, engine=engine, folder=where), number, steps)
        *_, last = Run(settings, net, graph, task, engine=engine, folder=where).events()
        assert isinstance(last, Finished)
        message = f"left after {number} events and {steps} steps"
        assert tell(last.result.history) == tell(whole.history), message
        found = last.result.model.state_dict()
        assert list(found) == list(wanted)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted), message


def test_it_goes_on_from_every_event_and_from_within_every_epoch(tmp_path: Path) -> None:
    check_all_moments(quick(**RICH), tmp_path, every=1)


@pytest.mark.parametrize(
    ("settings", "engine"),
    [
        ({"optimizer": "adamw"}, {}),
        ({"optimizer": "rmsprop", "tick_epochs": 2}, {}),
        ({"nesterov": True, "tock_first": True, "evaluate": "phases"}, {}),
        ({}, {"accumulate": 2, "clip_norm": 0.1}),
        ({}, {"channels_last": True}),
        ({"cut": "end"}, {}),
        ({"score": "slim", "decay_norms": False}, {}),
        ({"score": "l1", "filter_scale": "mean", "tick_shifts": True}, {}),
    ],
    ids=str,
)
def test_it_goes_on_whatever_the_settings(settings: dict[str, Any], engine: dict[str, Any], tmp_path: Path) -> None:
    check_all_moments(quick(**RICH, **settings), tmp_path, engine=Engine(checkpoint_steps=2, **engine))


def test_as_on_a_gpu_where_widths_are_filled_up_with_zeros(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a("cuda", monkeypatch)
    check_all_moments(quick(**RICH), tmp_path, every=2)
    settings, given = quick(**RICH, keep_macs=0.45), prepared()
    results = [settings(*given, folder=tmp_path / "done").model.state_dict() for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(results[0].values(), results[1].values(), strict=True))


def test_begun_on_a_gpu_and_ended_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, given = quick(**RICH, keep_macs=0.45, min_ratio=0.0), prepared()
    whole = settings(*given)
    on_a("cuda", monkeypatch)
    first = Run(settings, *given, folder=tmp_path)
    leave(first, len(whole.history) - 1, None)
    assert first.cursor.phase == "FineTune"
    on_a("cpu", monkeypatch)
    run = Run(settings, *given, folder=tmp_path)
    assert run.model.inner.out_channels == 8 > whole.model.inner.out_channels
    *_, last = run.events()
    assert isinstance(last, Finished)
    for (name, a), b in zip(whole.model.state_dict().items(), last.result.model.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10, msg=name)


@pytest.mark.parametrize("score", ["pcnn", "apoz"])
def test_scores_that_watch_outputs_go_on_too(score: str, tmp_path: Path) -> None:
    check_all_moments(quick(**RICH, score=score), tmp_path)


class Chance(Dataset):
    """Images with noise of three kinds."""

    def __init__(self) -> None:
        self.images = torch.cat([images for images, _ in batches()])
        self.labels = torch.cat([labels for _, labels in batches()])

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        scale = random.uniform(0.5, 1.5) + numpy.random.normal() * 0.1
        return scale * self.images[index] + 0.1 * torch.randn(()), self.labels[index]


def loaded(**options: Any) -> Task:
    options = {"shuffle": True, **options}
    return replace(prepared()[2], train=DataLoader(Chance(), batch_size=8, **options))


def test_random_numbers_of_every_kind_go_on(tmp_path: Path) -> None:
    check_all_moments(quick(**RICH), tmp_path, loaded())


def test_a_loader_with_workers_that_live_on(tmp_path: Path) -> None:
    task = loaded(num_workers=1, persistent_workers=True)
    check_all_moments(quick(**RICH, keep_filters=0.8), tmp_path, task, every=6)


def test_a_sampler_with_a_generator_of_its_own(tmp_path: Path) -> None:
    sampler = RandomSampler(range(48), generator=torch.Generator().manual_seed(3))
    check_all_moments(quick(**RICH), tmp_path, loaded(sampler=sampler, shuffle=False), every=6)


def test_a_loader_with_a_generator_of_its_own(tmp_path: Path) -> None:
    settings, engine = quick(**RICH), Engine(checkpoint_steps=1)
    net, graph, _ = prepared()
    whole = settings(net, graph, loaded(generator=torch.Generator().manual_seed(3)), engine=engine)
    for again in (False, True):  # each process makes its loader anew
        task = loaded(generator=torch.Generator().manual_seed(3))
        run = Run(settings, net, graph, task, engine=engine, folder=tmp_path)
        if not again:
            leave(run, 4, 2)
    *_, last = run.events()
    assert isinstance(last, Finished)
    assert tell(last.result.history) == tell(whole.history)


class Noisy:
    """Batches with noise, from a source that is neither a DataLoader nor knows how to take a part of itself."""

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return ((images + 0.3 * torch.randn_like(images), labels) for images, labels in batches())


def test_a_source_that_is_neither_loader_nor_list(tmp_path: Path) -> None:
    task = replace(prepared()[2], train=Noisy())
    check_all_moments(quick(**{**RICH, "tick_data": 1.0}), tmp_path, task)


def test_a_part_of_such_a_source(tmp_path: Path) -> None:
    check_all_moments(quick(**RICH), tmp_path, replace(prepared()[2], train=Noisy()))


def test_a_run_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    """It knows nothing of settings that have come since."""
    net, graph, task = prepared()
    expected = quick()(net, graph, task, folder=tmp_path / "whole")
    steps = quick().steps(net, graph, task, folder=tmp_path / "run")
    for _ in range(3):
        next(steps)
    steps.close()
    path = tmp_path / "run" / "config.json"
    config = json.loads(path.read_text())
    for name in ("rank_power", "decay_norms", "keep_latency", "latency_batch"):
        del config["settings"][name]
    path.write_text(json.dumps(config))
    result = quick()(net, graph, task, folder=tmp_path / "run")
    assert result.metrics == expected.metrics
    config["settings"]["of_the_future"] = 1
    path.write_text(json.dumps(config))
    with pytest.raises(DamagedRun, match=r"is damaged, or of another version: .*of_the_future"):
        quick()(net, graph, task, folder=tmp_path / "run")


@pytest.mark.parametrize("done", [False, True])
def test_other_weights_are_refused_by_name(done: bool, tmp_path: Path) -> None:
    net, graph, task = prepared()
    steps = quick().steps(net, graph, task, folder=tmp_path)
    next(steps)
    if done:
        list(steps)
    steps.close()
    with torch.no_grad():
        list(net.parameters())[-1][0] += 1e-6
    with pytest.raises(InvalidSetting, match=r"a run of a network with another \S+: give the network as it was"):
        quick()(net, graph, task, folder=tmp_path)


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    net, graph, task = prepared()
    leave(Run(quick(), net, graph, task, folder=tmp_path), 2, None)
    with pytest.raises(InvalidSetting, match=r"a run with other settings \(tick_lr, seed\): resume it as it was, or"):
        quick(tick_lr=0.5, seed=3)(net, graph, task, folder=tmp_path)


def test_an_example_of_another_size_is_refused(tmp_path: Path) -> None:
    net, graph, task = prepared()
    leave(Run(quick(), net, graph, task, folder=tmp_path), 2, None)
    (example,) = graph.calls["eval"][:1]
    larger = analyze(net, example.map(lambda image: torch.cat([image, image], -1)))
    with pytest.raises(InvalidSetting, match=r"example of another size \(\[\[2, 6, 6\]\], .* not \[\[2, 6, 12\]\]\)"):
        quick()(net, larger, task, folder=tmp_path)
    quick()(net, analyze(net, example.map(lambda image: torch.cat([image, image]))), task, folder=tmp_path)


def test_an_engine_that_changes_the_result_is_refused_by_name(tmp_path: Path) -> None:
    net, graph, task = prepared()
    leave(Run(quick(), net, graph, task, folder=tmp_path), 2, None)
    with pytest.raises(InvalidSetting, match="accumulate"):
        quick()(net, graph, task, folder=tmp_path, engine=Engine(accumulate=2))


def test_after_a_refusal_the_run_can_go_on_in_the_same_process(tmp_path: Path) -> None:
    net, graph, task = prepared()
    leave(Run(quick(), net, graph, task, folder=tmp_path), 2, None)
    with pytest.raises(InvalidSetting):
        quick(seed=3)(net, graph, task, folder=tmp_path)
    quick()(net, graph, task, folder=tmp_path)


def test_after_damage_is_mended_the_run_can_go_on_in_the_same_process(tmp_path: Path) -> None:
    net, graph, task = prepared()
    leave(Run(quick(), net, graph, task, folder=tmp_path), 2, None)
    events = (tmp_path / "events.jsonl").read_bytes()
    for damage in (b"{\n", b'{"event": "Else"}\n'):
        (tmp_path / "events.jsonl").write_bytes(damage + events[len(damage) :])
        with pytest.raises(DamagedRun, match=r"events\.jsonl"):
            quick()(net, graph, task, folder=tmp_path)
    (tmp_path / "events.jsonl").write_bytes(events)
    quick()(net, graph, task, folder=tmp_path)


@pytest.mark.parametrize("how", ["break", "error"])
def test_a_run_that_was_left_goes_on_in_the_same_process(how: str, tmp_path: Path) -> None:
    # As in a notebook: the loop is left, or interrupted, and the same cell is run again.
    net, graph, task = prepared()

    def interrupt(event: Event) -> None:
        raise KeyboardInterrupt

    if how == "break":
        for _ in quick().steps(net, graph, task, folder=tmp_path):
            break
    else:
        with pytest.raises(KeyboardInterrupt):
            quick()(net, graph, task, folder=tmp_path, progress=interrupt)
    quick()(net, graph, task, folder=tmp_path)


def test_a_finished_run_gives_its_result_again_in_python(tmp_path: Path) -> None:
    net, graph, task = prepared()
    one = quick(**RICH)(net, graph, task, folder=tmp_path)
    lines = (tmp_path / "events.jsonl").read_bytes()
    other = quick(**RICH)(net, graph, task, folder=tmp_path)
    assert all(
        torch.equal(a, b)
        for a, b in zip(one.model.state_dict().values(), other.model.state_dict().values(), strict=True)
    )
    assert one.history == other.history
    assert torch.equal(one.plan.kept, other.plan.kept)
    assert (tmp_path / "events.jsonl").read_bytes() == lines


def test_checkpoints_change_nothing(tmp_path: Path) -> None:
    net, graph, task = prepared()
    one = quick(**RICH)(net, graph, task)
    other = quick(**RICH)(net, graph, task, folder=tmp_path, engine=Engine(checkpoint_steps=1))
    assert tell(one.history) == tell(other.history)
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True))


def test_the_place_of_a_run_is_told(tmp_path: Path) -> None:
    net, graph, task = prepared()
    assert place(tmp_path) == "Start"
    leave(Run(quick(), net, graph, task, engine=Engine(checkpoint_steps=2), folder=tmp_path), 2, 3)
    assert place(tmp_path) == "Tick after 2 phases, epoch 0, step 2"
