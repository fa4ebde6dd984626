"""Compiled networks: the same numbers, for the shapes that come first, and only where it pays."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from secateur.training import compiled, loop
from secateur.training.compiled import Compiled, pays
from secateur.training.engine import Engine
from secateur.training.loop import Trainer, Work


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The inputs of what was compiled, in place of torch's compiler."""
    found: list[Any] = []

    def compile(network: nn.Module, dynamic: bool) -> Any:
        assert not dynamic
        return lambda *args: found.append(args) or network(*args)

    monkeypatch.setattr(torch, "compile", compile)
    return found


def test_other_shapes_are_computed_as_they_are(calls: list[Any]) -> None:
    network = nn.Linear(2, 3)
    model = Compiled(network)
    for size in (4, 4, 1, 4):
        images = torch.randn(size, 2)
        assert torch.equal(model(images), network(images))
    assert [len(images) for (images,) in calls] == [4, 4, 4]
    model(torch.randn(4, 2, dtype=torch.float32).requires_grad_())
    assert len(calls) == 4


def test_a_compiled_network_looks_like_the_network(calls: list[Any]) -> None:
    network = Small()
    model = Compiled(network)
    assert [id(p) for p in model.parameters()] == [id(p) for p in network.parameters()]
    model.eval()
    assert not network.body[1].training
    assert not model.training
    network.train()
    assert model.training
    assert model.head is network.head
    with pytest.raises(AttributeError, match="nothing"):
        model.nothing  # noqa: B018


def test_whether_it_pays_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 10))
    images = torch.randn(2, 3, 6, 6)
    monkeypatch.setattr(compiled, "COMPILED", 1.0)
    monkeypatch.setattr(compiled, "SAVED_BY_VALUE", 1e-3)
    monkeypatch.setattr(compiled, "SAVED_BY_LAYER", 1e-2)
    # 2 x 4 x 4 x 4 values of the convolution and of the norm, 2 x 10 of the linear layer; three layers.
    saved = 1e-3 * (128 + 128 + 20) + 1e-2 * 3
    enough = 1.5 * 3 / saved
    assert not pays(model, lambda: model(images), int(enough))
    assert pays(model, lambda: model(images), int(enough) + 1)
    assert not any(module._forward_hooks for module in model.modules())


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Linear(4, 2)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(images).mean((2, 3)))


def square(model: nn.Module, images: Tensor) -> Tensor:
    return model(images).square().mean()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_compiled_training_is_the_same_whatever_trains(monkeypatch: pytest.MonkeyPatch, precision: Any) -> None:
    """The compiler itself is torch's; without its last part, which needs minutes, all is as it is on a GPU."""
    torch._dynamo.reset()
    real: Any = torch.compile
    monkeypatch.setattr(torch, "compile", lambda network, dynamic: real(network, dynamic=dynamic, backend="aot_eager"))
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(size, 3, 8, 8, generator=generator) for size in (4, 4, 4, 3)]
    found = []
    for how in ("never", "always"):
        model = Small()
        trainer = Trainer(model, Engine(compile=how, precision=precision))  # pyright: ignore
        for name in ("Tick", "Tock", "Tick", "Tock"):
            # Twice as often as torch needs to believe that nothing changes.
            model.body[0].weight.requires_grad_(name == "Tock")
            moves = model.body[0].weight.detach().clone()
            optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
            trainer.epoch(batches, Work(name, square, optimizer, rate=lambda step: 0.1))
            assert torch.equal(model.body[0].weight, moves) == (name == "Tick")
        found.append(model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(found[0].values(), found[1].values(), strict=True))


def test_hooks_that_come_later_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    real: Any = torch.compile
    monkeypatch.setattr(torch, "compile", lambda network, dynamic: real(network, dynamic=dynamic, backend="aot_eager"))
    model, seen, images = Small(), [], torch.randn(2, 3, 8, 8)
    compiled = Compiled(model)
    for _ in range(3):
        compiled(images)
    model.body[0].register_forward_hook(lambda module, args, output: seen.append(output.shape))
    compiled(images)
    assert len(seen) == 1


def test_nothing_is_made_for_a_smaller_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a run is resumed with the last batch of an epoch."""
    model = Small()
    work = Work(
        "Tock", lambda model, batch: model(batch[0]).mean(), torch.optim.SGD(model.parameters(), 0.1), lambda s: 0.1
    )
    images = torch.utils.data.TensorDataset(torch.randn(7, 3, 8, 8))
    loader = torch.utils.data.DataLoader(images, batch_size=3)
    sizes: list[int] = []
    monkeypatch.setattr(Trainer, "_set_up", lambda self, work, batch, even: sizes.append(len(batch[0])))
    Trainer(model).epoch(loader, work, loop.Position(step=2))
    assert sizes == []
    Trainer(model).epoch(loader, work)
    assert sizes == [3, 3]
    # The only batch counts, however small.
    Trainer(model).epoch(torch.utils.data.DataLoader(images, batch_size=9), work)
    assert sizes[2:] == [7]


def test_a_trial_leaves_what_was_observed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, observed = Small(), torch.zeros(())
    model.body[0].register_forward_hook(lambda *_: print(observed.add_(1)))
    trainer = Trainer(model)
    trainer.device = torch.device("cuda")
    work = Work("Tick", square, torch.optim.SGD(model.parameters(), 0.1), lambda s: 0.1, tensors=lambda: [observed])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    monkeypatch.setattr(Trainer, "autocast", lambda self: nullcontext())
    assert not trainer._compiles(work, torch.randn(2, 3, 8, 8), None)
    assert observed == 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    monkeypatch.setattr(loop, "pays", lambda model, run, steps: True)
    assert trainer._compiles(work, torch.randn(2, 3, 8, 8), None)
    assert not trainer._compiles(work, torch.randn(2, 3, 8, 8), "gradients are accumulated")


def test_by_itself_nothing_is_compiled_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", None)
    model = Small()
    work = Work("Tock", square, torch.optim.SGD(model.parameters(), 0.1), rate=lambda step: 0.1, steps=10**9)
    Trainer(model).epoch([torch.randn(2, 3, 8, 8)], work)


@pytest.mark.parametrize(("how", "kept"), [("auto", False), ("always", True)])
def test_what_cannot_be_captured_compiled_is_captured_as_it_is(
    monkeypatch: pytest.MonkeyPatch, calls: list[Any], how: Any, kept: bool
) -> None:
    model = Small()
    trainer = Trainer(model, Engine(compile=how))
    monkeypatch.setattr(Trainer, "_compiles", lambda self, work, batch, obstacle: True)
    states: list[bool] = []

    def capture(self: Trainer, work: Work, batch: Tensor, obstacle: str | None) -> None:
        states.append(self._compiled[work.name] is not None)

    monkeypatch.setattr(loop.Trainer, "_capture", capture)
    work = Work("Tock", square, torch.optim.SGD(model.parameters(), 0.1), rate=lambda step: 0.1)
    trainer.epoch([torch.randn(2, 3, 8, 8)], work)
    assert states == ([True] if kept else [True, False])
    assert bool(calls) is kept


def test_an_evaluation_is_compiled_if_everything_is(calls: list[Any]) -> None:
    model = Small()
    assert Trainer(model).for_evaluation() is model
    trainer = Trainer(model, Engine(compile="always"))
    evaluated = trainer.for_evaluation()
    assert isinstance(evaluated, Compiled)
    assert trainer.for_evaluation() is evaluated
    trainer.forget()
    assert trainer.for_evaluation() is not evaluated


def test_a_network_that_the_loss_looks_into_is_not_compiled(calls: list[Any]) -> None:
    model = Small()
    work = Work("train", square, torch.optim.SGD(model.parameters(), 0.1), rate=lambda step: 0.1, compiles=False)
    Trainer(model, Engine(compile="always")).epoch([torch.randn(2, 3, 8, 8)], work)
    assert not calls
