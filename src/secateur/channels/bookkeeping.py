"""What torch's own layers keep about the sizes of their tensors, so that it can follow a cut."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd


def sizes_of(module: nn.Module) -> dict[str, Any]:
    """The attributes of a torch layer, or one derived from it, that follow from the shapes of its tensors."""
    weight = _weight_of(module)
    match module:
        case nn.RNNBase():
            return _recurrent_sizes(module)
        case _NormBase():
            held = weight if weight is not None else module.running_mean
            return {"num_features": held.shape[0]} if isinstance(held, Tensor) else {}
        case _ if not isinstance(weight, Tensor):
            return {}
        case _ConvNd():
            grouped = weight.shape[0], weight.shape[1] * module.groups
            outer, inner = reversed(grouped) if isinstance(module, _ConvTransposeNd) else grouped
            return {"in_channels": inner, "out_channels": outer}
        case nn.Linear():
            return {"in_features": weight.shape[1], "out_features": weight.shape[0]}
        case nn.Bilinear():
            return {"out_features": weight.shape[0]}
        case nn.LayerNorm() | nn.RMSNorm():
            return {"normalized_shape": tuple(weight.shape)}
        case nn.GroupNorm():
            return {"num_channels": weight.shape[0]}
        case nn.PReLU():
            return {"num_parameters": weight.shape[0]}
        case nn.Embedding():
            return {"num_embeddings": weight.shape[0], "embedding_dim": weight.shape[1]}
        case _:
            return {}


def _weight_of(module: nn.Module) -> Tensor | None:
    """The weight, or the parameter of its shape that weight norm or another parametrisation computes it from."""
    # A computed weight is not read: that would run the computation.
    if isinstance(weight := module._parameters.get("weight", module._parameters.get("weight_v")), Tensor):
        return weight
    made = getattr(module, "parametrizations", {})
    held = made["weight"]._parameters if "weight" in made else {}
    return held.get("original1", held.get("original"))


def _recurrent_sizes(module: nn.RNNBase) -> dict[str, Any]:
    """A weight has one row per unit for each of the gates that this kind of layer has."""
    gates = {"LSTM": 4, "GRU": 3}.get(module.mode, 1)
    inner, outer = module._parameters.get("weight_ih_l0"), module._parameters.get("weight_hh_l0")
    if not isinstance(inner, Tensor) or not isinstance(outer, Tensor):
        return {}
    return {"input_size": inner.shape[1], "hidden_size": outer.shape[0] // gates}


def refresh(module: nn.Module) -> None:
    """Set the attributes that follow from the shapes of a layer's tensors."""
    for name, size in sizes_of(module).items():
        setattr(module, name, size)
