"""The score by trial, computed a second way: zero channels, re-fit the reader to its own outputs, compare outputs."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from readers import IMAGES, REFITTED, Flat, Net
from scored import NETWORKS, batches, make, pruner_of, run
from torch import Tensor, nn

from secateur import ChannelGraph, InvalidModel, Pruner, analyze
from secateur.channels.plan import Plan
from secateur.pruning import measured, residual
from secateur.pruning.measured import Measured, rising
from secateur.pruning.residual import readers_in


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residual, "RIDGE", 1e-12)
    monkeypatch.setattr(residual, "ROUNDING", 0.0)


def refitted(layer: nn.Module, inputs: Tensor, gone: list[int]) -> nn.Module:
    """A 1x1 convolution that does without these inputs, fitted by least squares to what it gave before."""
    changed = copy.deepcopy(layer)
    left = [channel for channel in range(inputs.shape[1]) if channel not in gone]
    rows = inputs.transpose(0, 1).flatten(1).T
    wanted = rows @ layer.weight.detach().flatten(1).T
    changed.weight.data.zero_()
    fitted = torch.linalg.lstsq(rows[:, left], wanted).solution
    changed.weight.data[:, left] = fitted.T[:, :, None, None]
    return changed


def test_the_outputs_when_channels_go_and_the_rest_is_fitted(exact: None) -> None:
    model = Net(nn.Conv2d(6, 4, 1))
    found = run(Pruner(copy.deepcopy(model), model.data()[0][0][:1], score="measured"), model.data())
    images = torch.cat([batch[0] for batch in model.data()])
    inputs = torch.tanh(model.first(images)).detach()
    alone = run(Pruner(copy.deepcopy(model), model.data()[0][0][:1], score="residual"), model.data())
    order, points = [], [(0, 0.0)]
    before = model(images).log_softmax(1).detach()
    for count in (1, 2, 3, 4):
        # The next one is the one that, with all before it, changes the layer's outputs least.
        trials = [[*order, channel] for channel in range(6) if channel not in order]
        if count == 1:
            order = [int(alone.argmin())]
        else:
            order = min(trials, key=lambda gone: weighted_error(model, inputs, gone))
        after = copy.deepcopy(model)
        after.layer = refitted(model.layer, inputs, order)
        points.append((count, float((before.exp() * (before - after(images).log_softmax(1).detach())).sum(1).mean())))
    expected = rising(points)
    torch.testing.assert_close(found[order], torch.tensor(expected).double(), rtol=1e-4, atol=0)
    assert bool((found[[c for c in range(6) if c not in order]] > found[order].max()).all())


def weighted_error(model: Net, inputs: Tensor, gone: list[int]) -> float:
    """The square of the change of the layer's outputs, each weighted by the square of the loss's gradient."""
    squares, outputs = [], list[Tensor]()
    handle = model.layer.register_forward_hook(lambda module, args, output: outputs.append(output))
    for images, labels in model.data():
        (gradient,) = torch.autograd.grad(F.cross_entropy(model(images), labels), outputs[-1:])
        squares.append(gradient.square().sum((0, 2, 3)))
    handle.remove()
    change = (refitted(model.layer, inputs, gone)(inputs) - model.layer(inputs)).detach()
    return float(torch.stack(squares).mean(0) @ change.square().mean((0, 2, 3)))


@pytest.mark.parametrize("name", REFITTED)
def test_any_layer_that_reads_channels(name: str) -> None:
    model = REFITTED[name]()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    pruner = Pruner(copy.deepcopy(model), model.data()[0][0][:1], score="measured")
    found = run(pruner, model.data())
    assert bool((found > 0).all())
    assert bool(found.isfinite().all())
    plain = pruner.finish().state_dict()
    assert all(torch.allclose(plain[key], tensor) for key, tensor in before.items())
    assert not pruner.model._forward_pre_hooks


def test_a_flatten_before_the_reader() -> None:
    model = Flat(nn.Linear(6 * 20, 4))
    found = run(Pruner(copy.deepcopy(model), model.data()[0][0][:1], score="measured"), model.data())
    assert found.numel() == 6
    assert bool(found.isfinite().all())


@pytest.mark.parametrize("network", NETWORKS)
def test_masked_channels_count_as_little_as_cut_ones(network: Any) -> None:
    scores = []
    for cut in (True, False):
        model = make(network)
        pruner = pruner_of(model, score="measured")
        run_batches(pruner)
        # Without a shift behind the gate, masks and cuts are the same function.
        pruner.model.eval()
        pruner.prune(0.3, cut=cut, optimizer=torch.optim.SGD(pruner.model.parameters(), lr=0.1))
        run_batches(pruner)
        found = pruner.score.end()
        scores.append(found[pruner.kept])
    torch.testing.assert_close(*scores, rtol=1e-6, atol=1e-9)


def run_batches(pruner: Pruner) -> None:
    pruner.model.eval()
    for images, labels in batches():
        F.cross_entropy(pruner.model(images), labels).backward()
        pruner.observe()
        pruner.model.zero_grad()


def test_other_outputs_are_compared_by_their_squares() -> None:
    one, four = Net(nn.Conv2d(6, 1, 1)), Net(nn.Conv2d(6, 4, 1))

    def measure(model: Net, classes: bool) -> Tensor:
        images = model.data()[0][0]
        pruner = Pruner(copy.deepcopy(model), images[:1], score=Measured(classes=classes))
        pruner.model(images).square().mean().backward()
        pruner.observe()
        return pruner.score.end()

    # A single number is no score of classes, whatever is said.
    torch.testing.assert_close(measure(one, True), measure(one, False))
    assert float(measure(one, True).min()) > 1e-6
    assert not torch.allclose(measure(four, True), measure(four, False), rtol=0.1)


@pytest.mark.parametrize("name", [*REFITTED, "flat"])
def test_weights_come_back_in_the_shape_they_were_taken_in(name: str) -> None:
    model = Flat(nn.Linear(6 * 20, 4)) if name == "flat" else REFITTED[name]()
    graph = analyze(model, model.data()[0][0][:1])
    [reader] = readers_in(model, graph, Plan(graph, graph.all_kept()))
    before, wanted = model.layer.weight.clone(), torch.randn_like(reader.filters())
    reader.put_(reader.filters())
    torch.testing.assert_close(model.layer.weight, before)
    reader.put_(wanted)
    torch.testing.assert_close(reader.filters(), wanted)


def test_an_input_that_is_left_out_of_the_fit_is_not_read() -> None:
    for model in (Flat(nn.Linear(6 * 20, 4)), *(build() for build in REFITTED.values())):
        graph = analyze(model, model.data()[0][0][:1])
        [reader] = readers_in(model, graph, Plan(graph, graph.all_kept()))
        filters = reader.filters()
        filters[:, :, reader.channels == 2] = 0
        reader.put_(filters)
        before = model(model.data()[0][0])
        with torch.no_grad():
            for tensor in (model.first.weight, model.first.bias):
                tensor[[c for c in range(6) if reached(graph, c) == 2]] += 1.0
        torch.testing.assert_close(model(model.data()[0][0]), before)


def reached(graph: ChannelGraph, filter: int) -> int:
    """The channel of a filter of the first layer."""
    return int(graph.axes["first.weight", 0][filter])


class Picky(Net):
    """Gives the outputs above their mean only."""

    def forward(self, images: Tensor) -> Tensor:
        found = super().forward(images)
        return found[found > found.mean()]


def test_outputs_that_cannot_be_compared_are_refused() -> None:
    model = Picky(nn.Conv2d(6, 4, 1))
    pruner = Pruner(model, model.data()[0][0][:1], score="measured")
    pruner.model(model.data()[0][0]).square().sum().backward()
    pruner.observe()
    with pytest.raises(InvalidModel, match="shapes depend on their values"):
        pruner.score.end()


def test_without_calls_of_the_model_there_is_nothing_to_compare() -> None:
    model = Net(nn.Conv2d(6, 4, 1))
    pruner = Pruner(model, model.data()[0][0][:1], score="measured")
    images, labels = model.data()[0]
    F.cross_entropy(pruner.model.forward(images), labels).backward()
    pruner.observe()
    with pytest.raises(InvalidModel, match="no outputs to compare"):
        pruner.score.end()


def test_scores_that_are_certain() -> None:
    never = torch.tensor([[0.0, 1.0, -torch.inf]])
    assert float(measured.divergence(never, never)) == 0
    assert float(measured.divergence(never, never.flip(1).nan_to_num(neginf=0.0))) > 0


def test_images_are_let_go_when_the_gates_merge() -> None:
    model, score = Net(nn.Conv2d(6, 4, 1)), Measured()
    pruner = Pruner(model, model.data()[0][0][:1], score=score)
    for images, labels in model.data():
        F.cross_entropy(pruner.model(images), labels).backward()
        pruner.observe()
    assert score.calls
    pruner.finish()
    assert not score.calls


def test_no_more_images_are_kept_than_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "IMAGES", 2 * IMAGES)
    model = Net(nn.Conv2d(6, 4, 1))
    score = Measured()
    pruner = Pruner(copy.deepcopy(model), model.data()[0][0][:1], score=score)
    for images, labels in model.data(5):
        F.cross_entropy(pruner.model(images), labels).backward()
        pruner.observe()
    assert score.images == 2 * IMAGES
    assert len(score.calls) == 2
