"""Networks by name: built in, from torchvision, from timm, or from the user's own code."""

import importlib
import inspect
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateur.errors import InvalidModel, InvalidSetting, MissingExtra, unknown_name
from secateur.extras import import_extra
from secateur.models import deeplab, fcn, fcn_mobilenet, resnet_cifar, vgg_cifar
from secateur.models.resnet50_v1 import resnet50_v1

BUILT_IN: dict[str, Callable[..., nn.Module]] = {
    "resnet14": resnet_cifar.resnet14,
    "resnet20": resnet_cifar.resnet20,
    "resnet32": resnet_cifar.resnet32,
    "resnet44": resnet_cifar.resnet44,
    "resnet56": resnet_cifar.resnet56,
    "resnet110": resnet_cifar.resnet110,
    "vgg16_m": vgg_cifar.CifarVgg,
    "fcn32s": fcn.Fcn32s,
    "fcn_mobilenetv2": fcn_mobilenet.FcnMobileNet,
    "deeplab_mobilenetv2": deeplab.Deeplab,
    "resnet50_v1": resnet50_v1,
}


def find_model(name: str, **options: Any) -> nn.Module:
    """The network of that name with random weights; nothing is ever downloaded.

    `name` is a built-in network, `torchvision:NAME`, `timm:NAME` or `package.module:callable`; `options` go to
    whatever builds it.

    >>> find_model("resnet20", num_classes=100).fc.out_features
    100
    """
    return build_network(find_builder(name), name, **options)[0]


def build_network(builder: Any, name: str, **options: Any) -> tuple[nn.Module, Any]:
    """The network that a function makes, and None; of a function that makes a job, the job's network and example."""
    check_callable(builder, name, **options)
    try:
        with warnings.catch_warnings():
            # Of torchvision's GoogLeNet and Inception; random weights are what is asked for here.
            warnings.filterwarnings("ignore", message="The default weight initialization")
            made = builder(**options)
    except Exception as error:  # the builder may be anyone's code
        raise InvalidModel(f"building {name} raised {type(error).__name__}", got=error) from error
    if isinstance(made, nn.Module):
        return made, None
    if not isinstance(getattr(made, "model", None), nn.Module):
        wanted = "a torch.nn.Module or a secateur.Job"
        raise InvalidModel(f"{name} must return a network", got=type(made).__name__, wanted=wanted)
    return made.model, made.example


def check_callable(builder: Any, name: str, **options: Any) -> None:
    """Raise unless this is a function that can be called with these options, as far as its signature tells."""
    if not callable(builder) or isinstance(builder, nn.Module):
        wanted = "a function that makes the network"
        raise InvalidModel(f"{name} cannot be called", got=type(builder).__name__, wanted=wanted)
    try:
        inspect.signature(builder).bind(**options)
    except TypeError as error:
        given = ", ".join(options) or "no arguments"
        raise InvalidModel(f"{name} cannot be called with {given}", got=error) from error
    except ValueError:
        pass  # a function written in C may have no signature


def is_known(name: str) -> bool:
    """Whether the name is of a network that comes with Secateur, torchvision or timm, and not of anybody's code."""
    return name in BUILT_IN or is_of_library(name)


def is_of_library(name: str) -> bool:
    """Whether the name is of a network of torchvision or timm."""
    return name.startswith(("torchvision:", "timm:"))


def example_for(model: nn.Module, shape: tuple[int, ...] | None = None) -> Tensor | tuple[list[Tensor]]:
    """A random input of that shape, as the model wants it; without a shape, of the size the model names as its own.

    Detectors of torchvision take a list of images, so theirs is `([image, ...],)`.
    """
    example = torch.randn(shape or (1, *(input_size(model) or (3, 224, 224))))
    if not _is_detector(model):
        return example
    if example.dim() != 4:
        got = "x".join(map(str, example.shape))
        raise InvalidModel("the shape of the input is not one of images", got=got, wanted="NxCxHxW")
    return (list(example.unbind()),)


def input_size(model: nn.Module) -> tuple[int, ...] | None:
    """The size of images, without the batch, that the model names as its own."""
    config = getattr(model, "default_cfg", None) or {}  # timm's record of a network
    return getattr(model, "input_size", None) or config.get("input_size")


def normalization(model: nn.Module) -> dict[str, tuple[float, ...]]:
    """The mean and the deviation of colours that timm's record of a network names, if it has one."""
    config = getattr(model, "default_cfg", None) or {}
    found = {name: tuple(config.get(name) or ()) for name in ("mean", "std")}
    return found if all(len(numbers) == 3 for numbers in found.values()) else {}


def _is_detector(model: nn.Module) -> bool:
    return any(base.__module__.startswith("torchvision.models.detection") for base in type(model).__mro__)


def find_builder(name: str) -> Callable[..., nn.Module]:
    """What builds the network of that name."""
    source, colon, rest = name.partition(":")
    if not colon:
        return _find_built_in(name)
    if source == "torchvision":
        return _find_in_torchvision(rest)
    if source == "timm":
        return _find_in_timm(rest)
    return find_callable(source, rest)


def _find_built_in(name: str) -> Callable[..., nn.Module]:
    if name in BUILT_IN:
        return BUILT_IN[name]
    # A bare `resnet50` most likely means the one in a library.
    elsewhere = []
    for source, find in (("torchvision", _find_in_torchvision), ("timm", _find_in_timm)):
        with suppress(InvalidSetting, MissingExtra):
            find(name)
            elsewhere.append(f"{source}:{name}")
    if elsewhere:
        raise InvalidSetting(f"there is no built-in network {name!r}", remedy=f"Did you mean {' or '.join(elsewhere)}?")
    raise unknown_name("built-in network", name, list(BUILT_IN))


def _find_in_torchvision(name: str) -> Callable[..., nn.Module]:
    models = import_extra("torchvision", "vision").models
    known = models.list_models()
    if name not in known:
        raise unknown_name("torchvision network", name, known)
    builder = models.get_model_builder(name)
    # Detection and segmentation download the backbone's weights by default.
    parameters = inspect.signature(builder).parameters
    no_weights = {key: None for key in ("weights", "weights_backbone") if key in parameters}
    return partial(builder, **no_weights)


def _find_in_timm(name: str) -> Callable[..., nn.Module]:
    timm = import_extra("timm", "vision")
    if not timm.is_model(name):
        raise unknown_name("timm network", name, timm.list_models())
    return partial(timm.create_model, name, pretrained=False)


def find_callable(module_name: str, attribute: str) -> Callable[..., Any]:
    """What `package.module:callable` names."""
    if not module_name or not attribute:
        raise InvalidSetting(
            "a callable is named by its module", got=f"{module_name}:{attribute}", wanted="package.module:callable"
        )
    if module_name.endswith(".py") or "/" in module_name:
        file = Path(module_name).with_suffix("")
        names = [f"{file.name}:{attribute} from the folder {file.parent}"]
        if not file.is_absolute() and ".." not in file.parts:
            from_here = f"{'.'.join(file.parts)}:{attribute}"
            names = [from_here, *names] if len(file.parts) > 1 else [from_here]
        raise InvalidSetting(f"{module_name} is a file", wanted=f"its module, {' or '.join(names)}")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's code raises when it is imported
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module_name}.".startswith(f"{missing}."):
            remedy = "Run from the folder that holds it, or install its package"
            raise InvalidSetting(f"there is no module {module_name!r}", remedy=remedy) from error
        raise InvalidModel(f"importing {module_name} raised {type(error).__name__}", got=error) from error
    if not callable(getattr(module, attribute, None)):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise unknown_name(f"callable in {module_name}", attribute, known)
    return getattr(module, attribute)
