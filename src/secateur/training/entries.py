"""Which entries of a batch are the images and the labels, and where the scores are in what a model returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from secateur.errors import InvalidData, InvalidSetting

Key = str | int
"""A key of a dict, an attribute of an object, or the index of a tuple or list."""
Entries = tuple[Key, Key]

IMAGES = {"image", "images", "img", "imgs", "pixel_values", "input", "inputs", "x"}
LABELS = {"label", "labels", "target", "targets", "class", "classes", "mask", "masks", "y"}
"""Names of the two entries of a batch that is a dict."""
OWN_TASK = "Task(train, loss=lambda model, batch: ...)"


def check_key(output: Any) -> None:
    """Raise unless this can say where the scores are in an output."""
    if output is not None and not _is_key(output):
        wanted = 'a key or attribute as "logits", or the index of a tuple'
        raise InvalidSetting("output does not name a part of what a model returns", got=repr(output), wanted=wanted)


def check_entries(batch: Any) -> None:
    """Raise unless this can say which entries of a batch are the images and the labels."""
    two = isinstance(batch, (tuple, list)) and len(batch) == 2 and all(map(_is_key, batch)) and batch[0] != batch[1]
    if batch is not None and not two:
        wanted = 'those of the images and the labels, as ("image", "label") or (0, 2)'
        raise InvalidSetting("batch does not name two entries", got=repr(batch), wanted=wanted)


def _is_key(value: Any) -> bool:
    return isinstance(value, Key) and not isinstance(value, bool)


def part_of(value: Any, key: Key) -> Any:
    """The part of a dict, tuple or object with this key, index or attribute; raises LookupError if there is none."""
    if isinstance(value, Mapping):
        return value[key]
    if isinstance(key, str):
        if not hasattr(value, key):
            raise LookupError(key)
        return getattr(value, key)
    if not isinstance(value, (tuple, list)):
        raise LookupError(key)
    return value[key]


def form_of(value: Any) -> str:
    """A dict with its keys, a tuple with its length, an object with its fields; for errors.

    >>> form_of({"image": 1, "label": 2}), form_of((1, 2, 3))
    ('a dict of image, label', 'a tuple of 3')
    """
    kind = type(value).__name__
    text = f"a {kind}" if type(value) in (dict, tuple, list) else kind
    if isinstance(value, Mapping):
        text += f" of {', '.join(map(str, value))}"
    elif isinstance(value, (tuple, list)):
        text += f" of {len(value)}"
    elif not isinstance(value, Tensor) and (fields := getattr(value, "__dict__", {})):
        text += f" with {', '.join(fields)}"
    return f"{text:.200}"


def pair(batch: Any, entries: Entries | None = None) -> tuple[Any, Tensor]:
    """Images and labels: of these entries, or of a pair or a dict with two entries; integer labels become long."""
    form = form_of(batch)
    if entries is not None:
        batch = tuple(entry(batch, key) for key in entries)
    elif isinstance(batch, Mapping) and len(batch) == 2:
        batch = _by_key(batch)
    if isinstance(batch, (tuple, list)) and len(batch) == 2 and _is_one(batch[1]):
        raise InvalidData("a batch holds a single image and its label", remedy="Put a DataLoader around the dataset")
    if not isinstance(batch, (tuple, list)) or len(batch) != 2 or not isinstance(batch[1], Tensor):
        which = 'batch=("image", "label")' if isinstance(batch, Mapping) else "batch=(0, 2)"
        raise InvalidData(
            "a batch has the wrong form",
            got=form,
            wanted="images and labels",
            remedy=f"Say which entries these are, as with {which}, or write {OWN_TASK}",
        )
    images, labels = batch
    return images, labels if labels.is_floating_point() else labels.long()


def entry(batch: Any, key: Key) -> Any:
    """The entry of a batch with this key or index."""
    try:
        return part_of(batch, key)
    except LookupError as error:
        raise InvalidData(
            f"a batch has no entry {key!r}", got=form_of(batch), remedy="Name entries that exist with batch=(..., ...)"
        ) from error


def _by_key(batch: Mapping[Any, Any]) -> tuple[Any, Any]:
    """Images and labels of a dict in any order: by their names, or else by their data types and shapes."""
    one, other = batch
    parts = batch[one], batch[other]
    first = _role(one) - _role(other) or _fit(*parts) - _fit(*parts[::-1])
    if not first:
        raise InvalidData(
            "a batch does not show which entry holds the images",
            got=f"{one!r} and {other!r}",
            wanted="'image' and 'label'",
            remedy=f"Pass batch=({one!r}, {other!r}) if the images come first, else batch=({other!r}, {one!r})",
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


def output_of(model: nn.Module, images: Any, output: Key | None = None) -> Tensor:
    """The scores that a model gives.

    output: where they are in what it returns; without it, it returns a tensor, or a dict with "out".
    """
    try:
        found = model(images)
    except RuntimeError as error:
        wanted = next((p.dtype for p in model.parameters()), None)
        if not isinstance(images, Tensor) or images.dtype == wanted or not _runs(model, images.to(wanted)):
            raise
        remedy = "Convert them in the data, as with images.float()"
        if images.dtype == torch.float32:
            remedy = "Prune the model in single precision, model.float(); half precision is a setting of the Engine"
        raise InvalidData(
            "images and model differ in data type", got=images.dtype, wanted=wanted, remedy=remedy
        ) from error
    scores = tensor_of(found, output)
    if scores is None:
        what = "one tensor of scores" if output is None else f"a tensor of scores as {output!r}"
        which = "output=0" if isinstance(found, (tuple, list)) else 'output="logits"'
        raise InvalidData(
            f"the model does not give {what}",
            got=form_of(found),
            remedy=f"Say where they are, as with {which}, or write {OWN_TASK}",
        )
    return scores


def tensor_of(found: Any, output: Key | None = None) -> Tensor | None:
    """The scores in what a model returns; None if there are none.

    A tensor is the scores itself. Without `output`, a dict must have them under "out", as torchvision's segmentation
    networks do.
    """
    if not isinstance(found, Tensor):
        if output is None:
            found = found.get("out") if isinstance(found, Mapping) else None
        else:
            try:
                found = part_of(found, output)
            except LookupError:
                return None
    return found if isinstance(found, Tensor) else None


@torch.no_grad()
def _runs(model: nn.Module, images: Tensor) -> bool:
    try:
        model(images)
    except RuntimeError:
        return False
    return True
