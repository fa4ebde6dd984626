"""A job: a network, an example of its input, and a task; from a recipe, or from the user's own code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from secateur.data.arrays import Arrays
from secateur.data.catalog import Dataset, find_dataset
from secateur.data.photos import Photos
from secateur.data.preprocessing import Preprocessing
from secateur.data.scenes import Scenes
from secateur.data.views import ResizedCrops
from secateur.errors import InvalidData, InvalidModel, InvalidSetting, SecateurError
from secateur.models.lookup import check_callable, find_builder, find_callable, find_model, normalization
from secateur.nested import map_tensors
from secateur.randomness import seeded
from secateur.recipes.experiments import EXPERIMENTS
from secateur.recipes.paper import find_recipe, is_recipe
from secateur.recipes.recipe import Recipe
from secateur.runs.settings import TickTock
from secateur.settings import check_types
from secateur.training.task import Task, classification, segmentation, unlabelled, without_labels

MANY_CLASSES = 1000
"""From so many classes on, the accuracy among the best five is reported too."""


@dataclass(frozen=True)
class Job:
    """A network to prune or train, an example of its input, and the task.

    network: how to build the model again: {"name": ..., "options": {...}} as `find_model` takes them; None where the
        user's own code has built it.
    maps: test images with a label for every pixel, for pictures of what the networks predict.
    files: the images of each part, where a draw has parted them.
    classes: the name of each class, in the order of the network's outputs.
    preprocessing: what becomes of a photograph before the network sees it.
    images: how many there are to train and to test.
    """

    model: nn.Module
    example: Any
    task: Task
    network: dict[str, Any] | None = None
    maps: Iterable[Any] | None = None
    files: dict[str, list[str]] | None = None
    classes: Sequence[str] | None = None
    preprocessing: Preprocessing | None = None
    images: dict[str, int] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise InvalidModel("the model of a Job is wrong", got=type(self.model).__name__, wanted="an nn.Module")
        if not isinstance(self.task, Task):
            kind = type(self.task).__name__
            wanted = "what secateur.classification, segmentation or Task makes"
            raise InvalidData("the task of a Job is wrong", got=kind, wanted=wanted)

    @property
    def about(self) -> dict[str, Any]:
        """What a result tells of the network, as plain data."""
        found: dict[str, Any] = {"network": self.network}
        if self.classes is not None:
            found["classes"] = list(self.classes)
        if self.preprocessing is not None:
            found["preprocessing"] = self.preprocessing.to_dict()
        if self.images is not None:
            found["images"] = self.images
        return found

    def to(self, device: torch.device) -> Job:
        moved = map_tensors(self.example, lambda tensor: tensor.to(device))
        task = replace(self.task, train=_on(device, self.task.train))
        return replace(self, model=self.model.to(device), example=moved, task=task)


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a run works on: with the settings, all that is needed to do it again."""

    recipe: str
    """A recipe, NETWORK@DATASET, or package.module:callable."""

    data: str | None = None
    """Folder of the dataset."""

    batch_size: int | None = None
    """Instead of the recipe's."""

    erase: int | None = None
    """Instead of the recipe's."""

    ignore: tuple[str, ...] = ()
    """Modules whose channels stay, as `analyze` takes them."""

    inexact: bool = False
    """Also prune channels for which removing is not the same as zeroing, as `analyze` takes it."""

    width: float = 1.0
    """Times the channels of every layer, for networks that take `width`."""

    weights: str | None = None
    """What the network starts from: a run, a result, or a file with a state dict."""

    fresh: bool = False
    """Take only the shape of what it starts from; the weights are random."""

    teacher: str | None = None
    """What distillation learns from: a run, a result, or a file; otherwise the whole network that it starts from."""

    new_head: str | None = None
    """The layer that is made anew, and not taken from those weights."""

    image_size: int | None = None
    """Height and width of the network's input, in pixels, instead of the dataset's."""

    in_memory: bool = False
    """Decode photographs once, and keep them on the device."""

    hold_out: int = 0
    """Train without this many of the training images, and test on them instead of the test images."""

    choose_on: float = 0.0
    """Train without this share of the training images, and choose by them: the best epoch, or how far to prune."""

    no_labels: bool = False
    """Do not look at the labels of training images, as if there were none."""

    epochs_scale: float = 1.0
    """Multiplies the epochs of a baseline that has to be trained first."""

    def __post_init__(self) -> None:
        check_types(self)
        object.__setattr__(self, "ignore", tuple(self.ignore))
        if not 0 <= self.choose_on < 1:
            raise InvalidSetting("choose_on is out of range", got=self.choose_on, wanted="a share, 0 or more, below 1")
        if not self.width > 0:
            raise InvalidSetting("width is out of range", got=self.width, wanted="a number above 0")
        if self.new_head is not None and self.weights is None:
            remedy = "Name the weights, or leave it out"
            raise InvalidSetting("new_head is for a network with weights", got=self.new_head, remedy=remedy)
        if self.recipe in EXPERIMENTS:
            remedy = f"Reproduce it: secateur reproduce {self.recipe}"
            raise InvalidSetting(f"{self.recipe} is an experiment of several runs, not a recipe", remedy=remedy)
        if not self.is_own:
            find_recipe(self.recipe)
            return
        names = ("data", "batch_size", "image_size", "hold_out", "choose_on", "erase", "no_labels", "in_memory")
        unused = [name for name in names if getattr(self, name)]
        if unused:
            what = f"{self.recipe} has data of its own, so that these have no effect"
            raise InvalidSetting(what, got=" and ".join(unused))

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ignore": list(self.ignore)}

    def compared(self) -> dict[str, Any]:
        """What must be the same when a run is resumed; data and weights may have moved, as into memory."""
        moved = ("data", "weights", "teacher", "epochs_scale", "in_memory")
        return {name: value for name, value in self.to_dict().items() if name not in moved}

    @property
    def is_own(self) -> bool:
        """Whether the user's own code builds the job."""
        return not is_recipe(self.recipe) and ":" in self.recipe


def build(order: Order, seed: int, device: torch.device, channels_last: bool = False) -> Job:
    """The job on that device, with random weights drawn by the seed, or as the user's own code has made it.

    channels_last: make batches of images in this memory format.
    """
    if order.is_own:
        with seeded(seed):
            return _build_own(order).to(device)
    recipe = find_recipe(order.recipe)
    dataset = find_dataset(recipe.data)
    find_builder(recipe.network)  # a wrong name is reported before data are read
    batch_size = recipe.batch_size if order.batch_size is None else order.batch_size
    input_size = recipe.input_size or dataset.input_size
    if order.image_size is not None:
        input_size = (input_size[0], order.image_size, order.image_size)
    # Asked for in vain, a size is reported.
    size = input_size[1] if dataset.any_size else order.image_size
    train, test = dataset.load(order.data, batch_size, size)
    if recipe.crop_area is not None and isinstance(train, Photos):
        train = replace(train, crops=ResizedCrops(train.crops.size, (recipe.crop_area, 1.0)))
    if order.hold_out:
        if not isinstance(train, Arrays | Photos):
            raise InvalidSetting("hold_out needs images with a class each", got=dataset.summary)
        train, test = train.hold_out(order.hold_out)
    held_out = None
    if order.choose_on:
        if not isinstance(train, Arrays | Photos):
            raise InvalidSetting("choose_on needs images with a class each", got=dataset.summary)
        train, held_out = train.hold_out(max(1, round(order.choose_on * num_images(train))))
    if erase := recipe.erase if order.erase is None else order.erase:
        if not isinstance(train, Arrays):
            raise InvalidSetting("erase needs a dataset that is kept in memory", got=dataset.summary)
        train = replace(train, erase=erase)
    if order.in_memory and not isinstance(train, Photos):
        raise InvalidSetting("in_memory is for photographs", got=dataset.summary)
    train, test, held_out = (_on(device, data, channels_last) for data in (train, test, held_out))
    num_classes = (dataset.num_classes or _count_classes(train)) if dataset.labelled else None
    options = network_options(recipe, dataset, num_classes, order.width)
    with seeded(seed):
        model = find_model(recipe.network, **options)
        example = torch.randn(1, *input_size)
    scaled = normalization(model)
    train, test, held_out = (replace(d, **scaled) if isinstance(d, Photos) else d for d in (train, test, held_out))
    if order.in_memory:
        train, test, held_out = (d.decoded() if isinstance(d, Photos) else d for d in (train, test, held_out))
    if num_classes is None:
        task = unlabelled(train, test, whole=model)
    elif dataset.maps:
        task = segmentation(train, test, num_classes=num_classes, summed=recipe.summed)
    else:
        task = classification(train, test, held_out=held_out, top5=recipe.top5 or num_classes >= MANY_CLASSES)
    if order.no_labels and dataset.labelled:
        task = without_labels(task)
    network = {"name": recipe.network, "options": options}
    about: dict[str, Any] = {}
    if isinstance(train, Photos) and isinstance(test, Photos):
        counts = {"train": num_images(train), "test": num_images(test)}
        about = {"classes": train.classes, "preprocessing": Preprocessing.of(test), "images": counts}
        if train.drawn:
            about["files"] = {"train": train.paths, "test": test.paths}
            if isinstance(held_out, Photos):
                about["files"]["choose"] = held_out.paths
    return Job(model.to(device), example.to(device), task, network, test if dataset.maps else None, **about)


def network_options(recipe: Recipe, dataset: Dataset, num_classes: int | None, width: float) -> dict[str, Any]:
    """What the network is built with. Networks of other packages take colour images and need no `in_channels`.

    num_classes: None for as many as the network has by default.
    """
    options = {**recipe.options, **({"num_classes": num_classes} if num_classes is not None else {})}
    channels = (recipe.input_size or dataset.input_size)[0]
    return options | ({"in_channels": channels} if channels != 3 else {}) | ({"width": width} if width != 1 else {})


def own_settings(name: str) -> TickTock | None:
    """The `settings` of package.module:callable, if it has any; `build` reports a name that does not exist."""
    module, _, attribute = name.partition(":")
    settings = None
    with suppress(SecateurError):
        settings = getattr(find_callable(module, attribute), "settings", None)
    if settings is not None and not (isinstance(settings, TickTock) and isinstance(settings.score, str)):
        got = repr(getattr(settings, "score", settings))
        wanted = "a secateur.TickTock with the name of a score"
        raise InvalidSetting(f"{name}.settings is wrong", got=got, wanted=wanted)
    return settings


def narrower(order: Order, job: Job) -> Callable[[float], nn.Module]:
    """What builds the job's network so many times as wide; not all networks take a width but 1."""
    if job.network is None:
        return lambda times: _build_own(replace(order, width=times * order.width)).model
    name, options = job.network["name"], {k: v for k, v in job.network["options"].items() if k != "width"}

    def build_narrower(times: float) -> nn.Module:
        width = times * order.width
        return find_model(name, **options, **({"width": width} if width != 1 else {}))

    return build_narrower


def _build_own(order: Order) -> Job:
    module, _, attribute = order.recipe.partition(":")
    make = find_callable(module, attribute)
    options = {"width": order.width} if order.width != 1 else {}
    check_callable(make, order.recipe, **options)
    job = make(**options)
    if not isinstance(job, Job):
        raise InvalidModel(f"{order.recipe} returns the wrong type", got=type(job).__name__, wanted="a secateur.Job")
    return job


def _on(device: torch.device, data: Any, channels_last: bool = False) -> Any:
    """Data that can make their batches on a device do so."""
    if not isinstance(data, Arrays | Photos | Scenes):
        return data
    return replace(data.to(device), channels_last=data.channels_last or channels_last)


def num_images(data: Arrays | Photos) -> int:
    return len(data.paths) if isinstance(data, Photos) else int(data.labels.shape[0])


def _count_classes(train: Any) -> int:
    if isinstance(train, Arrays):
        return int(train.labels.max()) + 1
    return len(train.classes) if train.classes is not None else max(train.targets) + 1
