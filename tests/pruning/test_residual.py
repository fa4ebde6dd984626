"""The residual score, computed a second way: take an input away, and re-fit the others to the data."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from readers import IMAGES, REFITTED, Flat, Net
from scored import Chain, batches, make, pruner_of, run
from torch import Tensor, nn

import secateur
from secateur import Budget, InvalidModel, Pruner, TickTock, analyze
from secateur.pruning import residual
from secateur.pruning.residual import Residual


def scores_of(model: Net, **options: Any) -> Tensor:
    return run(Pruner(model, model.data()[0][0][:1], score="residual", **options), model.data())


def watched(model: Net) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs and outputs of the layer for all images, and the importance of each output."""
    inputs, outputs, squares = [], [], []
    model = copy.deepcopy(model)

    def watch(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor) -> None:
        inputs.append(args[0] if args else kwargs["input"])
        outputs.append(output)

    model.layer.register_forward_hook(watch, with_kwargs=True)
    for images, labels in model.data():
        (gradient,) = torch.autograd.grad(F.cross_entropy(model(images), labels), outputs[-1:])
        if isinstance(model.layer, nn.Linear):
            gradient = gradient.movedim(-1, 1)
        squares.append(gradient.square().sum([axis for axis in range(gradient.dim()) if axis != 1]))
    return torch.cat(inputs).detach(), torch.cat(outputs).detach(), torch.stack(squares).mean(0)


def combination(rows: Tensor, lost: int) -> Tensor:
    """What the other columns must be multiplied with to give the lost one."""
    others = [column for column in range(rows.shape[1]) if column != lost]
    found = torch.zeros(rows.shape[1], dtype=rows.dtype)
    found[others] = torch.linalg.lstsq(rows[:, others], rows[:, lost]).solution
    return found


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residual, "RIDGE", 0.0)
    monkeypatch.setattr(residual, "ROUNDING", 0.0)


@pytest.mark.parametrize("name", REFITTED)
@torch.no_grad()
def test_the_change_of_the_outputs_when_the_other_inputs_are_fitted(name: str, exact: None) -> None:
    model = REFITTED[name]()
    layer, groups = model.layer, getattr(model.layer, "groups", 1)
    with torch.enable_grad():
        inputs, outputs, importance = watched(model)
        found = scores_of(copy.deepcopy(model))
    axis = -1 if isinstance(layer, nn.Linear) else 1
    by_group = inputs.movedim(axis, -1).reshape(-1, groups, 6 // groups)
    expected = []
    for lost in range(6 // groups):
        changed = copy.deepcopy(layer)
        weight = changed.weight if isinstance(layer, nn.ConvTranspose2d) else changed.weight.transpose(0, 1)
        for group in range(groups):
            factors = combination(by_group[:, group], lost)
            # The weights of a group's inputs, as rows.
            if isinstance(layer, nn.ConvTranspose2d):
                part = weight[group * 6 // groups :][: 6 // groups]
            else:
                part = weight[:, group * 4 // groups :][:, : 4 // groups]
            own = part[lost].clone()
            for i, factor in enumerate(factors):
                part[i] += factor * own
            part[lost] = 0
        difference = (changed(inputs) - outputs).movedim(axis, -1).reshape(-1, 4)
        expected.append(difference.square().mean(0) @ importance)
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-6, atol=0)


def test_taps_of_a_kernel_and_positions_before_a_flatten_add_up(exact: None) -> None:
    for model in (Net(nn.Conv2d(6, 4, 3, stride=2)), Flat(nn.Linear(6 * 20, 4))):
        inputs, _, importance = watched(model)
        rows = inputs.reshape(2 * IMAGES, 6, -1).transpose(1, 2).reshape(-1, 6)
        residuals = [(rows[:, lost] - rows @ combination(rows, lost)).square().mean() for lost in range(6)]
        weights = model.layer.weight.detach().reshape(4, 6, -1).square().sum(2)
        expected = importance @ weights * torch.stack(residuals)
        torch.testing.assert_close(scores_of(model), expected, rtol=1e-6, atol=0)


class Two(Net):
    """Two layers that read the channels, one of them behind a depthwise convolution; the last input always stays."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(7, 4, 1))
        self.depthwise, self.other = nn.Conv2d(6, 6, 1, groups=6).double(), nn.Conv2d(6, 4, 1).double()

    def forward(self, images: Tensor) -> Tensor:
        x = torch.tanh(self.first(images))
        one = self.layer(torch.cat([x, images[:, :1]], 1))
        return (one + self.other(torch.tanh(self.depthwise(x)))).mean((2, 3))


def test_all_layers_that_read_a_channel_add_up() -> None:
    model = Two()
    pruner = Pruner(model, model.data()[0][0][:1], score="residual")
    assert [reader.name for reader in pruner.score.readers] == ["layer.weight", "other.weight"]
    both, alone = run(pruner, model.data()), []
    for reader in pruner.score.readers:
        single = Residual()
        single.begin(pruner.gates)
        single.readers, single.sums = [reader], pruner.score.sums
        alone.append(single.end())
        assert bool((alone[-1] > 0).all())
    torch.testing.assert_close(both, alone[0] + alone[1])


def test_a_duplicate_is_worth_nothing_although_its_product_with_the_gradient_is_large() -> None:
    model = Net(nn.Conv2d(6, 4, 3))
    with torch.no_grad():
        model.first.weight[4], model.first.bias[4] = model.first.weight[1], model.first.bias[1]
    found = scores_of(copy.deepcopy(model))
    assert float(found[[1, 4]].max()) < 0.02 * float(found[[0, 2, 3, 5]].min())
    taylor = run(Pruner(model, model.data()[0][0][:1]), model.data())
    assert float(taylor[[1, 4]].min()) > 0.1 * float(taylor.median())


def test_two_inputs_of_one_channel_do_not_make_up_for_each_other() -> None:
    class Twice(Net):
        def forward(self, images: Tensor) -> Tensor:
            x = torch.tanh(self.first(images))
            return self.layer(torch.cat([x, x], 1)).mean((2, 3))

    class Once(Net):
        def forward(self, images: Tensor) -> Tensor:
            return self.layer(torch.tanh(self.first(images))).mean((2, 3))

    twice, once = Twice(nn.Conv2d(12, 4, 1)), Once(nn.Conv2d(6, 4, 1))
    once.first.load_state_dict(twice.first.state_dict())
    with torch.no_grad():
        once.layer.weight.copy_(twice.layer.weight[:, :6] + twice.layer.weight[:, 6:])
        once.layer.bias.copy_(twice.layer.bias)
    torch.testing.assert_close(scores_of(twice), scores_of(once), rtol=0.02, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_dead_channels_are_worth_nothing(dtype: torch.dtype) -> None:
    model = Net(nn.Conv2d(6, 4, 3)).to(dtype)
    with torch.no_grad():
        for dead in (0, 3):
            model.first.weight[dead], model.first.bias[dead] = 0, 0
    pruner = Pruner(model, model.data()[0][0][:1].to(dtype), score="residual")
    data = [(images.to(dtype), labels) for images, labels in model.data()]
    found = run(pruner, data)
    assert found.isfinite().all()
    assert (found == 0).tolist() == [True, False, False, True, False, False]
    pruner.prune(fraction=0.4, cut=False)
    assert pruner.kept.tolist() == (found > 0).tolist()
    assert run(pruner, data)[pruner.kept].isfinite().all()


@pytest.mark.parametrize("kind", ["autocast", "model"])
def test_half_precision_adds_up_in_single(kind: str) -> None:
    def scores(half: bool) -> Tensor:
        model = Net(nn.Conv2d(6, 4, 3)).float()
        data = [(images.float(), labels) for images, labels in model.data()]
        pruner = Pruner(model, data[0][0][:1], score="residual")
        if half and kind == "model":
            model.bfloat16()
            data = [(images.bfloat16(), labels) for images, labels in data]
        with torch.autocast("cpu", torch.bfloat16, enabled=half and kind == "autocast"):
            return run(pruner, data)

    mixed, whole = scores(True), scores(False)
    assert 0 < float((mixed - whole).norm()) < 0.05 * float(whole.norm())


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_gradients_and_activations_that_are_not_finite_are_left_out(bad: float) -> None:
    pruner, other = (pruner_of(make(Chain).eval(), score="residual") for _ in range(2))
    images, labels = batches()[0]
    F.cross_entropy(pruner.model(images * bad), labels).backward()
    with pytest.raises(InvalidModel):
        pruner.score.end()
    assert torch.equal(run(pruner, batches()), run(other, batches()))
    for each, factor in ((pruner, bad), (other, 0.0)):
        each.score.begin(each.gates)
        run(each, batches())
        before = {name: tensor.clone() for name, tensor in each.score.state().items()}
        each.score.begin(each.gates)
        (F.cross_entropy(each.model(images), labels) * factor).backward()
        run(each, batches())
        for name, tensor in before.items():
            assert torch.equal(tensor, each.score.state()[name]) == name.startswith("gradients of")
    assert int(pruner.score.state()["counts"][1]) == int(other.score.state()["counts"][1]) - len(images)


def test_a_score_goes_on_from_its_state() -> None:
    data = batches(4)
    whole = pruner_of(make(Chain).eval(), score="residual")
    expected = run(whole, data)
    first = pruner_of(make(Chain).eval(), score="residual")
    for images, labels in data[:2]:
        F.cross_entropy(first.model(images), labels).backward()
    saved = copy.deepcopy(first.state_dict())
    second = pruner_of(make(Chain).eval(), score="residual")
    second.load_state_dict(saved)
    assert torch.equal(run(second, data[2:]), expected)
    assert second.score.resumable


def test_a_new_score_writes_to_the_same_tensors_while_the_shapes_are_the_same() -> None:
    pruner = pruner_of(make(Chain), score="residual")
    run(pruner, batches())
    before = dict(pruner.score.state())
    pruner.prune(fraction=0.2, cut=False)
    assert all(tensor is before[name] and not tensor.any() for name, tensor in pruner.score.state().items())
    run(pruner, batches())
    pruner.prune(fraction=0.2, cut=True)
    assert any(tensor is not before[name] for name, tensor in pruner.score.state().items())


def test_only_passes_with_a_gradient_are_seen() -> None:
    pruner = pruner_of(make(Chain).eval(), score="residual")
    with torch.no_grad():
        pruner.model(100 * batches()[0][0])
    torch.testing.assert_close(run(pruner, batches()), run(pruner_of(make(Chain).eval(), score="residual"), batches()))


def test_a_sample_of_the_positions_does_not_keep_to_some_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residual, "PLACES", IMAGES * 8 * 8 // 2)
    model = Net(nn.Conv2d(6, 4, 1), (8, 8))
    pruner = Pruner(model, model.data()[0][0][:1], score="residual")
    images = model.data()[0][0]
    images[..., ::2] = 0
    seen = []
    monkeypatch.setattr(pruner.score, "_add", lambda name, found, number: seen.append((found, number)))
    model(images)
    ((found, number),) = seen
    rows = torch.tanh(model.first(images)).movedim(1, -1).reshape(-1, 6).detach()
    assert number < 0.6 * len(rows)
    torch.testing.assert_close(found[0] / number, rows.T @ rows / len(rows), rtol=0.3, atol=0.1)


class Unread(nn.Module):
    """`hidden` is read by a parameter that belongs to no layer."""

    def __init__(self, bare: bool = False) -> None:
        super().__init__()
        self.first, self.hidden = nn.Conv2d(2, 8, 3, padding=1), nn.Conv2d(2 if bare else 8, 8, 3, padding=1)
        self.bare, self.last = bare, nn.Parameter(torch.randn(8, 4))

    def forward(self, images: Tensor) -> Tensor:
        x = images if self.bare else F.relu(self.first(images))
        return F.relu(self.hidden(x)).mean((2, 3)) @ self.last


def test_channels_that_no_layer_reads_go_last(tmp_path: Path) -> None:
    torch.manual_seed(0)
    data = [(torch.randn(8, 2, 6, 6), torch.randint(4, (8,))) for _ in range(2)]
    model = Unread()
    pruner = Pruner(copy.deepcopy(model), data[0][0][:1], score="residual")
    found = run(pruner, data)
    hidden = pruner.graph.group("hidden")
    assert found[hidden.span].isinf().all()
    assert found[pruner.graph.group("first").span].isfinite().all()
    task = secateur.classification(data, data)
    settings = TickTock.of(keep_filters=0.7, score="residual", tick_removes=0.2, min_ratio=0.1, finetune_epochs=0)
    result = secateur.prune(model, data[0][0][:1], task, settings=settings, folder=tmp_path / "run")
    assert set(result.plan.groups) == {"first"}
    with pytest.raises(InvalidModel):
        run(Pruner(Unread(bare=True), data[0][0][:1], score="residual"), data)


def test_a_budget_takes_unread_channels_when_nothing_else_is_left() -> None:
    data = [(torch.randn(8, 2, 6, 6), torch.randint(4, (8,)))]
    pruner = Pruner(Unread(), graph=analyze(Unread(), data[0][0][:1]), score="residual")
    run(pruner, data)
    assert set(pruner.prune(budget=Budget(filters=0.3)).removed) == {"first", "hidden"}
