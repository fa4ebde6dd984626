"""A task: a model's loss and metrics over its data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateur.errors import InvalidData, InvalidSetting
from secateur.modes import evaluating
from secateur.training.batches import check_repeats, device_of, prefetch
from secateur.training.entries import Entries, Key, check_entries, check_key, entry, output_of, pair

Loss = Callable[[nn.Module, Any], Tensor]
Evaluate = Callable[[nn.Module], Mapping[str, float]]

IGNORED = -100
"""The label of an image without one in `classification`."""
HOLD_OUT = "Hold out some of the training images: classification(train, test, held_out=...); of a recipe, choose_on=0.1"


@dataclass(frozen=True)
class Task:
    """Any loss over any batches. `classification` and `segmentation` are ready-made.

    train: batches, iterated once per epoch: a DataLoader, a list, or any iterable that can be iterated repeatedly.
    loss: a function of the model and a batch on the model's device that returns a scalar.
    evaluate: a function of the model in evaluation mode that returns named numbers; the first one matters most.
    labelled: whether the loss can train a network. Without labels it can only score channels.
    chance: the accuracy in percent, as `evaluate` gives it, of always answering the most frequent class; None as long
        as nothing was evaluated.
    output: where the class scores are in what the model returns, for distillation: a key, an attribute, or an index.
    batch: which entries of a batch are the images and the labels, for repair: two keys or two indices.
    held_out: like `evaluate`, over data that neither train nor test: a choice is made by its first number, of which
        more is better.
    gives_scores: whether the output of the model is class scores along axis 1, which presets distil.
    """

    train: Iterable[Any]
    loss: Loss
    evaluate: Evaluate | None = None
    labelled: bool = True
    chance: Callable[[], float | None] | None = None
    output: Key | None = None
    batch: Entries | None = None
    held_out: Evaluate | None = None
    gives_scores: bool = False

    def __post_init__(self) -> None:
        check_key(self.output)
        check_entries(self.batch)
        for name, of in (("loss", "the model and a batch"), ("evaluate", "the model"), ("held_out", "the model")):
            value = getattr(self, name)
            if not callable(value) and (value is not None or name == "loss"):
                raise InvalidData(f"{name} cannot be called", got=type(value).__name__, wanted=f"a function of {of}")
        criterion: Any = self.loss.func if isinstance(self.loss, partial) else self.loss
        from_torch = str(getattr(criterion, "__module__", None)).startswith("torch.nn.")
        if from_torch and not hasattr(criterion, "__wrapped__"):
            name = getattr(criterion, "__name__", type(criterion).__name__)
            raise InvalidData(
                "loss is a criterion",
                got=f"{name}, a function of scores and labels",
                wanted="a function of the model and a batch",
                remedy="Write lambda model, batch: criterion(model(batch[0]), batch[1])",
            )

    def inputs(self, batch: Any) -> Any:
        """The images of a batch, as the model's one argument; the batch itself where nothing says which they are."""
        return batch if self.batch is None else (entry(batch, self.batch[0]),)

    def metrics(self, model: nn.Module) -> dict[str, float]:
        """The numbers of `evaluate`; none without it."""
        return _numbers(self.evaluate, model, "evaluate") if self.evaluate is not None else {}

    def chosen_by(self, model: nn.Module) -> float:
        """The first number of `held_out`, by which a choice is made."""
        if self.held_out is None:
            raise InvalidSetting("there is nothing to choose by", remedy=HOLD_OUT)
        return next(iter(_numbers(self.held_out, model, "held_out").values()))


def _numbers(evaluate: Evaluate, model: nn.Module, name: str) -> dict[str, float]:
    with evaluating(model):
        numbers: Any = evaluate(model)
    try:
        return {name: float(value) for name, value in numbers.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        got, wanted = f"{numbers!r:.200}", 'numbers by name: {"accuracy": 93.1}'
        raise InvalidData(f"{name} returns no metrics", got=got, wanted=wanted) from error


def check_task(task: Any) -> Task:
    """The task; raises if it is none."""
    if not isinstance(task, Task):
        wanted = "a Task, such as classification(train, test) or Task(train, loss)"
        raise InvalidData("the task has the wrong type", got=type(task).__name__, wanted=wanted)
    return task


def classification(
    train: Iterable[Any],
    test: Iterable[Any] | None = None,
    *,
    held_out: Iterable[Any] | None = None,
    label_smoothing: float = 0.0,
    top5: bool = False,
    output: Key | None = None,
    batch: Entries | None = None,
) -> Task:
    """Images and labels in, cross-entropy; accuracy in percent, and loss, over all images of `test`.

    The label -100 means "ignored".

    held_out: batches that are neither in `train` nor in `test`, to choose by.
    top5: also report how often the right class is among the five with the highest scores.
    output: where the scores are in what the model returns: a key or attribute as "logits", or the index of a tuple.
    batch: which entries of a batch are the images and the labels: ("image", "label") or (0, 2).
    """
    if not 0 <= label_smoothing <= 1:
        raise InvalidSetting("label_smoothing is out of range", got=label_smoothing, wanted="a share between 0 and 1")
    read, scores_of = partial(pair, entries=batch), partial(output_of, output=output)
    check_repeats(test, "test")
    check_repeats(held_out, "held_out")
    check, check_test = LabelCheck(), LabelCheck()
    most_frequent: float | None = None

    def loss(model: nn.Module, batch: Any) -> Tensor:
        images, labels = read(batch)
        logits = scores_of(model, images)
        check(labels, logits, IGNORED, probabilities=True)
        if labels.is_floating_point():
            return F.cross_entropy(logits, labels, label_smoothing=label_smoothing)
        # The mean over no label would be 0 / 0. The product with 1 changes no bit, nor does the choice of the labels.
        some = (labels != IGNORED).any()
        return F.cross_entropy(logits, torch.where(some, labels, 0), label_smoothing=label_smoothing) * some

    def evaluate(data: Iterable[Any], model: nn.Module) -> dict[str, float]:
        nonlocal most_frequent
        right = among = total = summed = 0.0
        seen: Any = 0
        for batch in prefetch(data, device_of(model)):
            images, labels = read(batch)
            logits = scores_of(model, images)
            check_test(labels, logits, IGNORED)
            valid = labels != IGNORED
            right += (logits.argmax(1) == labels).sum()
            if top5:
                best = logits.topk(min(5, logits.shape[1]), dim=1).indices
                among += (best == labels[:, None]).any(1).sum()
            summed += F.cross_entropy(logits.float(), labels, reduction="sum")
            total += valid.sum()
            seen = seen + (F.one_hot(labels.flatten().clamp_min(0), logits.shape[1]) * valid.flatten()[:, None]).sum(0)
        if not total:
            raise _empty("test" if data is test else "held_out")
        total = float(total)
        if data is test:
            most_frequent = 100 * float(seen.max()) / total
        metrics = {"accuracy": 100 * float(right) / total, "loss": float(summed) / total}
        return metrics | ({"top5": 100 * float(among) / total} if top5 else {})

    return Task(
        train,
        loss,
        partial(evaluate, test) if test is not None else None,
        chance=lambda: most_frequent,
        output=output,
        batch=batch,
        held_out=partial(evaluate, held_out) if held_out is not None else None,
        gives_scores=True,
    )


def segmentation(
    train: Iterable[Any],
    test: Iterable[Any] | None = None,
    *,
    num_classes: int,
    held_out: Iterable[Any] | None = None,
    ignore_index: int = 255,
    summed: bool = False,
    output: Key | None = None,
    batch: Entries | None = None,
) -> Task:
    """Images and label maps in, cross-entropy per pixel; mean IoU and pixel accuracy in percent over all of `test`.

    summed: sum the loss over the pixels of an image, as FCN's learning rates need it, instead of averaging.
    held_out, output, batch: as of `classification`; without `output`, "out" is read where the model returns a dict.
    """
    read, scores_of = partial(pair, entries=batch), partial(output_of, output=output)
    check_repeats(test, "test")
    check_repeats(held_out, "held_out")
    check, check_test = LabelCheck(), LabelCheck()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        images, labels = read(batch)
        logits = scores_of(model, images)
        check(labels, logits, ignore_index, probabilities=True)
        if labels.is_floating_point():  # shares of every class, of which none is ignored
            total, pixels = F.cross_entropy(logits, labels, reduction="sum"), labels[:, 0].numel()
        else:
            total = F.cross_entropy(logits, labels, ignore_index=ignore_index, reduction="sum")
            pixels = (labels != ignore_index).sum().clamp_min(1)  # maps without any label have no loss
        return total / (labels.shape[0] if summed else pixels)

    def evaluate(data: Iterable[Any], model: nn.Module) -> dict[str, float]:
        counts: Tensor | None = None
        for batch in prefetch(data, device_of(model)):
            images, labels = read(batch)
            logits = scores_of(model, images)
            if logits.shape[1] > num_classes:
                raise InvalidData(
                    "the model has more classes than num_classes", got=logits.shape[1], wanted=num_classes
                )
            check_test(labels, logits, ignore_index)
            predicted = logits.argmax(1)
            valid = labels != ignore_index
            cells = num_classes * labels[valid] + predicted[valid]
            seen = torch.bincount(cells, minlength=num_classes**2)
            counts = seen if counts is None else counts + seen
        if counts is None or not counts.any():
            raise _empty("test" if data is test else "held_out")
        table = counts.reshape(num_classes, num_classes).double()
        hits, union = table.diag(), table.sum(0) + table.sum(1) - table.diag()
        present = union > 0
        return {
            "miou": 100 * float((hits[present] / union[present]).mean()),
            "pixel_accuracy": 100 * float(hits.sum() / table.sum()),
        }

    return Task(
        train,
        loss,
        partial(evaluate, test) if test is not None else None,
        output=output,
        batch=batch,
        held_out=partial(evaluate, held_out) if held_out is not None else None,
        gives_scores=True,
    )


def _empty(name: str) -> InvalidData:
    """The error for data without a label that counts."""
    return InvalidData(f"{name} has no labelled images", remedy=f"Give it some, or pass {name}=None")


def unlabelled(train: Iterable[Any], test: Iterable[Any], whole: nn.Module, *, output: Key | None = None) -> Task:
    """Images alone in; agreement with the whole network in percent, over all images, or pixels, of `test`.

    The loss is the cross-entropy against classes drawn from the network's own probabilities, so that the mean square of
    its gradients is the Fisher information.
    whole: is asked when metrics are first computed; `test` must give the same images in each pass.
    output: as of `classification`.
    """
    check_repeats(test, "test")
    answers: list[Tensor] = []

    def predictions(model: nn.Module) -> Iterator[Tensor]:
        for batch in prefetch(test, device_of(model)):
            yield class_scores(model, batch, output).argmax(1).int()

    def evaluate(model: nn.Module) -> dict[str, float]:
        if not answers:
            with evaluating(whole), torch.autocast(device_of(whole).type, enabled=False):
                answers.extend(predictions(whole))
        same = total = 0.0
        for found, answer in zip(predictions(model), answers, strict=True):
            same += (found == answer.to(found.device)).sum()
            total += answer.numel()
        if not total:
            raise InvalidData("test has no images", remedy="Give it some")
        return {"agreement": 100 * float(same) / total}

    return Task(train, partial(_drawn_loss, output=output), evaluate, labelled=False, output=output)


def without_labels(task: Task) -> Task:
    """The same task, whose training does not look at the labels: the loss is that of `unlabelled`.

    task: of pairs of images and labels, as `classification` and `segmentation` make it. Its metrics stay.
    """

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return _drawn_loss(model, pair(batch, task.batch)[0], task.output)

    return replace(task, loss=loss, labelled=False)


def _drawn_loss(model: nn.Module, images: Any, output: Key | None) -> Tensor:
    """The cross-entropy against classes that are drawn from the network's own probabilities."""
    scores = class_scores(model, images, output)
    # The largest of scores with Gumbel noise is such a draw; torch.multinomial would wait for the GPU.
    noise = torch.empty_like(scores, dtype=torch.float32).exponential_().log()
    return F.cross_entropy(scores, (scores.detach() - noise).argmax(1))


def class_scores(model: nn.Module, images: Any, output: Key | None = None) -> Tensor:
    """The scores that a model gives, a class along axis 1."""
    scores = output_of(model, images, output)
    if scores.dim() < 2:
        raise InvalidData("the model does not give class scores", got=tuple(scores.shape), wanted="(images, classes)")
    return scores


class LabelCheck:
    """Checks that labels are classes of the model: on the CPU in every batch, elsewhere in the first one.

    probabilities: whether a probability for every class is allowed too.
    """

    def __init__(self) -> None:
        self.checked = False

    def __call__(self, labels: Tensor, scores: Tensor, ignored: int, *, probabilities: bool = False) -> None:
        if probabilities and labels.is_floating_point() and labels.shape == scores.shape:
            return
        wanted = (scores.shape[0], *scores.shape[2:])
        if labels.is_floating_point() or tuple(labels.shape) != wanted:
            raise InvalidData(
                "labels do not fit the model's output",
                got=f"{labels.dtype} of shape {tuple(labels.shape)}",
                wanted=f"integers of shape {wanted}",
                remedy="Convert them in the data, as with labels.long(), labels.squeeze(1) or labels.argmax(1)",
            )
        if self.checked and labels.device.type != "cpu":
            return
        self.checked = True
        num_classes = scores.shape[1]
        wrong = labels[(labels != ignored) & ((labels < 0) | (labels >= num_classes))]
        if wrong.numel():
            raise InvalidData("a label is out of range", got=int(wrong[0]), wanted=f"0 to {num_classes - 1}")
