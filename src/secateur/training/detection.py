"""Detection: the task of torchvision's detectors, and of others that are called as they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from secateur.errors import InvalidData
from secateur.extras import import_extra
from secateur.training.batches import check_repeats, device_of, prefetch
from secateur.training.entries import Entries, entry, form_of
from secateur.training.task import Task

COLLATE = "Put a DataLoader around the dataset, with collate_fn=lambda batch: tuple(zip(*batch))"


def detection(train: Iterable[Any], test: Iterable[Any] | None = None, *, batch: Entries | None = None) -> Task:
    """Images and targets in, the sum of the losses that the model gives; COCO's mAP in percent over all of `test`.

    The model is called as torchvision's detectors are: in training mode with images and targets, for a dict of losses;
    in evaluation mode with images, for a dict of boxes, labels and scores for each. A batch is a list of images and a
    list of as many targets, each with "boxes" (x1, y1, x2, y2) and "labels".

    The metrics are "map", averaged over IoUs from 0.5 to 0.95, and "map50". They need the extra `detection`.
    batch: which entries of a batch are the images and the targets, where it has more than two.
    """
    check_repeats(test, "test")
    if test is not None:
        make_metric()  # what is missing is reported before anything trains
    entries = batch if batch is not None else (0, 1)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        images, targets = scenes(batch, entries)
        with giving_losses(model):
            losses = model(images, targets)
        if not isinstance(losses, Mapping) or not losses or not all(isinstance(x, Tensor) for x in losses.values()):
            wanted = "a dict of losses, as torchvision's detectors give"
            raise InvalidData("the model gives no losses in training mode", got=form_of(losses), wanted=wanted)
        return sum(losses.values())  # pyright: ignore[reportReturnType]

    def evaluate(model: nn.Module) -> dict[str, float]:
        assert test is not None
        metric = make_metric()
        for batch in prefetch(test, device_of(model)):
            images, targets = scenes(batch, entries)
            metric.update(model(images), targets)
        found = metric.compute()
        if float(found["map"]) < 0:
            raise InvalidData("the test data hold no boxes", remedy="Pass test=None to skip testing")
        return {"map": 100 * float(found["map"]), "map50": 100 * float(found["map_50"])}

    return Task(train, loss, evaluate if test is not None else None, batch=batch)


def scenes(batch: Any, entries: Entries) -> tuple[list[Tensor], list[Any]]:
    """The images and the targets of a batch, as lists of the same length."""
    images, targets = (entry(batch, key) for key in entries)
    given = list(images) if isinstance(images, (tuple, list, Tensor)) else []
    fit = isinstance(targets, (tuple, list)) and all(isinstance(target, Mapping) for target in targets)
    if not given or not fit or len(given) != len(targets) or any(getattr(each, "ndim", 0) != 3 for each in given):
        raise InvalidData(
            "a batch has the wrong form",
            got=f"{form_of(images)} and {form_of(targets)}",
            wanted="a list of images, and a list of as many dicts with boxes and labels",
            remedy=COLLATE,
        )
    return given, list(targets)


@contextmanager
def giving_losses(model: nn.Module) -> Iterator[None]:
    """Training mode, in which detectors give losses.

    If the model evaluates, as for scores, its layers still do: norms, dropout, and the choice of an image size.
    """
    modes = [(module, module.training) for module in model.modules()]
    if not model.training:
        for module, _ in modes:
            module.training = any(True for _ in module.children())
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def make_metric() -> Any:
    """An empty mAP."""
    import_extra("pycocotools.mask", "detection")
    metric = import_extra("torchmetrics.detection.mean_ap", "detection").MeanAveragePrecision()
    metric.warn_on_many_detections = False
    return metric
