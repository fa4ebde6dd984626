"""Whether steps are captured, where several processes must decide alike; the GPU and the other processes are played."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from secateur.training import loop
from secateur.training.distributed import World
from secateur.training.engine import Engine
from secateur.training.loop import Trainer, Work
from secateur.training.shards import shard


class Played:
    """A captured step that only counts; `fails` says that there is no memory for it."""

    replays = 0
    fails = False

    def __init__(self, *given: Any) -> None:
        if Played.fails:
            raise RuntimeError("out of memory\nmore")

    @staticmethod
    def can_hold(batch: Any) -> bool:
        return isinstance(batch, Tensor)

    def fits(self, batch: Tensor) -> bool:
        return len(batch) == 2

    def __call__(self, batch: Tensor) -> None:
        Played.replays += 1


class Others(World):
    """Two processes, of which the other one answers as told."""

    answers: tuple[bool, ...] = (True, True, True)

    def all(self, holds: bool) -> bool:
        self.asked.append(holds)
        return holds and self.answers[len(self.asked) - 1]

    def average_(self, tensors: Any) -> None:
        self.sent.append(len(tensors))

    def smallest(self, tensor: Tensor) -> Tensor:
        return tensor

    def average(self, tensor: Tensor) -> Tensor:
        return tensor


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Trainer:
    monkeypatch.setattr(loop, "GraphedStep", Played)
    monkeypatch.setattr(loop, "can_be_captured", lambda optimizer: True)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "nccl")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(Played, "replays", 0)
    monkeypatch.setattr(Played, "fails", False)
    world = Others(0, 2, joined=True)
    vars(world).update(asked=[], sent=[])
    said: list[str] = []
    made = Trainer(nn.Sequential(nn.Linear(3, 1)), world=world, progress=said.append)
    made.device = SimpleNamespace(type="cuda")
    vars(made)["said"] = said
    return made


def work_of(trainer: Trainer, **values: Any) -> Work:
    optimizer = torch.optim.SGD(trainer.model.parameters())
    return Work("Tock", lambda model, batch: model(batch).mean(), optimizer, rate=lambda step: 0.1, **values)


def capture(trainer: Trainer, even: bool = True) -> Any:
    work, batch = work_of(trainer), torch.ones(2, 3)
    return trainer._capture(work, batch, trainer._obstacle(work, batch, even))


def test_batches_that_do_not_divide_evenly_are_reported(trainer: Trainer) -> None:
    trainer._full = 2
    for _ in range(2):
        trainer._do(work_of(trainer), torch.ones(2, 3), 8 / 7, first=True, last=True, check=False)
    assert ["do not divide evenly" in line for line in trainer.said] == [True]


def test_a_batch_that_divides_evenly_is_replayed_and_another_is_not(trainer: Trainer) -> None:
    work = work_of(trainer)
    weights = [8 / 7, 1.0, 1.0, 6 / 7, 1.0]
    for weight in weights:
        trainer._do(work, torch.ones(2, 3), weight, first=True, last=True, check=False)
    assert Played.replays == 3
    # Whether to compile, whether to capture, and whether that worked.
    assert trainer.world.asked == [False, True, True]
    # Before the capture, so that NCCL is connected, and for each of the other steps.
    assert trainer.world.sent == [2, 2, 2]
    assert trainer.said == []


CHANGES = {
    "neither SGD nor Adam": lambda t, m: m.setattr(loop, "can_be_captured", lambda optimizer: False),
    "do not use NCCL": lambda t, m: m.setattr(torch.distributed, "get_backend", lambda: "gloo"),
    "synchronised": lambda t, m: t.model.append(nn.SyncBatchNorm(1)),
    "different parameters": lambda t, m: setattr(t, "partial", True),
    "differ in shape": lambda t, m: setattr(t, "_alike", False),
    "accumulated": lambda t, m: setattr(t, "engine", Engine(accumulate=2)),
}


@pytest.mark.parametrize("reason", list(CHANGES))
def test_reasons_against_a_capture(reason: str, trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    CHANGES[reason](trainer, monkeypatch)
    assert capture(trainer) is None
    assert trainer.world.asked == [False]
    assert trainer.world.sent == []
    (said,) = trainer.said
    assert reason in said


@pytest.mark.parametrize(
    ("here", "answers", "asked", "said"),
    [
        (True, (True, True), [True, True], []),
        (True, (True, False), [True, True], ["that failed in another process"]),
        (False, (True, True), [True, False], ["out of memory"]),
        (True, (False, True), [True], []),
    ],
)
def test_all_processes_capture_or_none(
    here: bool, answers: tuple[bool, ...], asked: list[bool], said: list[str], trainer: Trainer
) -> None:
    Played.fails = not here
    vars(trainer.world)["answers"] = answers
    graph = capture(trainer)
    assert (graph is not None) is (here and all(answers))
    assert trainer.world.asked == asked
    assert [line.partition(" because ")[2] for line in trainer.said] == said


def test_the_warm_up_exchanges_nothing(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    for capturing in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
        monkeypatch.setattr(loop, "GraphedStep", lambda step, forward, batch, *_: step(batch))
        trainer._captured(work_of(trainer), torch.ones(2, 3))
        assert bool(trainer.world.sent) is capturing


def test_which_parts_have_one_shape_in_all_processes() -> None:
    data = TensorDataset(torch.zeros(8, 3))

    class Own(list[Tensor]):
        def shard(self, rank: int, world: int) -> list[Tensor]:
            return list(self)

    def pad(examples: list[Any]) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence([example[0] for example in examples])

    sources = [[torch.zeros(4, 3)], DataLoader(data, 4), DataLoader(data, 4, collate_fn=pad), Own([torch.zeros(2, 3)])]
    assert [loop.alike(shard(source, 0, 2)) for source in sources] == [True, True, False, False]
