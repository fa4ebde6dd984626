"""A task: a model's loss and metrics over its data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateur.errors import InvalidTask
from secateur.training.batches import check_repeats, on_device
from secateur.words import counted

Loss = Callable[[nn.Module, Any], Tensor]
Evaluate = Callable[[nn.Module], Mapping[str, float]]

IMAGES = {"image", "images", "img", "imgs", "pixel_values", "input", "inputs", "x"}
LABELS = {"label", "labels", "target", "targets", "class", "classes", "mask", "masks", "y"}
"""What the two parts of a batch are called in dicts."""


@dataclass(frozen=True)
class Task:
    """Any loss over any batches. `classification` and `segmentation` are ready-made.

    train: batches, gone through once per epoch: a DataLoader, a list, or any iterable that starts anew each time.
    loss: from the model and a batch, which has been moved to the model's device, to a scalar.
    evaluate: from the model, in evaluation mode, to named numbers; the first is the one that matters most.
    """

    train: Iterable[Any]
    loss: Loss
    evaluate: Evaluate | None = None

    def __post_init__(self) -> None:
        for name, of in (("loss", "the model and a batch"), ("evaluate", "the model")):
            value = getattr(self, name)
            if not callable(value) and (value is not None or name == "loss"):
                raise InvalidTask(f"{name} is a function of {of}, got {type(value).__name__}")
        criterion: Any = self.loss.func if isinstance(self.loss, partial) else self.loss
        from_torch = str(getattr(criterion, "__module__", None)).startswith("torch.nn.")
        if from_torch and not hasattr(criterion, "__wrapped__"):
            name = getattr(criterion, "__name__", type(criterion).__name__)
            raise InvalidTask(
                f"loss is a function of the model and a batch, and {name} one of scores and labels: write "
                "lambda model, batch: criterion(model(batch[0]), batch[1])"
            )

    def metrics(self, model: nn.Module) -> dict[str, float]:
        """The numbers of `evaluate`; none without it."""
        if self.evaluate is None:
            return {}
        with evaluating(model):
            numbers = self.evaluate(model)
        if not isinstance(numbers, Mapping):
            kind = type(numbers).__name__
            raise InvalidTask(f'evaluate must return numbers by name, as {{"accuracy": 93.1}}, got {kind}')
        try:
            return {name: float(value) for name, value in numbers.items()}
        except (TypeError, ValueError, RuntimeError) as error:
            raise InvalidTask(f"evaluate must return one number for every name, got {dict(numbers)}") from error


def check_task(task: Any) -> Task:
    if not isinstance(task, Task):
        kind = type(task).__name__
        raise InvalidTask(f"a Task is wanted, such as classification(train, test) or Task(train, loss), got {kind}")
    return task


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and no gradients for a while; every module gets its own mode back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def classification(
    train: Iterable[Any], test: Iterable[Any] | None = None, *, label_smoothing: float = 0.0, top5: bool = False
) -> Task:
    """Images and labels in, cross-entropy; accuracy in percent, and loss, over all images of `test`.

    top5: also how often the right class is among the five that score highest.
    """
    check_repeats(test, "test")
    check, check_test = LabelCheck(), LabelCheck()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        images, labels = pair(batch)
        logits = output_of(model, images)
        check(labels, logits, -100, probabilities=True)
        return F.cross_entropy(logits, labels, label_smoothing=label_smoothing)

    def evaluate(model: nn.Module) -> dict[str, float]:
        assert test is not None
        right = among = total = summed = 0.0
        for batch in on_device(test, model):
            images, labels = pair(batch)
            logits = output_of(model, images)
            check_test(labels, logits, -100)
            right += (logits.argmax(1) == labels).sum()
            if top5:
                best = logits.topk(min(5, logits.shape[1]), dim=1).indices
                among += (best == labels[:, None]).any(1).sum()
            summed += F.cross_entropy(logits.float(), labels, reduction="sum")
            total += labels.numel()
        if not total:
            raise InvalidTask("the test data holds no images: pass test=None to go without")
        metrics = {"accuracy": 100 * float(right) / total, "loss": float(summed) / total}
        return metrics | ({"top5": 100 * float(among) / total} if top5 else {})

    return Task(train, loss, evaluate if test is not None else None)


def segmentation(
    train: Iterable[Any],
    test: Iterable[Any] | None = None,
    *,
    num_classes: int,
    ignore_index: int = 255,
    summed: bool = False,
) -> Task:
    """Images and label maps in, cross-entropy per pixel; mean IoU and pixel accuracy in percent over all of `test`.

    summed: over the pixels of an image, as FCN's learning rates want it, instead of their mean.
    """
    check_repeats(test, "test")
    check, check_test = LabelCheck(), LabelCheck()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        images, labels = pair(batch)
        logits = output_of(model, images)
        check(labels, logits, ignore_index, probabilities=True)
        if labels.is_floating_point():  # shares of every class, of which none is ignored
            total, pixels = F.cross_entropy(logits, labels, reduction="sum"), labels[:, 0].numel()
        else:
            total = F.cross_entropy(logits, labels, ignore_index=ignore_index, reduction="sum")
            pixels = (labels != ignore_index).sum().clamp_min(1)  # maps without a label have no loss
        return total / (labels.shape[0] if summed else pixels)

    def evaluate(model: nn.Module) -> dict[str, float]:
        assert test is not None
        counts: Tensor | None = None
        for batch in on_device(test, model):
            images, labels = pair(batch)
            logits = output_of(model, images)
            if logits.shape[1] > num_classes:
                raise InvalidTask(f"the model has {logits.shape[1]} classes, and num_classes is {num_classes}")
            check_test(labels, logits, ignore_index)
            predicted = logits.argmax(1)
            valid = labels != ignore_index
            cells = num_classes * labels[valid] + predicted[valid]
            seen = torch.bincount(cells, minlength=num_classes**2)
            counts = seen if counts is None else counts + seen
        if counts is None:
            raise InvalidTask("the test data holds no images: pass test=None to go without")
        table = counts.reshape(num_classes, num_classes).double()
        hits, union = table.diag(), table.sum(0) + table.sum(1) - table.diag()
        present = union > 0
        return {
            "miou": 100 * float((hits[present] / union[present]).mean()),
            "pixel_accuracy": 100 * float(hits.sum() / table.sum()),
        }

    return Task(train, loss, evaluate if test is not None else None)


def pair(batch: Any) -> tuple[Any, Tensor]:
    """Images and labels, from a pair or a dict of that kind; labels of any whole numbers are made long."""
    if isinstance(batch, Mapping) and len(batch) == 2:
        batch = _by_key(batch)
    if isinstance(batch, (tuple, list)) and len(batch) == 2 and _is_one(batch[1]):
        raise InvalidTask("a batch must hold several images, got one and its label: put a DataLoader around the data")
    if not isinstance(batch, (tuple, list)) or len(batch) != 2 or not isinstance(batch[1], Tensor):
        got = f"a dict of {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else type(batch).__name__
        raise InvalidTask(
            f"a batch must be images and labels, got {got:.200}; for other batches write "
            "Task(train, loss=lambda model, batch: ...)"
        )
    images, labels = batch
    return images, labels if labels.is_floating_point() else labels.long()


def _by_key(batch: Mapping[Any, Any]) -> tuple[Any, Any]:
    """Images and labels of a dict, whichever comes first: by their names, or else by what they are."""
    one, other = batch
    parts = batch[one], batch[other]
    first = _role(one) - _role(other) or _fit(*parts) - _fit(*parts[::-1])
    if not first:
        raise InvalidTask(
            f"a batch with the keys {one!r} and {other!r} does not tell which are the images: call them 'image' and "
            "'label', or write Task(train, loss=lambda model, batch: ...)"
        )
    return parts if first > 0 else parts[::-1]


def _role(name: Any) -> int:
    word = str(name).lower()
    return (word in IMAGES) - (word in LABELS)


def _fit(images: Any, labels: Any) -> bool:
    """Whether these can be images and labels, and not the other way round."""
    return (
        isinstance(images, Tensor)
        and isinstance(labels, Tensor)
        and images.is_floating_point()
        and not labels.is_floating_point()
        and images.dim() > labels.dim()
    )


def _is_one(label: Any) -> bool:
    return isinstance(label, int) or (isinstance(label, Tensor) and not label.dim())


def output_of(model: nn.Module, images: Any) -> Tensor:
    """The one tensor that a classifier gives, or the "out" of torchvision's segmentation networks."""
    try:
        output = model(images)
    except RuntimeError as error:
        wanted = next((p.dtype for p in model.parameters()), None)
        if isinstance(images, Tensor) and images.dtype != wanted and "type" in str(error):
            remedy = "convert them in the data, as with images.float()"
            if images.dtype == torch.float32:
                remedy = "prune it in single precision, model.float()"
            raise InvalidTask(
                f"the images are of {images.dtype} and the model of {wanted}: {remedy}; half precision is a setting "
                "of the Engine"
            ) from error
        raise
    if isinstance(output, Mapping) and isinstance(output.get("out"), Tensor):
        output = output["out"]
    if not isinstance(output, Tensor):
        raise InvalidTask(
            f"the model gives a {type(output).__name__} instead of one tensor of scores; write "
            "Task(train, loss=lambda model, batch: ...) that takes what you need of it"
        )
    return output


class LabelCheck:
    """One class of the model's for every image or pixel. On the CPU every batch is looked at, elsewhere the first one.

    probabilities: whether a share of every class will do too.
    """

    def __init__(self) -> None:
        self.looked = False

    def __call__(self, labels: Tensor, scores: Tensor, ignored: int, *, probabilities: bool = False) -> None:
        if probabilities and labels.is_floating_point() and labels.shape == scores.shape:
            return
        wanted = (scores.shape[0], *scores.shape[2:])
        if labels.is_floating_point() or tuple(labels.shape) != wanted:
            raise InvalidTask(
                f"labels must be whole numbers of shape {wanted}, got {labels.dtype} of shape {tuple(labels.shape)}: "
                "convert them in the data, as with labels.long(), labels.squeeze(1) or labels.argmax(1)"
            )
        if self.looked and labels.device.type != "cpu":
            return
        self.looked = True
        num_classes = scores.shape[1]
        wrong = labels[(labels != ignored) & ((labels < 0) | (labels >= num_classes))]
        if wrong.numel():
            raise InvalidTask(
                f"label {int(wrong[0])} is out of range: the model has {counted(num_classes, 'class', 'classes')}, so "
                f"labels go from 0 to {num_classes - 1}"
            )
