"""Export a network as ONNX, an exported program, TorchScript or weights, and check what was written."""

from __future__ import annotations

import inspect
import io
import logging
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import BatchNorm1d, BatchNorm2d, BatchNorm3d
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten_with_path

from secateur.channels.example import Example, tensors_within
from secateur.channels.gaps import gaps_between
from secateur.channels.shrink import copy_model
from secateur.errors import InvalidModel, NotEquivalent, SecateurError
from secateur.extras import import_extra
from secateur.files import write_atomic, write_tensors
from secateur.modes import evaluating

BATCHES = (1, 3)
"""Sizes of the batches on which what was written is compared with the network."""
TOLERANCE = 1e-3
"""The largest difference, as a share of the largest output, that counts as rounding in single precision."""


def export_onnx(model: nn.Module, example: Any, path: str | Path, metadata: Mapping[str, str] | None = None) -> float:
    """Write ONNX for batches of any size, run it in onnxruntime, and return the largest difference.

    metadata: text by name for the file, such as the `metadata` of what `secateur.results.load.about` returns.
    """
    import_extra("onnxscript", "export")
    import_extra("onnxruntime", "export")
    call = Example.of(example)
    with evaluating(model):
        output = call(model)

    def fill(target: Path) -> None:
        with quiet():
            program = torch.onnx.export(
                model,
                call.batch(2).args,  # one would be taken for a constant
                kwargs=call.batch(2).kwargs,
                dynamo=True,
                dynamic_shapes=_any_batch(call),
                input_names=["input"] if len(call.tensors) == 1 else None,
                output_names=_names_of(output, model),
                verbose=False,
            )
            assert program is not None
            program.model.metadata_props.update(metadata or {})
            program.save(str(target), external_data=False)

    return write_checked("ONNX", model, call, path, fill, open_onnx)


def open_onnx(path: Path) -> Callable[[Example], list[Tensor]]:
    """The network in an ONNX file, run by onnxruntime on the CPU with as many threads as torch."""
    runtime = import_extra("onnxruntime", "export")
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = torch.get_num_threads()
    # Threads that spin while they wait would take the cores from the network whose turn is next.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda call: [torch.from_numpy(array) for array in session.run(None, feed(input_names(session), call))]


def _names_of(output: Any, model: nn.Module) -> list[str] | None:
    """Names of outputs: the keys of dicts, joined by dots where they are nested, unless inputs have the same names."""
    if isinstance(output, Tensor):
        return ["output"]
    if not isinstance(output, Mapping):
        return None
    leaves, _ = tree_flatten_with_path(output)
    names = [".".join(map(_name_of, path)) for path, leaf in leaves if isinstance(leaf, Tensor)]
    taken = {"input", *inspect.signature(model.forward).parameters}
    return names if len(set(names)) == len(names) and taken.isdisjoint(names) else None


def _name_of(key: Any) -> str:
    """One part of the path to an output: a key, an index or an attribute."""
    return str(next(getattr(key, kind) for kind in ("key", "idx", "name") if hasattr(key, kind)))


def feed(names: Sequence[str], call: Example) -> dict[str, Any]:
    """The arguments as arrays, under the names that a runtime gives its inputs."""
    named = call.kwargs if set(call.kwargs) == set(names) else dict(zip(names, call.tensors, strict=True))
    return {name: tensor.numpy() for name, tensor in named.items()}


def input_names(session: Any) -> list[str]:
    """What an onnxruntime session calls its inputs."""
    return [given.name for given in session.get_inputs()]


def _any_batch(call: Example) -> Any:
    """Axes of variable size: the first of every tensor that is as long there as the first tensor."""
    size = call.tensors[0].shape[:1]
    axes = {0: torch.export.Dim("batch")}

    def of(value: Any) -> Any:
        return axes if isinstance(value, Tensor) and value.dim() and value.shape[:1] == size else None

    return {name: of(value) for name, value in call.kwargs.items()} or tuple(of(value) for value in call.args)


@contextmanager
def quiet() -> Iterator[None]:
    """Without warnings and log messages of the exporter."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def export_program(model: nn.Module, example: Any, path: str | Path) -> float:
    """Write an exported program for `torch.export.load`, for batches of any size, without code of ours."""
    call = Example.of(example)

    def fill(target: Path) -> None:
        two = call.batch(2)
        with quiet():
            program = torch.export.export(model, two.args, two.kwargs, dynamic_shapes=_any_batch(call))
        write_buffered(target, lambda buffer: torch.export.save(program, buffer))

    def read(target: Path) -> Callable[[Example], Any]:
        with quiet(), target.open("rb") as file:
            program = torch.export.load(file).module()
        return lambda call: call(program)

    return write_checked("an exported program", model, call, path, fill, read)


def export_torchscript(model: nn.Module, example: Any, path: str | Path) -> float:
    """Write TorchScript for `torch.jit.load`: the operations that ran for the example."""
    call = Example.of(example)

    def fill(target: Path) -> None:
        traced = torch.jit.trace(model, call.args or None, example_kwarg_inputs=call.kwargs or None, strict=False)
        write_buffered(target, lambda buffer: torch.jit.save(traced, buffer))

    def read(target: Path) -> Callable[[Example], Any]:
        program = torch.jit.load(str(target))
        return lambda call: call(program)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch prefers torch.export by now
        return write_checked("TorchScript", model, call, path, fill, read)


def export_weights(model: nn.Module, path: str | Path) -> None:
    """Write the state dict: .safetensors, or torch's own format under any other name."""
    if Path(path).suffix == ".safetensors":
        write_tensors(path, model.state_dict())
    else:
        write_atomic(path, lambda target: write_buffered(target, lambda buffer: torch.save(model.state_dict(), buffer)))


def write_buffered(target: Path, save: Callable[[io.BytesIO], object]) -> None:
    """Write what torch saves; its own writers do not say that a disk is full."""
    buffer = io.BytesIO()
    save(buffer)
    target.write_bytes(buffer.getbuffer())


def fold_batchnorm(model: nn.Module, example: Any) -> tuple[nn.Module, int]:
    """A copy without the batch norms that directly follow a convolution, and their number.

    They are found by running the network. The copy is compared with the network.
    """
    model = copy_model(model).eval()
    folded = copy_model(model)
    pairs = _pairs(folded, example)
    for convolution, norm in pairs.items():
        layer: Any = folded.get_submodule(convolution)
        fused = fuse_conv_bn_eval(layer, folded.get_submodule(norm), transpose=isinstance(layer, _ConvTransposeNd))  # pyright: ignore
        folded.set_submodule(convolution, fused)
        folded.set_submodule(norm, nn.Identity())
    _compare(model, Example.of(example), lambda call: call(folded))
    return folded, len(pairs)


def _pairs(model: nn.Module, example: Any) -> dict[str, str]:
    """The batch norm after a convolution, if both run once and nothing else reads the weight or the tensor between."""
    made: dict[int, list[str]] = {}
    taken: dict[int, list[str]] = {}
    runs: dict[str, int] = {}
    alive: list[Tensor] = []  # an address must not be given out twice

    def watch(name: str) -> Callable[..., None]:
        def look(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
            runs[name] = runs.get(name, 0) + 1
            given, *_ = *args, *named.values()
            alive.extend([given, output])
            if isinstance(module, _ConvNd):
                made.setdefault(id(output), []).append(name)
            else:
                taken.setdefault(id(given), []).append(name)

        return look

    kinds = (BatchNorm1d, BatchNorm2d, BatchNorm3d)
    watched = [(name, module) for name, module in model.named_modules() if isinstance(module, (_ConvNd, *kinds))]
    handles = [
        module.register_forward_hook(watch(name), with_kwargs=True)
        for name, module in watched
        if not _is_special(module)
    ]
    readers = Readers()
    try:
        with torch.no_grad(), readers:
            given_back = {id(tensor) for tensor in tensors_within(Example.of(example)(model))}
    finally:
        for handle in handles:
            handle.remove()
    return {
        made[key][0]: taken[key][0]
        for key in made
        if key in taken and key not in given_back
        if readers.count[key] == 1 and runs[made[key][0]] == runs[taken[key][0]] == 1
        if readers.count[id(model.get_submodule(made[key][0]).weight)] == 1
    }


class Readers(TorchFunctionMode):
    """Counts the calls of torch's functions with each tensor; those that return its size do not count."""

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
    """Whether it does more than torch's own layer, or cannot be folded by torch."""
    foreign = type(module).__module__.partition(".")[0] != "torch"
    hooked = bool(module._forward_hooks or module._forward_pre_hooks)
    in_groups = isinstance(module, _ConvTransposeNd) and module.groups > 1
    return foreign or hooked or in_groups or is_parametrized(module) or getattr(module, "running_mean", 0) is None


def _numbers(output: Any) -> list[Tensor]:
    """The tensors of an output in order, in double precision."""
    return [tensor.double() for tensor in tensors_within(output)]


def write_checked(
    kind: str,
    model: nn.Module,
    call: Example,
    path: str | Path,
    fill: Callable[[Path], object],
    read: Callable[[Path], Callable[[Example], Any]],
) -> float:
    """Write the network, read it back, and return the largest difference; a file that is wrong does not appear."""
    differences: list[float] = []
    write_atomic(path, lambda target: differences.append(fill_checked(kind, model, call, target, fill, read)))
    return differences[0]


def fill_checked(
    kind: str,
    model: nn.Module,
    call: Example,
    target: Path,
    fill: Callable[[Path], object],
    read: Callable[[Path], Callable[[Example], Any]],
) -> float:
    """Write the network to a temporary file or folder, read it back, and return the largest difference."""
    try:
        with evaluating(model):
            fill(target)
        return _compare(model, call, read(target))
    except (OSError, SecateurError):
        raise
    except Exception as error:  # exporters raise errors of many types
        text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip()
        reason = text.splitlines()[0] if text else type(error).__name__
        raise InvalidModel(f"{type(model).__name__} cannot be written as {kind}", got=reason) from error


def _compare(model: nn.Module, call: Example, other: Callable[[Example], Any]) -> float:
    """The largest difference on random inputs, as a share of the largest output; raises above rounding."""
    worst = 0.0
    generator = torch.Generator().manual_seed(0)
    for size in BATCHES:
        batch = call.batch(size, generator)
        with evaluating(model):
            wanted, found = _numbers(batch(model)), _numbers(other(batch))
        gaps = gaps_between(wanted, found)
        if gaps is None:
            shapes = [" and ".join(str(tuple(tensor.shape)) for tensor in each) for each in (found, wanted)]
            raise NotEquivalent("what was written gives another shape", got=shapes[0], wanted=shapes[1])
        worst = max([worst, *(gap.relative for gap in gaps)])
    if not worst <= TOLERANCE:
        got = f"{worst:.1e} of the largest output"
        raise NotEquivalent("what was written differs from the network", got=got, wanted=f"{TOLERANCE:.0e} at most")
    return worst
