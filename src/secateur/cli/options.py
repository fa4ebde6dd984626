"""Options that several commands share."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from secateur.cli.flags import Switch
from secateur.errors import InvalidSetting
from secateur.pruning.settings import UNITS
from secateur.recipes.paper import find_recipe, is_recipe
from secateur.runs.settings import Preset, TickTock
from secateur.settings import flat_fields
from secateur.training.settings import with_epochs

if TYPE_CHECKING:
    import torch

    from secateur.recipes.jobs import Order

CHOOSE_ON = 0.1
"""Share of the training images to choose by, where something is to be chosen and no share is typed."""


MOST_NUMBERS = 2**31
"""In an input: 8 gigabytes in single precision."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Data and network."""

    data: Path | None = None
    """Folder of the dataset."""

    batch_size: int | None = None
    """Images in a batch, instead of the recipe's number."""

    image_size: int | None = None
    """Height and width of the network's input, in pixels, for your own photographs."""

    in_memory: Switch = False
    """Decode photographs once, and keep them on the device: 12,000 of 176x235 pixels take 1.5 GB."""

    erase: int | None = None
    """Side of a square to erase in every training image, for datasets in memory: 8 is good for CIFAR, 0 is none."""

    width: float = 1.0
    """Multiplies the channels of every layer, for networks that take `width`: all of ours do."""

    hold_out: int = 0
    """Train without this many of the training images, and test on them instead of the test images: for choosing."""

    choose_on: float = 0.0
    """Hold out this share of the training images to choose by: the best epoch (--best-epoch), or how far to prune."""

    no_labels: Switch = False
    """Do not look at the labels of training images: score without them, and learn from a teacher (--distill 1)."""

    ignore: tuple[str, ...] = ()
    """Modules whose channels stay: names, with wildcards."""

    inexact: Switch = False
    """Also prune channels that pass a normalisation over channels, where removing is not the same as zeroing."""

    def choosing(self, recipe: str, wanted: bool) -> Source:
        """The same with images to choose by, if that is wanted and no share is typed; own code has its own."""
        return replace(self, choose_on=CHOOSE_ON) if wanted and not self.choose_on and is_recipe(recipe) else self

    def order(self, recipe: str, weights: Path | None = None, **values: Any) -> Order:
        from secateur.recipes.jobs import Order

        return Order(
            recipe=recipe,
            data=str(self.data.absolute()) if self.data is not None else None,
            batch_size=self.batch_size,
            image_size=self.image_size,
            in_memory=self.in_memory,
            erase=self.erase,
            width=self.width,
            hold_out=self.hold_out,
            choose_on=self.choose_on,
            no_labels=self.no_labels,
            ignore=self.ignore,
            inexact=self.inexact,
            weights=str(weights) if weights is not None else None,
            **values,
        )

    def trained(self, recipe: str, weights: Path | None, flag: str = "--weights ", **values: Any) -> Order:
        """The order of a network that has weights: these, or those that the user's own code gives it."""
        order = self.order(recipe, weights, **values)
        if weights is None and not order.is_own:
            remedy = f"Name the trained network: {flag}RUN, or {flag}FILE"
            raise InvalidSetting(f"{recipe} has random weights", remedy=remedy)
        return order


@dataclass(frozen=True, kw_only=True)
class Output:
    """What is printed."""

    json: Switch = False
    """Print the result as JSON."""

    debug: Switch = False
    """Show the traceback of an error."""


@dataclass(frozen=True, kw_only=True)
class RunOutput(Output):
    """Where the run trains, and what it prints."""

    device: str = "auto"
    """Where to train: cpu, cuda, cuda:1; auto uses CUDA if available."""

    quiet: Switch = False
    """Print no progress."""

    tensorboard: Switch = False
    """Also write the numbers for TensorBoard, into the folder of the run."""


BEGUN = "config.json", "search.json"
"""In a folder where a run, or a search for a budget, has begun."""


@dataclass(frozen=True, kw_only=True)
class NewRunOutput(RunOutput):
    """Where the run is, and what it prints."""

    out: Path = Path("run")
    """Folder of the run."""

    def check_new(self) -> None:
        """Raise if there is something in the way."""
        if self.out.is_file():
            raise InvalidSetting(f"{self.out} is a file", remedy="Name a folder: --out FOLDER")
        if any((self.out / name).exists() for name in BEGUN):
            remedy = f"Resume it: secateur resume {self.out}; or name another folder: --out FOLDER"
            raise InvalidSetting(f"{self.out} holds a run already", remedy=remedy)


def order_of_run(folder: Path, data: Path | None) -> Order:
    """The network that a run ended with, and its data; they may be in another folder now."""
    from secateur.recipes.work import read_run

    order = read_run(folder).order
    place = order.data if data is None else str(data.absolute())
    return replace(order, data=place, weights=str(folder), fresh=False, new_head=None)


def default_pruning(recipe: str) -> TickTock | None:
    """How a recipe, or a job of the user's own, is pruned unless flags say otherwise; None for the preset "quick"."""
    if is_recipe(recipe):
        return find_recipe(recipe).pruning
    if ":" not in recipe:
        return None
    from secateur.recipes.jobs import own_settings

    return own_settings(recipe)


def shown_pruning(recipe: str) -> dict[str, Any]:
    """The values that --help shows as defaults, by flat name."""
    default = default_pruning(recipe)
    if default is None:
        # The budget has no default, and the rank depends on what it counts.
        return {**TickTock.preset("quick", keep_macs=0.5).to_dict(), "keep_macs": None}
    return default.to_dict()


def pruning_of(recipe: str, preset: Preset | None, values: dict[str, Any]) -> TickTock:
    """How to prune, with the values that were typed; of a recipe, a preset changes all but its budget and limits."""
    default = default_pruning(recipe)
    if default is None:
        return TickTock.preset(preset or "quick", **values)
    if preset is None or (preset == "paper" and not default.adapt):
        return default.but(**with_epochs(values, "finetune_"))
    names = flat_fields(TickTock)
    limits = {name: value for name, value in default.to_dict().items() if names[name][0][0] == "limits"}
    budgets = {f"keep_{name}" for name in UNITS}
    budget = {} if values.keys() & budgets else {f"keep_{default.budget.counts}": default.budget.share}
    return TickTock.preset(preset, **{**limits, **budget, **values})


def check_folder(order: Order) -> None:
    """Raise if the dataset is read from a folder and none is named."""
    from secateur.data.catalog import find_dataset

    if order.data is None and not order.is_own:
        dataset = find_dataset(find_recipe(order.recipe).data)
        if dataset.folder:
            raise InvalidSetting(f"no folder is named for {dataset.summary}", remedy="Name it: --data FOLDER")


def parse_shape(text: str | None) -> tuple[int, ...] | None:
    """Sizes from their printed form.

    >>> parse_shape("1x3x32x32")
    (1, 3, 32, 32)
    """
    if text is None:
        return None
    sizes = text.split("x")
    if not all(size.isdecimal() and int(size) for size in sizes):
        wanted = "positive sizes joined by x, as 1x3x224x224"
        raise InvalidSetting("--input is not a shape", got=f"{text!r:.80}", wanted=wanted)
    if math.prod(map(int, sizes)) > MOST_NUMBERS:
        raise InvalidSetting("--input is too large", got=f"{text!r:.80}", wanted=f"{MOST_NUMBERS:,} numbers at most")
    return tuple(map(int, sizes))


def find_device(name: str) -> torch.device:
    """What the user calls a device."""
    import torch

    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
        if device.type == "meta":
            raise RuntimeError("it computes shapes only")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built with CUDA
        reason = str(error).partition("\n")[0].partition(". ")[0]  # for some devices torch tells half a page
        here = ", ".join(["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))])
        raise InvalidSetting(f"there is no device {name!r:.40} here: {reason:.200}", wanted=f"one of {here}") from error
    return device
