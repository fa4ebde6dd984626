"""Tasks: losses and metrics against a second computation."""

from collections import OrderedDict
from collections.abc import Iterator
from functools import partial, wraps
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from secateur import InvalidTask, Task, classification, segmentation
from secateur.training.batches import count
from secateur.training.task import pair


class Fixed(nn.Module):
    """Gives back what it is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(()))

    def forward(self, scores: Tensor) -> Tensor:
        assert not self.training or torch.is_grad_enabled()
        return scores * self.one


def test_accuracy_counts_images_not_batches() -> None:
    # All 3 of the large batch right, the only one of the small batch wrong.
    large = (torch.eye(4)[[0, 1, 2]], torch.tensor([0, 1, 2]))
    little = (torch.eye(4)[[0]], torch.tensor([3]))
    model = Fixed().train()
    metrics = classification([large], [large, little]).metrics(model)
    assert metrics["accuracy"] == pytest.approx(75)
    scores, labels = torch.cat([large[0], little[0]]), torch.cat([large[1], little[1]])
    assert metrics["loss"] == pytest.approx(float(F.cross_entropy(scores, labels)))
    assert model.training


def test_evaluation_gives_every_module_its_own_mode_back() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(), Fixed()).train()
    model[0].eval()
    classification([], [(torch.eye(4), torch.arange(4))]).metrics(model)
    assert [m.training for m in model] == [False, True, True]


def test_label_smoothing() -> None:
    scores, labels = torch.randn(5, 4), torch.tensor([0, 1, 2, 3, 0])
    loss = classification([], label_smoothing=0.1).loss(Fixed(), (scores, labels))
    target = 0.9 * F.one_hot(labels, 4) + 0.1 / 4
    assert float(loss.detach()) == pytest.approx(float(-(target * scores.log_softmax(1)).sum(1).mean()))


def test_mean_intersection_over_union() -> None:
    torch.manual_seed(0)
    scores, labels = torch.randn(2, 5, 6, 6), torch.randint(0, 4, (2, 6, 6))  # class 4 is never there, but predicted
    labels[0, 0] = 255
    task = segmentation([], [(scores[:1], labels[:1]), (scores[1:], labels[1:])], num_classes=5)
    predicted, valid = scores.argmax(1), labels != 255
    ratios = []
    for number in range(5):
        here, there = (predicted == number) & valid, (labels == number) & valid
        ratios.append(float((here & there).sum() / (here | there).sum()))
    metrics = task.metrics(Fixed())
    assert metrics["miou"] == pytest.approx(100 * sum(ratios) / 5)
    assert metrics["pixel_accuracy"] == pytest.approx(100 * float((predicted == labels)[valid].float().mean()))
    assert float(task.loss(Fixed(), (scores, labels)).detach()) == pytest.approx(
        float(F.cross_entropy(scores, labels, ignore_index=255))
    )


def test_a_map_without_labels_has_no_loss() -> None:
    scores = torch.randn(1, 3, 4, 4, requires_grad=True)
    task = segmentation([], num_classes=3)
    loss = task.loss(Fixed(), (scores, torch.full((1, 4, 4), 255)))
    loss.backward()
    assert float(loss.detach()) == 0
    assert scores.grad is not None
    assert not scores.grad.any()


def test_shares_of_classes_in_segmentation() -> None:
    scores, shares = torch.randn(2, 3, 4, 4), torch.rand(2, 3, 4, 4).softmax(1)
    loss = segmentation([], num_classes=3).loss(Fixed(), (scores, shares))
    assert float(loss.detach()) == pytest.approx(float(F.cross_entropy(scores, shares)))


def test_more_classes_than_were_told() -> None:
    task = segmentation([], [(torch.randn(2, 4, 6, 6), torch.zeros(2, 6, 6).long())], num_classes=3)
    with pytest.raises(InvalidTask, match="the model has 4 classes, and num_classes is 3"):
        task.metrics(Fixed())


class Elsewhere(torch.Tensor):
    """Labels that say they are on a GPU."""

    device = torch.device("cuda")  # pyright: ignore


@pytest.mark.parametrize("make", [classification, partial(segmentation, num_classes=2)])
def test_labels_for_training_are_looked_at_after_those_for_the_test(make: Any) -> None:
    scores = torch.randn(3, 2)
    good, bad = (torch.tensor(labels).as_subclass(Elsewhere) for labels in ([0, 1, 1], [0, 1, 2]))
    task = make([], [(scores, good)])
    task.metrics(Fixed())
    with pytest.raises(InvalidTask, match="label 2 is out of range"):
        task.loss(Fixed(), (scores, bad))


def test_a_dict_of_outputs_as_torchvision_gives_it() -> None:
    class Wrapped(Fixed):
        def forward(self, scores: Tensor) -> dict[str, Tensor]:
            return OrderedDict(out=super().forward(scores), aux=scores)

    batch = (torch.randn(1, 3, 2, 2), torch.zeros(1, 2, 2, dtype=torch.long))
    assert segmentation([], num_classes=3).loss(Wrapped(), batch).dim() == 0


def test_without_test_data_there_are_no_metrics() -> None:
    assert classification([]).metrics(Fixed()) == {}
    with pytest.raises(InvalidTask, match="the test data holds no images"):
        classification([], []).metrics(Fixed())


def test_test_data_is_gone_through_many_times() -> None:
    for make in (classification, lambda train, test: segmentation(train, test, num_classes=4)):
        with pytest.raises(InvalidTask, match="the test data can be gone through only once: pass a DataLoader or a"):
            make([], (batch for batch in ()))


@pytest.mark.parametrize("label", [4, -1])
def test_labels_out_of_range(label: int) -> None:
    task = classification([], [(torch.eye(4), torch.tensor([0, 1, 2, label]))])
    message = f"label {label} is out of range: the model has 4 classes"
    with pytest.raises(InvalidTask, match=message):
        task.metrics(Fixed())
    with pytest.raises(InvalidTask, match=message):
        task.loss(Fixed(), (torch.eye(4), torch.tensor([0, 1, 2, label])))


@pytest.mark.parametrize("labels", [torch.arange(4.0), torch.arange(4)[:, None], torch.eye(4).long(), torch.arange(3)])
def test_labels_that_are_not_one_class_for_every_image(labels: Tensor) -> None:
    task = classification([], [(torch.eye(4), labels)])
    message = r"labels must be whole numbers of shape \(4,\), got .*: convert them in the data, as with labels.long\(\)"
    for act in (task.metrics, lambda model: task.loss(model, (torch.eye(4), labels))):
        with pytest.raises(InvalidTask, match=message):
            act(Fixed())


def test_class_probabilities_are_for_training_only() -> None:
    task = classification([], [(torch.eye(4), torch.eye(4))])
    assert task.loss(Fixed(), (torch.eye(4), torch.eye(4))).dim() == 0
    with pytest.raises(InvalidTask, match="labels must be whole numbers"):
        task.metrics(Fixed())


@pytest.mark.parametrize("kind", [torch.uint8, torch.int32])
def test_labels_of_any_whole_numbers(kind: torch.dtype) -> None:
    labels = torch.arange(20).reshape(1, 4, 5)
    scores = 9 * F.one_hot(labels, 20).movedim(-1, 1).float()
    task = segmentation([], [(scores, labels.to(kind))], num_classes=20)
    assert task.metrics(Fixed())["miou"] == 100
    assert torch.equal(task.loss(Fixed(), (scores, labels.to(kind))), task.loss(Fixed(), (scores, labels)))


@pytest.mark.parametrize("kind", [torch.uint8, torch.float16, torch.float64])
def test_images_of_another_type_than_the_model(kind: torch.dtype) -> None:
    batch = (torch.ones(2, 3, 4, 4, dtype=kind), torch.zeros(2, 4, 4))
    message = f"the images are of {kind} and the model of torch.float32: convert them in the data"
    with pytest.raises(InvalidTask, match=message):
        segmentation([], num_classes=3).loss(nn.Conv2d(3, 3, 1), batch)


def test_a_model_of_another_type_than_the_images() -> None:
    batch = (torch.ones(2, 3, 4, 4), torch.zeros(2, 4, 4))
    with pytest.raises(InvalidTask, match=r"the model of torch\.bfloat16: prune it in single precision, model\.float"):
        segmentation([], num_classes=3).loss(nn.Conv2d(3, 3, 1).bfloat16(), batch)


def test_batches_and_outputs_of_another_kind() -> None:
    with pytest.raises(
        InvalidTask, match=r"a batch must be images and labels, got Tensor; for other batches write Task"
    ):
        classification([]).loss(Fixed(), torch.eye(4))
    with pytest.raises(InvalidTask, match="images and labels, got a dict of image, label, id; for other batches"):
        classification([]).loss(Fixed(), {"image": torch.eye(4), "label": torch.arange(4), "id": 1})
    pair = type("Pair", (Fixed,), {"forward": lambda self, x: (x, x)})()
    with pytest.raises(InvalidTask, match="the model gives a tuple instead of one tensor of scores"):
        classification([]).loss(pair, (torch.eye(4), torch.arange(4)))


class Stream(IterableDataset):
    """Examples without a number of them."""

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return zip(torch.eye(4), range(4), strict=True)


def test_test_data_without_a_length() -> None:
    loader = DataLoader(Stream(), batch_size=3)
    for task in (classification([], loader), segmentation([], loader, num_classes=4)):
        assert next(iter(task.metrics(Fixed()).values())) == 100


@pytest.mark.parametrize("label", [3, torch.tensor(3)])
def test_examples_in_the_place_of_batches(label: Any) -> None:
    with pytest.raises(InvalidTask, match="got one and its label: put a DataLoader around the data"):
        classification([]).loss(Fixed(), (torch.eye(4)[3], label))


@pytest.mark.parametrize(
    ("image", "label"), [("image", "label"), ("pixel_values", "labels"), ("Input", "y"), ("a", "target"), ("a", "b")]
)
@pytest.mark.parametrize("turned", [False, True])
def test_dicts_in_any_order(image: str, label: str, turned: bool) -> None:
    images, labels = torch.rand(4, 3, 8, 8), torch.arange(4, dtype=torch.int32)
    items = [(image, images), (label, labels)]
    found = pair(dict(items[::-1] if turned else items))
    assert found[0] is images
    assert torch.equal(found[1], labels.long())


def test_names_come_before_kinds() -> None:
    """Images of whole numbers, and a share of every class."""
    images, labels = torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.rand(4, 10)
    found = pair({"label": labels, "image": images})
    assert found[0] is images
    assert found[1] is labels


@pytest.mark.parametrize(
    "values",
    [
        (torch.rand(4, 10), torch.rand(4, 10)),
        (torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.rand(4, 10)),
        (torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.arange(4)),
        ([1, 2], torch.arange(4)),
    ],
    ids=["same", "contrary", "whole", "list"],
)
def test_dicts_that_do_not_tell_are_not_guessed_at(values: tuple[Any, Any]) -> None:
    message = "a batch with the keys 'b' and 'a' does not tell which are the images: call them 'image' and 'label', or"
    with pytest.raises(InvalidTask, match=message):
        pair({"b": values[1], "a": values[0]})


class Holding:
    """A loss of one's own, which keeps one of torch's."""

    func = nn.CrossEntropyLoss()

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        return self.func(model(batch[0]), batch[1])


def test_what_is_no_data_and_what_is_no_function() -> None:
    batches: Any = [(torch.eye(4), torch.arange(4))]
    function: Any = lambda: iter(batches)  # noqa: E731
    with pytest.raises(InvalidTask, match="test data must be a DataLoader or a list of batches, got function"):
        classification(batches, function)
    with pytest.raises(InvalidTask, match="training data must be a DataLoader or a list of batches, got function"):
        count(function)
    with pytest.raises(InvalidTask, match="loss is a function of the model and a batch, got list"):
        Task(function, batches)
    with pytest.raises(InvalidTask, match="loss is a function of the model and a batch, got NoneType"):
        Task(batches, None)  # pyright: ignore
    own: Any = wraps(F.cross_entropy)(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))
    assert Task(batches, own).loss is own
    holding = Holding()
    assert Task(batches, holding).loss is holding
    for criterion in (nn.CrossEntropyLoss(), F.cross_entropy, partial(F.cross_entropy, label_smoothing=0.1)):
        with pytest.raises(InvalidTask, match=r"one of scores and labels: write lambda model, batch: criterion\(model"):
            Task(batches, criterion)
    with pytest.raises(InvalidTask, match="evaluate is a function of the model, got list"):
        Task(batches, function, batches)


def test_any_loss_and_any_metric() -> None:
    task = Task([1], lambda model, batch: model(torch.tensor(2.0)), lambda model: {"norm": model.one.detach()})
    assert task.metrics(Fixed()) == {"norm": 1.0}
    nameless: Any = lambda model: 93.1  # noqa: E731
    with pytest.raises(InvalidTask, match=r'evaluate must return numbers by name, as \{"accuracy": 93.1\}, got float'):
        Task([1], task.loss, nameless).metrics(Fixed())


@pytest.mark.parametrize("value", [None, "high", torch.ones(2)])
def test_metrics_are_one_number_each(value: Any) -> None:
    task = Task([], lambda model, batch: torch.zeros(()), lambda model: {"accuracy": value})
    with pytest.raises(InvalidTask, match=r"evaluate must return one number for every name, got \{'accuracy'"):
        task.metrics(nn.Linear(1, 1))
