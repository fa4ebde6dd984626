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

from secateur.errors import InvalidExample, InvalidModel, MissingExtra, UnknownName, unknown_name
from secateur.extras import import_extra
from secateur.models import fcn, resnet_cifar, vgg_cifar

BUILT_IN: dict[str, Callable[..., nn.Module]] = {
    "resnet14": resnet_cifar.resnet14,
    "resnet20": resnet_cifar.resnet20,
    "resnet32": resnet_cifar.resnet32,
    "resnet44": resnet_cifar.resnet44,
    "resnet56": resnet_cifar.resnet56,
    "resnet110": resnet_cifar.resnet110,
    "vgg16_m": vgg_cifar.CifarVgg,
    "fcn32s": fcn.Fcn32s,
}


def find_model(name: str, **kwargs: Any) -> nn.Module:
    """The network of that name with random weights; nothing is ever downloaded.

    `name` is a built-in network, `torchvision:NAME`, `timm:NAME` or `package.module:callable`; `kwargs` go to
    whatever builds it.

    >>> find_model("resnet20", num_classes=100).fc.out_features
    100
    """
    model = build_named(name, **kwargs)
    if not isinstance(model, nn.Module):
        raise InvalidModel(f"{name} must return a torch.nn.Module, got {type(model).__name__}")
    return model


def build_named(name: str, **kwargs: Any) -> Any:
    """What the builder of that name returns; of the user's own code that may be anything."""
    builder = find_builder(name)
    try:
        with warnings.catch_warnings():
            # Of torchvision's GoogLeNet and Inception; random weights are what is asked for here.
            warnings.filterwarnings("ignore", message="The default weight initialization")
            return builder(**kwargs)
    except Exception as error:  # the builder may be anyone's code
        raise InvalidModel(f"building {name} raised {type(error).__name__}: {error}") from error


def find_subject(name: str) -> tuple[nn.Module, Any]:
    """The network of that name; of a callable that returns a job, the job's network and its example, else None."""
    return network_of(build_named(name), name)


def network_of(made: Any, name: str) -> tuple[nn.Module, Any]:
    """The network that was made, without an example; or those of the job that was made."""
    if isinstance(made, nn.Module):
        return made, None
    if not isinstance(getattr(made, "model", None), nn.Module):
        raise InvalidModel(f"{name} must return a torch.nn.Module or a secateur.Job, got {type(made).__name__}")
    return made.model, made.example


def is_known(name: str) -> bool:
    """Whether the name is of a network that comes with Secateur, torchvision or timm, and not of anybody's code."""
    return name in BUILT_IN or name.startswith(("torchvision:", "timm:"))


def example_for(model: nn.Module, shape: tuple[int, ...] | None = None) -> Tensor | tuple[list[Tensor]]:
    """A random input of that shape, as the model wants it; without a shape, of the size the model names as its own.

    Detectors of torchvision take a list of images, so theirs is `([image, ...],)`.
    """
    example = torch.randn(shape or (1, *_input_size(model)))
    if not _is_detector(model):
        return example
    if example.dim() != 4:
        raise InvalidExample(f"a detector takes images of shape NxCxHxW, got {'x'.join(map(str, example.shape))}")
    return (list(example.unbind()),)


def knows_its_input(model: nn.Module) -> bool:
    """Whether the model names a size of images as its own."""
    return _own_size(model) is not None


def _input_size(model: nn.Module) -> tuple[int, ...]:
    return _own_size(model) or (3, 224, 224)


def _own_size(model: nn.Module) -> tuple[int, ...] | None:
    config = getattr(model, "default_cfg", None) or {}  # timm's record of a network
    return getattr(model, "input_size", None) or config.get("input_size")


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
        with suppress(UnknownName, MissingExtra):
            find(name)
            elsewhere.append(f"{source}:{name}")
    if elsewhere:
        raise UnknownName(f"there is no built-in network {name!r}; did you mean {' or '.join(elsewhere)}?")
    raise unknown_name("built-in network", name, list(BUILT_IN))


def _find_in_torchvision(name: str) -> Callable[..., nn.Module]:
    models = import_extra("torchvision", "vision").models
    known = models.list_models()
    if name not in known:
        raise unknown_name("torchvision network", name, known)
    builder = models.get_model_builder(name)
    # Detection and segmentation download the backbone's weights unless told not to.
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
        raise UnknownName(f"'{module_name}:{attribute}' names no callable of a module, as package.module:callable does")
    if module_name.endswith(".py") or "/" in module_name:
        file = Path(module_name).with_suffix("")
        from_there = f"{file.name}:{attribute}, from the folder that holds it (cd {file.parent})"
        if not file.is_absolute() and ".." not in file.parts:
            from_here = f"{'.'.join(file.parts)}:{attribute}"
            from_there = f"{from_here}, or {from_there}" if len(file.parts) > 1 else from_here
        raise UnknownName(f"{module_name} is a file: name the module, {from_there}")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's code raises when it is imported
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module_name}.".startswith(f"{missing}."):
            raise UnknownName(
                f"there is no module {module_name!r}; run from the folder that holds it, or install its package"
            ) from error
        raise InvalidModel(f"{module_name} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(getattr(module, attribute, None)):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise unknown_name(f"callable in {module_name}", attribute, known)
    return getattr(module, attribute)
