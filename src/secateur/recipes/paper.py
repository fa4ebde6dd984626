"""The networks of the paper on its datasets, with its settings; its authors' own where they differ; and ours.

A recipe is a function that returns all of it; its first line is what `secateur recipes` shows. Tables and figures, of
several runs each, are in `experiments`.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import getdoc
from typing import Any

from secateur.data.catalog import find_dataset
from secateur.errors import unknown_name
from secateur.recipes.recipe import Recipe, from_scratch, transfer
from secateur.runs.settings import TickTock

RECIPES: dict[str, Callable[[], Recipe]] = {}


def recipe(function: Callable[[], Recipe]) -> Callable[[], Recipe]:
    """Make a recipe known by its name."""
    name = function.__name__.replace("_", "-")
    if name in RECIPES:
        raise ValueError(f"there is a recipe {name} already")
    RECIPES[name] = function
    return function


def is_recipe(name: str) -> bool:
    """Whether `find_recipe` is to be asked; anything else is the user's own code, or a mistake."""
    return name in RECIPES or "@" in name


def find_recipe(name: str) -> Recipe:
    """The recipe of that name, or NETWORK@DATASET for any network on any dataset with the paper's CIFAR settings.

    A user's own photographs have the preset "quick".
    """
    if name in RECIPES:
        return RECIPES[name]()
    network, at, data = name.partition("@")
    if not at:
        raise unknown_name("recipe", name, list(RECIPES))
    recipe = Recipe(network=network, data=data, batch_size=find_dataset(data).batch_size, transfer=transfer())
    if data != "class_folders":
        return recipe
    # Networks with weights from elsewhere need smaller steps: see docs/presets.md.
    return recipe.but(pruning=TickTock.preset("quick", keep_macs=0.5, finetune_lr=3e-3))


def summary_of(function: Callable[..., object]) -> str:
    """The first line of what is said about a recipe or an experiment."""
    return (getdoc(function) or "").splitlines()[0]


def _as_published(**values: Any) -> TickTock:
    """Settings with which widths are as they come on every device, as in the paper."""
    return TickTock.of(multiple_of=1, **values)


@recipe
def digits() -> Recipe:
    """ResNet-14 on handwritten digits: a minute on two cores, nothing to download."""
    pruning = _as_published(
        keep_macs=0.4,
        tick_removes=0.04,
        tock_epochs=3,
        tock_lr=2e-2,
        finetune_epochs=15,
        finetune_lr=5e-2,
    )
    training = from_scratch().but(epochs=15, milestones=(0.6, 0.85), weight_decay=5e-4)
    return Recipe(
        network="resnet14",
        data="digits",
        training=training,
        pruning=pruning,
        batch_size=64,
    )


@recipe
def resnet56_cifar10() -> Recipe:
    """ResNet-56 on CIFAR-10 with the paper's settings (Table 1)."""
    return Recipe(network="resnet56", data="cifar10", pruning=_as_published(keep_macs=0.4, tick_removes=0.002))


@recipe
def resnet56_cifar10_authors() -> Recipe:
    """ResNet-56 on CIFAR-10 as the paper's authors ran it: weight decay 5e-4, shifts trained in Ticks, a Tock first.

    They fine-tuned for 50 epochs in batches of 64 without momentum. In batches of 128 with momentum 0.9, a fifth of
    their learning rates goes as far in an epoch.
    """
    recipe = authors(resnet56_cifar10())
    return recipe.but(pruning=recipe.pruning.but(finetune_epochs=50, finetune_lr=2e-3, finetune_lr_low=2e-4))


@recipe
def resnet56_cifar10_ours() -> Recipe:
    """ResNet-56 on CIFAR-10 with settings of our own: trained once more, then pruned and fine-tuned by distillation."""
    return ours(resnet56_cifar10())


@recipe
def resnet20_cifar10_ours() -> Recipe:
    """ResNet-20 on CIFAR-10 with settings of our own, which were chosen for ResNet-56."""
    return ours(Recipe(network="resnet20", data="cifar10", pruning=_as_published(keep_macs=0.4)))


@recipe
def vgg16m_cifar10() -> Recipe:
    """VGG-16-M on CIFAR-10 with the paper's settings."""
    return Recipe(network="vgg16_m", data="cifar10", pruning=_as_published(keep_macs=0.4))


@recipe
def vgg16m_cifar100() -> Recipe:
    """VGG-16-M on CIFAR-100 with the paper's settings (Table 3, no layer below 9 channels)."""
    pruning = _as_published(keep_macs=0.4, min_channels=9, min_ratio=0.0)
    return Recipe(network="vgg16_m", data="cifar100", pruning=pruning)


@recipe
def vgg16m_cifar100_authors() -> Recipe:
    """VGG-16-M on CIFAR-100 as the paper's authors ran it: weight decay 5e-4, shifts trained in Ticks, a Tock first."""
    return authors(vgg16m_cifar100())


@recipe
def vgg16m_cifar100_ours() -> Recipe:
    """VGG-16-M on CIFAR-100 with settings of our own, which were chosen for ResNet-56 on CIFAR-10."""
    return ours(vgg16m_cifar100())


@recipe
def mobilenetv2_photographs() -> Recipe:
    """MobileNet-v2 with ImageNet weights, on few photographs in class folders: see the experiment `unlabelled`."""
    return few_photographs("torchvision:mobilenet_v2")


@recipe
def resnet50_photographs() -> Recipe:
    """ResNet-50 with weights of Keras, on few photographs in class folders: see the experiment `unlabelled`."""
    return few_photographs("resnet50_v1")


@recipe
def resnet50_imagenet() -> Recipe:
    """ResNet-50 on ImageNet with the paper's settings (Table 2): 100 images of a class per Tick."""
    return Recipe(
        network="torchvision:resnet50",
        data="imagenet",
        training=from_scratch().but(epochs=90, milestones=(1 / 3, 2 / 3)),
        pruning=_as_published(
            keep_macs=0.6,
            tick_removes=0.002,
            tick_per_class=100,
            finetune_epochs=60,
            finetune_shape="steps",
            finetune_lr=0.01,
            finetune_lr_low=0.0,
        ),
        batch_size=256,
        top5=True,
    )


@recipe
def vgg16m_cub200() -> Recipe:
    """VGG-16-M on CUB-200 with the paper's settings (Figure GFIR), from ImageNet weights of torchvision's vgg16_bn."""
    return Recipe(
        network="vgg16_m",
        data="cub200",
        input_size=(3, 224, 224),
        training=from_scratch().but(epochs=90, lr=3e-3, milestones=(1 / 3, 2 / 3), divide=3.0),
        pruning=_as_published(keep_macs=0.4),
        batch_size=64,
    )


@recipe
def mobilenetv2_cub200() -> Recipe:
    """MobileNet-v2 on CUB-200 in class folders, 160 pixels a side, from ImageNet weights, with settings of our own."""
    return Recipe(
        network="torchvision:mobilenet_v2",
        data="class_folders",
        input_size=(3, 160, 160),
        training=transfer().but(epochs=40, lr=0.02, weight_decay=5e-4, evaluate="phases"),
        pruning=TickTock.of(
            keep_macs=0.5,
            tick_removes=0.08,
            tick_step=0.1,
            tick_data=0.2,
            rank="score_per_mac",
            rank_power=0.25,
            repair=512,
            tock_every=4,
            tock_epochs=2,
            weight_decay=5e-4,
            distill=0.9,
            finetune_epochs=40,
            finetune_shape="warmup",
            finetune_lr=0.02,
            finetune_lr_low=0.0,
            # Tocks are short: to capture new shapes before each takes longer than to train in full width.
            cut="end",
            evaluate="phases",
        ),
        batch_size=64,
        crop_area=0.3,
    )


@recipe
def fcn32s_voc() -> Recipe:
    """FCN-32s on PASCAL VOC 2011 with SBD, the paper's settings (Appendix C), from torchvision's vgg16.

    The loss is the sum over the pixels of one image, hence the learning rate. Momentum 0.99 and weight decay 5e-4 are
    those of wkentaro/pytorch-fcn, the code that the paper names. There, biases have twice the learning rate and no
    weight decay; here they are treated like everything else.
    """
    return Recipe(
        network="fcn32s",
        data="voc2011_sbd",
        training=from_scratch().but(epochs=11, lr=1e-10, milestones=(), momentum=0.99, weight_decay=5e-4),
        pruning=_as_published(
            keep_macs=0.73,
            tick_lr=1e-10,
            tock_lr=1e-10,
            tock_lr_low=1e-11,
            finetune_epochs=10,
            finetune_lr=1e-10,
            finetune_lr_low=1e-10,
            finetune_shape="constant",
            filter_scale="mean",
            momentum=0.99,
            weight_decay=5e-4,
        ),
        batch_size=1,
        summed=True,
    )


@recipe
def deeplab_mobilenetv2_camvid() -> Recipe:
    """DeepLabV3+ on MobileNet-v2 on CamVid with settings of our own, from ImageNet weights of torchvision's network."""
    return on_camvid("deeplab_mobilenetv2", lr=0.025)


@recipe
def fcn_mobilenetv2_camvid() -> Recipe:
    """A network without batch norm on CamVid, as FCN-32s is one, from MobileNet-v2 with folded batch norms.

    Without batch norm a step of the same length changes the function more, hence the smaller learning rates.
    """
    return on_camvid("fcn_mobilenetv2", lr=0.01)


def on_camvid(network: str, lr: float) -> Recipe:
    """A network with a trained backbone on CamVid, whose 367 images have to be shown in many sizes, for many epochs.

    A Tock comes first, and there is no other: how long a pruned network trains does not depend on the budget.
    """
    training = from_scratch().but(epochs=200, lr=lr, lr_low=0.0, shape="warmup", weight_decay=5e-4)
    pruning = _as_published(
        keep_macs=0.73,
        tick_removes=0.03,
        tock_first=True,
        tock_every=1000,
        tock_epochs=10,
        tock_lr=0.4 * lr,
        tock_lr_low=0.04 * lr,
        finetune_epochs=70,
        finetune_shape="warmup",
        finetune_lr=0.6 * lr,
        finetune_lr_low=0.0,
        rank="score_per_mac",
        rank_power=0.25,
        weight_decay=5e-4,
        distill=0.5,
        evaluate="phases",
    )
    return Recipe(
        network=network, data="camvid", training=training.but(evaluate="phases"), pruning=pruning, batch_size=16
    )


def few_photographs(network: str) -> Recipe:
    """A network of ImageNet on photographs of its classes, which are cut at random: down to a third of the area."""
    return find_recipe(f"{network}@class_folders").but(crop_area=0.35, top5=True)


def authors(recipe: Recipe) -> Recipe:
    """With the settings that the paper's authors ran where those differ from the paper."""
    pruning = recipe.pruning.but(weight_decay=5e-4, tick_shifts=True, tock_first=True)
    return recipe.but(pruning=pruning, training=recipe.training.but(weight_decay=5e-4))


def ours(recipe: Recipe) -> Recipe:
    """With what we found to be better for ResNet-56 on images held out of CIFAR-10."""
    pruning = recipe.pruning.but(
        tick_removes=0.04,
        tick_data=0.2,
        rank="score_per_mac",
        rank_power=0.25,
        tock_first=True,
        tock_lr=2e-2,
        tock_lr_low=2e-3,
        weight_decay=5e-4,
        distill=0.9,
        finetune_epochs=200,
        finetune_shape="warmup",
        finetune_lr=0.2,
        finetune_lr_low=0.0,
        retrain_epochs=80,
    )
    training = recipe.training.but(lr=0.2, weight_decay=5e-4)
    return recipe.but(pruning=pruning, training=training, batch_size=256, erase=8)
