"""Tasks: losses and metrics against a second computation."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from secateur import Task, classification, segmentation
from secateur.errors import InvalidData, InvalidSetting
from secateur.training.batches import count
from secateur.training.entries import pair


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


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_label_smoothing_is_a_share(share: float) -> None:
    with pytest.raises(InvalidSetting):
        classification([], label_smoothing=share)


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


@pytest.mark.parametrize("data", [[], [(torch.rand(2, 3, 4, 4), torch.full((2, 4, 4), 255))]], ids=["none", "ignored"])
@pytest.mark.parametrize("name", ["test", "held_out"])
def test_data_without_labels_are_named(name: str, data: list[Any]) -> None:
    task = segmentation([], **{name: data}, num_classes=3)
    evaluate = task.evaluate if name == "test" else task.held_out
    assert evaluate is not None
    with pytest.raises(InvalidData, match=f"{name} has no labelled images"):
        evaluate(Fixed())


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


class Elsewhere(torch.Tensor):
    """Labels that say they are on a GPU."""

    device = torch.device("cuda")  # pyright: ignore


@pytest.mark.parametrize("make", [classification, partial(segmentation, num_classes=2)])
def test_labels_for_training_are_checked_after_those_for_the_test(make: Any) -> None:
    scores = torch.randn(3, 2)
    good, bad = (torch.tensor(labels).as_subclass(Elsewhere) for labels in ([0, 1, 1], [0, 1, 2]))
    task = make([], [(scores, good)])
    task.metrics(Fixed())
    with pytest.raises(InvalidData) as caught:
        task.loss(Fixed(), (scores, bad))
    assert caught.value.got == 2


def test_a_dict_of_outputs_as_torchvision_gives_it() -> None:
    class Wrapped(Fixed):
        def forward(self, scores: Tensor) -> dict[str, Tensor]:
            return OrderedDict(out=super().forward(scores), aux=scores)

    batch = (torch.randn(1, 3, 2, 2), torch.zeros(1, 2, 2, dtype=torch.long))
    assert segmentation([], num_classes=3).loss(Wrapped(), batch).dim() == 0


def test_without_test_data_there_are_no_metrics() -> None:
    assert classification([]).metrics(Fixed()) == {}


BATCH = torch.eye(4), torch.arange(4)
PAIR = type("Pair", (Fixed,), {"forward": lambda self, x: (x, x)})()
OWN: Any = lambda model, batch: model(batch[0]).sum()  # noqa: E731


def losses(*labels: Any, images: Any = BATCH[0], model: nn.Module | None = None) -> list[Callable[[], object]]:
    """What computes the loss, and the metrics, of a batch with these labels."""
    model = model or Fixed()
    return [
        act
        for each in labels
        for act in (
            lambda each=each: classification([]).loss(model, (images, each)),
            lambda each=each: classification([], [(images, each)]).metrics(model),
        )
    ]


REFUSED: list[tuple[list[Callable[[], Any]], Any]] = [
    (losses(torch.tensor([0, 1, 2, 4])), 4),
    (losses(torch.tensor([0, 1, 2, -1])), -1),
    (losses(torch.arange(4.0)), "torch.float32 of shape (4,)"),
    (losses(torch.arange(4)[:, None]), "torch.int64 of shape (4, 1)"),
    (losses(torch.eye(4).long()), "torch.int64 of shape (4, 4)"),
    (losses(torch.arange(3)), "torch.int64 of shape (3,)"),
    (losses(torch.eye(4))[1:], "torch.float32 of shape (4, 4)"),  # shares of classes are for training only
    (losses(BATCH[1], model=PAIR), "a tuple of 2"),
    (losses(3, torch.tensor(3), images=BATCH[0][3]), None),  # examples instead of batches
    ([lambda: classification([]).loss(Fixed(), BATCH[0])], "Tensor"),
    ([lambda: pair({"image": 1, "label": 2, "id": 3})], "a dict of image, label, id"),
    ([lambda: classification([], []).metrics(Fixed())], None),
    ([lambda: classification([], (batch for batch in ()))], "generator"),
    ([lambda: segmentation([], (batch for batch in ()), num_classes=4)], "generator"),
    ([lambda: segmentation([], [BATCH], num_classes=3).metrics(Fixed())], 4),
    ([lambda: classification([BATCH], OWN), lambda: count(OWN)], "function"),
    ([lambda: Task([BATCH], [BATCH]), lambda: Task([BATCH], OWN, [BATCH])], "list"),  # pyright: ignore
    ([lambda: Task([BATCH], None)], "NoneType"),  # pyright: ignore
    ([lambda: Task([BATCH], nn.CrossEntropyLoss())], "CrossEntropyLoss, a function of scores and labels"),
    ([lambda: Task([BATCH], F.cross_entropy)], "cross_entropy, a function of scores and labels"),
    (
        [lambda: Task([BATCH], partial(F.cross_entropy, label_smoothing=0.1))],
        "cross_entropy, a function of scores and labels",
    ),
    ([lambda: Task([], OWN, lambda model: 93.1).metrics(Fixed())], "93.1"),  # pyright: ignore
    ([lambda: Task([], OWN, lambda model: {"accuracy": None}).metrics(Fixed())], "{'accuracy': None}"),  # pyright: ignore
    ([lambda: Task([], OWN, lambda model: {"accuracy": "high"}).metrics(Fixed())], "{'accuracy': 'high'}"),  # pyright: ignore
    (
        [lambda: Task([], OWN, lambda model: {"accuracy": torch.ones(2)}).metrics(Fixed())],  # pyright: ignore
        "{'accuracy': tensor([1., 1.])}",
    ),
]


@pytest.mark.parametrize(("acts", "got"), REFUSED)
def test_what_does_not_fit_is_refused(acts: list[Callable[[], Any]], got: Any) -> None:
    for act in acts:
        with pytest.raises(InvalidData) as caught:
            act()
        assert caught.value.got == got


def test_losses_of_ones_own() -> None:
    wrapped: Any = wraps(F.cross_entropy)(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))
    for own in (wrapped, Holding()):
        assert Task([BATCH], own).loss is own
    task = Task([1], OWN, lambda model: {"norm": model.one.detach()})
    assert task.metrics(Fixed()) == {"norm": 1.0}


class Holding:
    """A loss of one's own that keeps one of torch's."""

    func = nn.CrossEntropyLoss()

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        return self.func(model(batch[0]), batch[1])


@pytest.mark.parametrize("kind", [torch.uint8, torch.int32])
def test_labels_of_any_whole_numbers(kind: torch.dtype) -> None:
    labels = torch.arange(20).reshape(1, 4, 5)
    scores = 9 * F.one_hot(labels, 20).movedim(-1, 1).float()
    task = segmentation([], [(scores, labels.to(kind))], num_classes=20)
    assert task.metrics(Fixed())["miou"] == 100
    assert torch.equal(task.loss(Fixed(), (scores, labels.to(kind))), task.loss(Fixed(), (scores, labels)))


@pytest.mark.parametrize(
    ("images", "model"),
    [
        (torch.uint8, torch.float32),
        (torch.float16, torch.float32),
        (torch.float64, torch.float32),
        (torch.float32, torch.bfloat16),
    ],
)
def test_images_of_another_data_type_than_the_model(images: torch.dtype, model: torch.dtype) -> None:
    batch = (torch.ones(2, 3, 4, 4, dtype=images), torch.zeros(2, 4, 4))
    with pytest.raises(InvalidData) as caught:
        segmentation([], num_classes=3).loss(nn.Conv2d(3, 3, 1).to(model), batch)
    assert (caught.value.got, caught.value.wanted) == (images, model)
    assert ("model.float()" if model != torch.float32 else "images.float()") in str(caught.value.remedy)


def test_another_error_of_such_a_model_stays_as_it_is() -> None:
    batch = (torch.ones(2, 5, 4, 4, dtype=torch.float64), torch.zeros(2, 4, 4))
    with pytest.raises(RuntimeError) as caught:
        segmentation([], num_classes=3).loss(nn.Conv2d(3, 3, 1), batch)
    assert not isinstance(caught.value, InvalidData)


class Stream(IterableDataset):
    """Examples without a number of them."""

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return zip(torch.eye(4), range(4), strict=True)


def test_test_data_without_a_length() -> None:
    loader = DataLoader(Stream(), batch_size=3)
    for task in (classification([], loader), segmentation([], loader, num_classes=4)):
        assert next(iter(task.metrics(Fixed()).values())) == 100


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
    with pytest.raises(InvalidData) as caught:
        pair({"b": values[1], "a": values[0]})
    assert caught.value.got == "'b' and 'a'"
