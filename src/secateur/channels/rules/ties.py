"""Operators that act element by element: what meets at an index goes together.

Whether zero stays zero is not looked up but computed: the operator itself is run on samples in which the removed
channel's inputs are zero and everything else is arbitrary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from secateur.channels.labels import any_alive, is_alive, with_alive
from secateur.channels.reasons import Kind
from secateur.channels.rules.call import UNIFORM, Axis, Call, all_alive, positive
from secateur.channels.rules.registry import rule

SAMPLES = [-40.0, -3.7, -1.0, -0.6, -0.01, 0.02, 0.4, 1.0, 2.9, 55.0]
_outcomes: dict[Any, str] = {}


# Torch tags most of these as pointwise, but not in every version.
@rule("relu", "relu_", "leaky_relu", "leaky_relu_", "elu", "elu_", "celu", "celu_", "selu", "selu_", "gelu", "gelu_")
@rule("silu", "silu_", "mish", "mish_", "sigmoid", "sigmoid_", "tanh", "tanh_", "softplus", "threshold", "threshold_")
@rule("hardtanh", "hardtanh_", "hardsigmoid", "hardsigmoid_", "hardswish", "hardswish_", "relu6", "relu6_")
@rule("hardshrink", "softshrink", "_prelu_kernel", "rrelu_with_noise", "dropout", "feature_dropout")
@rule("addcmul", "addcdiv", "masked_fill", "masked_fill_", "nan_to_num", "complex", "polar", "rsub")
@rule("log_sigmoid_forward", "floor_divide", "floor_divide_")
def pointwise(call: Call) -> None:
    """Tie what meets index by index; also serves every operator that torch tags as pointwise."""
    out = call.outputs[0]
    tensors = call.tensors
    known = [call.axes(tensor) for tensor in tensors]
    axes: list[Axis] = []
    for dim in range(out.dim()):
        met = [
            known[i][dim - offset] if dim >= offset and (tensor.shape[dim - offset] == out.shape[dim]) else UNIFORM
            for i, tensor in enumerate(tensors)
            for offset in [out.dim() - tensor.dim()]
        ]
        axes.append(tie_axis(call, tensors, met))
        filled = (t for t, axis in zip(tensors, met, strict=True) if axis is UNIFORM and t.dim() == out.dim())
        if isinstance(axes[-1], Tensor) and any(t.shape[dim] > 1 for t in filled):
            call.sized(axes[-1], around=True)
    zero = bool(tensors) and all(call.is_zero(t) for t in tensors) and outcome(call, [True] * len(tensors)) == "zero"
    for result in call.outputs:
        if result.shape == out.shape:
            call.put(result, list(axes), zero=zero)


def tie_axis(call: Call, tensors: list[Tensor], met: list[Axis]) -> Axis:
    """The axis of the result where these axes meet element by element."""
    # The result is known by the first: by one without zeros, if there is any, which tells how many there are.
    carried = sorted((axis for axis in met if isinstance(axis, Tensor)), key=call.has_zeros)
    if not carried:
        return None if any(axis is None for axis in met) else UNIFORM
    fixed = next((t for t, axis in zip(tensors, met, strict=True) if axis is None), None)
    if fixed is not None:
        for axis in carried:
            call.meet_fixed(axis, fixed)
        return None
    call.tie_all(carried)
    return set_alive(call, tensors, met, carried)


def set_alive(call: Call, tensors: list[Tensor], met: list[Axis], carried: list[Tensor]) -> Tensor:
    """The codes that result, with the bit that says which may be non-zero although their channel is gone."""
    codes = carried[0]
    if not any(any_alive(axis) for axis in carried):
        stays = _stays_zero(
            call, [isinstance(a, Tensor) or call.is_zero(t) for a, t in zip(met, tensors, strict=True)], codes
        )
        if not stays:
            call.wake(codes)
        return codes if stays else codes | 1
    gone = [
        ~is_alive(axis) if isinstance(axis, Tensor) else torch.full_like(codes, call.is_zero(t), dtype=torch.bool)
        for axis, t in zip(met, tensors, strict=True)
    ]
    patterns, which = torch.stack(gone).unique(dim=1, return_inverse=True)
    # Not tolist, which is watched, for the model's code may look at values by it.
    listed = [[bool(value) for value in pattern] for pattern in patterns.T]
    stays = torch.tensor(
        [_stays_zero(call, pattern, codes[which == i]) for i, pattern in enumerate(listed)], device="cpu"
    )
    return with_alive(codes, ~stays[which])


def _stays_zero(call: Call, gone: list[bool], codes: Tensor) -> bool:
    result = outcome(call, gone)
    if result == "undefined":
        call.freeze(codes, Kind.UNDEFINED)
    return result == "zero"


def outcome(call: Call, gone: list[bool]) -> str:
    """ "zero", "alive" or "undefined": the operator's value where these tensors are zero and others arbitrary."""
    if not any(gone):
        return "alive"
    key = (call.operator.func, tuple(gone), *(_kind(value) for value in (*call.args, *call.kwargs.items())))
    if key not in _outcomes:
        _outcomes[key] = _run_on_samples(call, gone)
    return _outcomes[key]


def _kind(value: Any) -> Any:
    """An argument as far as it matters for the outcome: tensors by type only."""
    if isinstance(value, Tensor):
        return value.dtype
    return tuple(_kind(item) for item in value) if isinstance(value, (list, tuple)) else str(value)


def _run_on_samples(call: Call, gone: list[bool]) -> str:
    samples = torch.tensor(SAMPLES, device="cpu")
    outcomes = {_run_on(call, gone, samples, zero) for zero in (0.0, -0.0)}
    # Also where the others are zero, for operators such as `x == y`; undefined values do not matter there.
    if outcomes == {"zero"} and _run_on(call, gone, torch.zeros(1), 0.0) == "alive":
        return "alive"
    return next(outcome for outcome in ("undefined", "alive", "zero") if outcome in outcomes)


def _run_on(call: Call, gone: list[bool], given: Tensor, zero: float) -> str:
    leaves, spec = tree_flatten((call.args, call.kwargs))
    flags = iter(gone)
    sampled = []
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            samples = given.roll(3 * position)
            values = torch.full_like(samples, zero) if next(flags) else samples
            sampled.append((values > 0) if leaf.dtype == torch.bool else values.to(leaf.dtype))
        else:
            sampled.append("cpu" if isinstance(leaf, torch.device) else leaf)
    args, kwargs = tree_unflatten(sampled, spec)
    try:
        results = [r for r in tree_flatten(call.operator.func(*args, **kwargs))[0] if isinstance(r, Tensor)]
    except (RuntimeError, TypeError, ValueError):
        return "undefined"
    values = torch.cat([(r.abs() if r.is_complex() else r).reshape(-1).double() for r in results])
    if not bool(values.isfinite().all()):
        return "undefined"
    return "alive" if bool((values != 0).any()) else "zero"


@rule("clone", "detach", "detach_", "alias", "_to_copy", "lift_fresh", "lift_fresh_copy", "lift", "contiguous")
@rule("_conj", "_neg_view", "alias_copy", "pin_memory", "requires_grad_")
@rule("fake_quantize_per_tensor_affine", "fake_quantize_per_tensor_affine_cachemask")
@rule("_fake_quantize_per_tensor_affine_cachemask_tensor_qparams")
def identity(call: Call) -> None:
    tensor = call.tensors[0]
    call.put_all(call.axes(tensor))
    if call.is_zero(tensor):
        call.put(call.outputs[0], call.axes(tensor), zero=True)


@rule("copy_", "copy")
def copy(call: Call) -> None:
    """The target takes over the source's values, and with them its channels; both have as many."""
    target, source = call["self"], call["src"]
    offset = target.dim() - source.dim()
    known, before = call.axes(source), call.axes(target)
    axes: list[Axis] = []
    for dim, size in enumerate(target.shape):
        given = known[dim - offset] if dim >= offset and source.shape[dim - offset] == size else UNIFORM
        old = before[dim]
        if isinstance(old, Tensor) and isinstance(given, Tensor):
            call.tie_all([given, old])
        elif isinstance(old, Tensor) and given is UNIFORM:
            given = with_alive(old, not call.is_zero(source))
        elif isinstance(old, Tensor):
            call.meet_fixed(old, source)
        axes.append(given)
    call.put(call.outputs[0], axes, zero=call.is_zero(source))


@rule("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like")
def like(call: Call) -> None:
    """A new tensor with the shape of another: its size follows, its values know no channels."""
    zero = call.name in ("zeros_like", "empty_like")
    call.put(call.out, all_alive(call.axes(call["self"]), not zero), zero=zero)


@rule("bernoulli")
def draw(call: Call) -> None:
    """Ones by the chance that each element is, so that zero stays zero; or, given `p`, noise of the same shape."""
    (like if call.has("p") else identity)(call)


@rule("zeros", "ones", "full", "new_zeros", "new_ones", "new_full", "empty", "new_empty", "scalar_tensor")
@rule("rand", "randn", "bernoulli_", "uniform_", "normal_", "fill_", "zero_", "random_", "exponential_")
def fill(call: Call) -> None:
    """Filled with one value or with noise: no index differs from another in kind."""
    value = next((call[name] for name in ("fill_value", "value", "s") if call.has(name)), None)
    # Uninitialised memory counts as zeros.
    zero = call.name in ("zeros", "new_zeros", "zero_", "empty", "new_empty")
    if isinstance(value, Tensor):
        zero = call.is_constant(value) and not bool(value)
    else:
        zero |= value == 0
    for other in call.tensors[1:]:
        call.freeze_axes(other, Kind.INDEXED)
    axes: list[Axis] = [UNIFORM] * call.out.dim()
    if call.operator.written:
        axes = all_alive(call.axes(call.out), not zero)
    call.put(call.out, axes, zero=zero)


@rule("native_dropout")
def dropout(call: Call) -> None:
    call.put_all(call.axes(call["input"]))


@rule("glu")
def glu(call: Call) -> None:
    """The two halves of an axis go together, the second through a sigmoid."""
    axes = call.axes(call["self"])
    dim = positive(call["dim"], len(axes))
    codes = axes[dim]
    if isinstance(codes, Tensor):
        half = codes.shape[0] // 2
        call.tie(codes[:half], codes[half:])
        axes[dim] = codes[:half]
    call.put(call.out, axes)


@rule("_local_scalar_dense", "is_nonzero", "equal")
def read(call: Call) -> None:
    """The value leaves the tensors: Python may decide anything by it."""
    for tensor in call.tensors:
        call.freeze_axes(tensor, Kind.READ_BY_PYTHON)
