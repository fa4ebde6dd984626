"""The paper's tables and figures: which runs each consists of. `reports` makes the pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from secateur.data.catalog import find_dataset
from secateur.errors import InvalidSetting, unknown_name
from secateur.recipes.paper import find_recipe
from secateur.runs.settings import TickTock
from secateur.training.settings import Training


@dataclass(frozen=True, kw_only=True)
class Step:
    """One run of an experiment."""

    name: str
    settings: TickTock | Training
    weights_of: str | None = None
    """The step whose result it starts from."""
    shape_of: str | None = None
    """The step whose shape it has, with random weights."""
    narrow_to: float | None = None
    """All layers are narrowed by one factor, so that this share of the MACs stays."""
    continue_from: str | None = None
    """The step whose pruning it continues, if that is finished; otherwise it begins anew."""
    teacher: str | None = None
    """The step whose result distillation learns from, where that is not the whole network it starts from."""
    erase: int | None = None
    """Side of the square that is erased in training images, instead of the recipe's."""

    @property
    def source(self) -> str | None:
        """The step whose network it starts from."""
        return self.weights_of or self.shape_of


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A table or a figure."""

    recipe: str
    steps: tuple[Step, ...]
    report: str
    """The function of `reports` that makes it."""
    shared: tuple[str, ...] = ()
    """Steps that runs of all seeds share; their own seed is 0."""
    no_labels: bool = False
    """Whether nothing looks at the labels of training images."""

    @property
    def data(self) -> str:
        return find_dataset(find_recipe(self.recipe).data).summary

    def step(self, name: str) -> Step:
        return next(step for step in self.steps if step.name == name)


CONTROL_EPOCHS = 40
"""Of fine-tuning, in the experiment of controls."""
NEVER_AGAIN = 1000
"""Ticks before the next Tock, where only the first is wanted."""
PERCENTS = {"vgg16_m": (60, 40, 20), "resnet56": (30, 40)}
"""Percentages of the MACs that controls are compared at."""
SCORES = ("taylor", "random", "l1", "slim", "pcnn")
"""That photographs are pruned by, the paper's first."""
LEFT = (50, 30)
"""Percentages of the MACs that networks of photographs are fine-tuned at."""
CURVE = "curve-"
"""What runs without fine-tuning begin with."""
LONGEST = 4
"""Tocks of a network that loses the most, about; the whole one is trained for as many epochs."""
EXPERIMENTS: dict[str, Callable[..., Experiment]] = {}


def experiment(function: Callable[..., Experiment]) -> Callable[..., Experiment]:
    """Make an experiment known by its name."""
    name = function.__name__.replace("_", "-")
    if name in EXPERIMENTS:
        raise InvalidSetting(f"there is an experiment {name!r} already")
    EXPERIMENTS[name] = function
    return function


def find_experiment(name: str, recipe: str | None = None) -> Experiment:
    """The experiment of that name, with its own recipe or another."""
    if name not in EXPERIMENTS:
        raise unknown_name("experiment", name, list(EXPERIMENTS))
    return EXPERIMENTS[name](recipe) if recipe is not None else EXPERIMENTS[name]()


@experiment
def table1(recipe: str = "resnet56-cifar10") -> Experiment:
    """Table 1: ResNet-56 to 40% and 30% of its MACs."""
    steps = pruned(recipe, {"GBN-40": 0.4, "GBN-30": 0.3})
    return Experiment(recipe=recipe, steps=(baseline(recipe), *steps), report="compared")


@experiment
def table2(recipe: str = "resnet50-imagenet") -> Experiment:
    """Table 2: ResNet-50 to the MACs of the paper's GBN-60 (59.46%) and GBN-50 (44.94%)."""
    return Experiment(recipe=recipe, steps=resnet50_steps(recipe), report="compared")


@experiment
def throughput(recipe: str = "resnet50-imagenet") -> Experiment:
    """Images per second of Table 2's networks, batch 64 at 224x224."""
    return Experiment(recipe=recipe, steps=resnet50_steps(recipe), report="throughput")


@experiment
def appendix_d(recipe: str = "resnet50-imagenet") -> Experiment:
    """Appendix D: what was removed of every layer of Table 2's GBN-60, in percent."""
    return Experiment(recipe=recipe, steps=resnet50_steps(recipe)[:2], report="percentages")


@experiment
def table3(recipe: str = "vgg16m-cifar100") -> Experiment:
    """Table 3: One-Shot, Tick-Only and Tick-Tock to 60, 40 and 20% of the MACs, fine-tuned and from scratch."""
    steps = [step for share in (60, 40, 20) for step in schedules(recipe, share)]
    controls = [scratch(recipe, step.name) for step in steps]
    return Experiment(recipe=recipe, steps=(baseline(recipe), *steps, *controls), report="schedules")


@experiment
def appendix_e(recipe: str = "vgg16m-cifar100") -> Experiment:
    """Appendix E: channels of every layer of Table 3's networks with 20% of the MACs."""
    return Experiment(recipe=recipe, steps=(baseline(recipe), *schedules(recipe, 20)), report="structures")


@experiment
def gfir(recipe: str = "vgg16m-cub200") -> Experiment:
    """Figure GFIR: five scores, with and without the L1 term: accuracy before fine-tuning against filters removed."""
    pruning = find_recipe(recipe).pruning.but(keep_filters=0.2, finetune_epochs=0)
    steps = []
    for score in ("taylor", "slim", "pcnn", "l1", "random"):
        settings = pruning.but(score=score)
        steps.append(Step(name=score, settings=settings.but(tock_sparsity=0.0), weights_of="baseline"))
        # PCNN has no factors that the L1 term could shrink.
        if score != "pcnn":
            steps.append(Step(name=f"{score}-sparse", settings=settings, weights_of="baseline"))
    return Experiment(recipe=recipe, steps=(baseline(recipe), *steps), report="rankings")


@experiment
def nas(recipe: str = "vgg16m-cifar100") -> Experiment:
    """Figure NAS: a quarter of the MACs by halving all layers, by pruning, and in the pruned shape from scratch."""
    (prune,) = pruned(recipe, {"quarter": 0.25})
    narrow = Step(name="shrunk", settings=doubled(find_recipe(recipe).training), narrow_to=0.25)
    steps = (baseline(recipe), prune, scratch(recipe, "quarter"), narrow)
    return Experiment(recipe=recipe, steps=steps, report="architectures")


@experiment
def controls(recipe: str = "resnet56-cifar10-ours") -> Experiment:
    """Is it the pruning, or the training? One thing at a time is changed in our recipe, fine-tuned for 40 epochs."""
    pruning = find_recipe(recipe).pruning
    lift = pruning.finetune.but(epochs=pruning.retrain_epochs or CONTROL_EPOCHS)
    again = Training(schedule=lift, learning=pruning.learning, evaluate="phases")
    lifted = Step(name="lifted", settings=again, weights_of="baseline")
    # As many epochs as the Tock and fine-tuning of a pruned network have together.
    as_long = again.but(epochs=pruning.tocks.epochs + CONTROL_EPOCHS)
    whole = Step(name="whole", settings=as_long, weights_of="lifted")
    arms: list[Step] = []
    for percent in PERCENTS.get(find_recipe(recipe).network, (40,)):
        arms += _arms(pruning, percent)
        arms.append(Step(name=f"scratch-{percent}", settings=as_long, shape_of=f"reference-{percent}"))
        teacher = "lifted" if pruning.learning.distill else None
        arms.append(Step(name=f"narrow-{percent}", settings=as_long, narrow_to=percent / 100, teacher=teacher))
    steps = (baseline(recipe), lifted, whole, *arms)
    return Experiment(recipe=recipe, steps=steps, report="controlled", shared=("baseline", "lifted"))


@experiment
def photographs(recipe: str = "mobilenetv2-cub200") -> Experiment:
    """From ImageNet to few photographs: scores over MACs and filters, and fine-tuned at 50 and 30% of the MACs."""
    pruning = find_recipe(recipe).pruning
    # As in the paper, but for the lengths.
    tuned = {"finetune_shape": "triangle", "finetune_lr": 1e-2, "finetune_lr_low": 1e-3}
    plain = pruning.but(repair=0, distill=0.0, rank="score", **tuned)
    curve = plain.but(keep_filters=0.2, multiple_of=1, finetune_epochs=0, evaluate="always")
    more = pruning.finetune.but(epochs=pruning.finetune.epochs + LONGEST * pruning.tocks.epochs)
    again = Training(schedule=more, learning=pruning.learning, evaluate="phases")
    steps = [
        baseline(recipe),
        *_tuned(pruning, "taylor"),
        Step(name="whole", settings=again, weights_of="baseline"),
        *(Step(name=f"{CURVE}{score}", settings=curve.but(score=score), weights_of="baseline") for score in SCORES),
        *_tuned(plain, "plain"),
    ]
    for score in SCORES[1:]:
        steps += _tuned(pruning.but(score=score), score)
    return Experiment(recipe=recipe, steps=tuple(steps), report="photographed", shared=("baseline",))


@experiment
def unlabelled(recipe: str = "mobilenetv2-photographs") -> Experiment:
    """A trained network and few images without labels: cut at once, repaired in small steps, and then distilled."""
    untrained = find_recipe(recipe).pruning.without_training()
    small = untrained.but(
        multiple_of=1, score="measured", tick_removes=1.0, tick_step=0.1, tick_images=1000, repair=1000
    )
    at_once = small.but(tick_step=1.0, repair=0, score="taylor")
    # With few images weights change little, and batch norms keep what they have learned from many.
    teaching = {"distill": 1.0, "distill_temperature": 2.0, "distill_features": 5.0, "fixed_statistics": True}
    distilled = Training.of(epochs=500, lr=1e-4, lr_low=0.0, shape="warmup", **teaching)
    distilled = distilled.but(optimizer="adamw", evaluate="phases")
    steps, before = [baseline(recipe)], None
    for percent in (90, 80, 70, 60, 50):
        repaired, budget = f"repaired-{percent}", {"keep_macs": percent / 100}
        steps += [
            Step(name=f"cut-{percent}", settings=at_once.but(**budget), weights_of="baseline"),
            Step(name=repaired, settings=small.but(**budget), weights_of="baseline", continue_from=before),
            Step(name=f"distilled-{percent}", settings=distilled, weights_of=repaired),
        ]
        before = repaired
    return Experiment(recipe=recipe, steps=tuple(steps), report="untrained", shared=("baseline",), no_labels=True)


@experiment
def segmentation(recipe: str = "fcn32s-voc") -> Experiment:
    """Appendix C: FCN-32s without 27% of its MACs, and half of them; mean IoU, and pictures of what networks predict.

    Beside them stands the whole network, trained for as many epochs as a Tock and fine-tuning have together.
    """
    if not find_dataset(find_recipe(recipe).data).maps:
        got = f"one for every image in {recipe}"
        raise InvalidSetting("this experiment is about segmentation", got=got, wanted="a label for every pixel")
    pruning = find_recipe(recipe).pruning
    longer = pruning.finetune.but(epochs=pruning.tocks.epochs + pruning.finetune.epochs)
    again = Training(schedule=longer, learning=pruning.learning, evaluate=pruning.evaluate)
    whole = Step(name="whole", settings=again, weights_of="baseline")
    steps = (baseline(recipe), whole, *pruned(recipe, {"pruned": 0.73, "half": 0.5}))
    return Experiment(recipe=recipe, steps=steps, report="pictures")


def _tuned(pruning: TickTock, name: str) -> list[Step]:
    """To each percentage of the MACs, from where the one before has come to."""
    steps, before = list[Step](), None
    for percent in LEFT:
        settings = pruning.but(keep_macs=percent / 100)
        steps.append(Step(name=f"{name}-{percent}", settings=settings, weights_of="baseline", continue_from=before))
        before = steps[-1].name
    return steps


def _arms(pruning: TickTock, percent: int) -> list[Step]:
    """Our recipe with one change each, to that percentage of the MACs."""
    reference = pruning.but(
        keep_macs=percent / 100,
        retrain_epochs=0,
        tock_every=NEVER_AGAIN,
        finetune_epochs=CONTROL_EPOCHS,
        repair=512,
        evaluate="phases",
    )
    changes: dict[str, dict[str, Any]] = {
        "reference": {},
        **{score: {"score": score} for score in ("slim", "pcnn", "l1", "random")},
        "one-shot": {"tick_removes": 1.0},
        "tick-only": {"tock_first": False, "tock_every": 0},
        # Three Tocks of five epochs: as many epochs in all.
        "tick-tock": {"tock_first": False, "tock_every": 3, "tock_epochs": 5, "finetune_epochs": CONTROL_EPOCHS - 5},
        "no-repair": {"repair": 0},
        "no-distillation": {"distill": 0.0},
    }
    steps = [
        Step(name=f"{name}-{percent}", settings=reference.but(**values), weights_of="lifted")
        for name, values in changes.items()
    ]
    steps.append(Step(name=f"no-squares-{percent}", settings=reference, weights_of="lifted", erase=0))
    steps.append(Step(name=f"not-lifted-{percent}", settings=reference, weights_of="baseline"))
    return steps


def baseline(recipe: str) -> Step:
    return Step(name="baseline", settings=find_recipe(recipe).training)


def pruned(recipe: str, shares: dict[str, float]) -> tuple[Step, ...]:
    """To these shares of the MACs, each continued from the one before."""
    pruning, before = find_recipe(recipe).pruning, [None, *shares]
    return tuple(
        Step(name=name, settings=pruning.but(keep_macs=share), weights_of="baseline", continue_from=last)
        for (name, share), last in zip(shares.items(), before, strict=False)
    )


def resnet50_steps(recipe: str) -> tuple[Step, ...]:
    return baseline(recipe), *pruned(recipe, {"GBN-60": 0.5946, "GBN-50": 0.4494})


def schedules(recipe: str, share: int) -> list[Step]:
    """The three schedules to that percentage of the MACs; those with many Ticks continue from 20 percent more."""
    pruning = find_recipe(recipe).pruning.but(keep_macs=share / 100)
    one_shot = pruning.but(tick_removes=1.0, tock_every=0)
    steps = [Step(name=f"one-shot-{share}", settings=one_shot, weights_of="baseline")]
    for name, settings in (("tick-only", pruning.but(tock_every=0)), ("tick-tock", pruning)):
        before = f"{name}-{share + 20}"
        steps.append(Step(name=f"{name}-{share}", settings=settings, weights_of="baseline", continue_from=before))
    return steps


def scratch(recipe: str, step: str) -> Step:
    """The shape of a step's result from random weights."""
    return Step(name=f"{step}-scratch", settings=doubled(find_recipe(recipe).training), shape_of=step)


def doubled(training: Training) -> Training:
    """For twice as many epochs, as the paper trains networks from random weights that pruned ones are compared with."""
    return training.but(epochs=2 * training.schedule.epochs)
