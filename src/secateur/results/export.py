"""A network for other programs: ONNX, torch's exported programs, TorchScript, plain weights; checked once written."""

from __future__ import annotations

import logging
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.modules.batchnorm import BatchNorm1d, BatchNorm2d, BatchNorm3d
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.overrides import TorchFunctionMode

from secateur.channels.example import tensors_within
from secateur.channels.shrink import copy_model
from secateur.errors import CannotExport, NotEquivalent, SecateurError
from secateur.extras import import_extra
from secateur.results.atomic import write
from secateur.results.load import tensors_of
from secateur.training.task import evaluating
from secateur.words import counted

BATCHES = (1, 3)
"""Sizes of batches on which what was written is compared with the network."""
TOLERANCE = 1e-3
"""Largest difference, as a share of the largest output, that passes for rounding in single precision."""


def export_onnx(model: nn.Module, example: Tensor, path: str | Path) -> float:
    """Write ONNX with a batch of any size, run it in onnxruntime, and give its largest difference."""
    import_extra("onnxscript", "export")
    runtime = import_extra("onnxruntime", "export")
    with evaluating(model):
        output = model(example)

    def fill(target: Path) -> None:
        with _quiet():
            torch.onnx.export(
                model,
                (_pair(example),),
                str(target),
                dynamo=True,
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                input_names=["input"],
                output_names=["output"] if isinstance(output, Tensor) else None,
                external_data=False,
                verbose=False,
            )

    def read(target: Path) -> Callable[[Tensor], list[Tensor]]:
        options = runtime.SessionOptions()
        options.log_severity_level = 3
        session = runtime.InferenceSession(str(target), options, providers=["CPUExecutionProvider"])
        return lambda images: [torch.from_numpy(array) for array in session.run(None, {"input": images.numpy()})]

    return _write("ONNX", model, example, path, fill, read)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the exporter says about itself, and about packages that the network does not need."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def export_program(model: nn.Module, example: Tensor, path: str | Path) -> float:
    """Write what `torch.export.load` reads, without any code of ours, with a batch of any size."""
    shapes = ({0: torch.export.Dim("batch")},)

    def fill(target: Path) -> None:
        with _quiet():
            program = torch.export.export(model, (_pair(example),), dynamic_shapes=shapes)
        with target.open("wb") as file:
            torch.export.save(program, file)

    def read(target: Path) -> Callable[[Tensor], Any]:
        with target.open("rb") as file:
            return torch.export.load(file).module()

    return _write("an exported program", model, example, path, fill, read)


def export_torchscript(model: nn.Module, example: Tensor, path: str | Path) -> float:
    """Write what `torch.jit.load` reads: the operations that ran for the example."""

    def fill(target: Path) -> None:
        torch.jit.save(torch.jit.trace(model, example), str(target))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch prefers torch.export by now
        return _write("TorchScript", model, example, path, fill, lambda target: torch.jit.load(str(target)))


def export_weights(model: nn.Module, path: str | Path) -> None:
    """Write the state dict: .safetensors, or torch's own format under any other name."""
    if Path(path).suffix == ".safetensors":
        tensors = {name: tensor.detach().clone().contiguous() for name, tensor in tensors_of(model).items()}
        write(path, lambda target: save_file(tensors, str(target)))
    else:
        write(path, lambda target: torch.save(model.state_dict(), target))


def fold_batchnorm(model: nn.Module, example: Tensor) -> tuple[nn.Module, int]:
    """A copy without those batch norms that follow a convolution directly, and how many they were.

    Which follow is seen by running the network; the copy is compared with it.
    """
    model = copy_model(model).eval()
    folded = copy_model(model)
    pairs = _pairs(folded, example)
    for convolution, norm in pairs.items():
        layer: Any = folded.get_submodule(convolution)
        fused = fuse_conv_bn_eval(layer, folded.get_submodule(norm), transpose=isinstance(layer, _ConvTransposeNd))  # pyright: ignore
        folded.set_submodule(convolution, fused)
        folded.set_submodule(norm, nn.Identity())
    _compare(model, example, folded)
    return folded, len(pairs)


def _pairs(model: nn.Module, example: Tensor) -> dict[str, str]:
    """The batch norm behind each convolution, where both run once and nothing else reads what is between them."""
    made: dict[int, list[str]] = {}
    taken: dict[int, list[str]] = {}
    runs: dict[str, int] = {}
    alive: list[Tensor] = []  # an address must not be given out twice

    def watch(name: str) -> Callable[..., None]:
        def look(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            runs[name] = runs.get(name, 0) + 1
            alive.extend([args[0], output])
            if isinstance(module, _ConvNd):
                made.setdefault(id(output), []).append(name)
            else:
                taken.setdefault(id(args[0]), []).append(name)

        return look

    kinds = (BatchNorm1d, BatchNorm2d, BatchNorm3d)
    watched = [(name, module) for name, module in model.named_modules() if isinstance(module, (_ConvNd, *kinds))]
    handles = [module.register_forward_hook(watch(name)) for name, module in watched if not _is_special(module)]
    readers = Readers()
    try:
        with torch.no_grad(), readers:
            model(example)
    finally:
        for handle in handles:
            handle.remove()
    return {
        made[key][0]: taken[key][0]
        for key in made
        if key in taken and readers.count[key] == 1 and runs[made[key][0]] == runs[taken[key][0]] == 1
    }


class Readers(TorchFunctionMode):
    """Counts how many of torch's functions are given each tensor; those that ask for its size do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[int] = Counter()
        self.alive: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, (int, torch.Size, torch.dtype, torch.device, torch.layout)):
            given = tensors_within((args, kwargs or {}))
            self.alive += given
            self.count.update({id(tensor) for tensor in given})
        return result


def _is_special(module: nn.Module) -> bool:
    """Whether it does more than torch's own layer of its kind, or shares weights that folding would change."""
    return type(module).__module__.partition(".")[0] != "torch" or getattr(module, "running_mean", 0) is None


def _pair(example: Tensor) -> Tensor:
    """Two of the example: a batch of one would be taken for a constant."""
    return torch.cat([example[:1]] * 2)


def _numbers(output: Any) -> list[Tensor]:
    """The tensors of an output, in the order of its parts; what is not a fraction is compared as one."""
    return [tensor.double() for tensor in tensors_within(output)]


def _write(
    kind: str,
    model: nn.Module,
    example: Tensor,
    path: str | Path,
    fill: Callable[[Path], None],
    read: Callable[[Path], Callable[[Tensor], Any]],
) -> float:
    """Write the network, read it again, and give the largest difference; the file appears once it is found right."""
    differences: list[float] = []

    def attempt(target: Path) -> None:
        try:
            with evaluating(model):
                fill(target)
            differences.append(_compare(model, example, read(target)))
        except (OSError, SecateurError):
            raise
        except Exception as error:  # exporters fail in ways of their own
            text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip()
            reason = text.splitlines()[0] if text else type(error).__name__
            raise CannotExport(f"{type(model).__name__} cannot be written as {kind}: {reason}") from error

    write(path, attempt)
    return differences[0]


def _compare(model: nn.Module, example: Tensor, other: Callable[[Tensor], Any]) -> float:
    """The largest difference on random inputs, as a share of the largest output; raises if it is no rounding."""
    worst = 0.0
    generator = torch.Generator().manual_seed(0)
    for size in BATCHES:
        images = torch.randn((size, *example.shape[1:]), generator=generator).to(example)
        with evaluating(model):
            wanted, found = (_numbers(called(images)) for called in (model, other))
        if len(wanted) != len(found):
            raise NotEquivalent(
                f"what was written gives {counted(len(found), 'tensor')} where the network gives {len(wanted)}"
            )
        for one, two in zip(wanted, found, strict=True):
            worst = max(worst, float((one - two).abs().max() / one.abs().max().clamp_min(1e-12)))
    if not worst <= TOLERANCE:
        raise NotEquivalent(f"what was written differs from the network by {worst:.1e} of its largest output")
    return worst
