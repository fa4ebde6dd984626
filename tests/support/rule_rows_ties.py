"""Rows for operators that act element by element, and for those that fill tensors."""

import torch
import torch.nn.functional as F
from rule_rows import (
    EIGHT,
    FIXED,
    HALVES,
    PYTHON,
    TIED,
    UNDEFINED,
    WOKEN,
    Row,
    calling,
    channels_last,
    coupled,
    each,
    frozen,
    gated,
    inferring,
    picked,
    side,
)
from sandwich import parameter

COMPOSITE = ("selu", "selu_", "relu6", "relu6_", "dropout", "feature_dropout")
"""Composite operators, which are seen in inference mode only."""
KEEPING: dict[str, tuple[float | bool, ...]] = {
    "relu relu_ leaky_relu leaky_relu_ elu elu_ celu celu_ selu selu_ gelu gelu_ silu silu_ mish mish_ tanh tanh_": (),
    "hardtanh hardtanh_ hardswish hardswish_ relu6 relu6_ hardshrink softshrink nan_to_num": (),
    "threshold threshold_": (0.1, 0.0),
    "floor_divide floor_divide_": (0.5,),
    "dropout feature_dropout": (0.5, False),
}
"""Functions that keep zero at zero, with their further arguments."""
WAKING = "sigmoid sigmoid_ softplus hardsigmoid hardsigmoid_"
"""Functions that do not."""
EVERYWHERE = torch.ones(2, 1, 6, 6, dtype=torch.bool)

POINTWISE = [
    *(Row(name, inferring(calling(name, *args)) if name in COMPOSITE else calling(name, *args))
      for names, args in KEEPING.items() for name in names.split()),
    *(Row(name, calling(name), frozen(WOKEN)) for name in WAKING.split()),
    *each(WAKING, lambda op: lambda m, x: x * op(x.clone()), note="gate"),
    *each("threshold threshold_", lambda op: lambda m, x: op(x, 0.1, 20.0), frozen(WOKEN), note="another value"),
    Row("hardtanh", calling("hardtanh", 0.1, 1.0), frozen(WOKEN), note="not around zero"),
    Row("log_sigmoid_forward", picked(calling("log_sigmoid_forward")), frozen(WOKEN)),
    Row("log_sigmoid_forward", gated(picked(calling("log_sigmoid_forward"))), note="gate"),
    Row("rsub", lambda m, x: torch.rsub(x, 1), frozen(WOKEN)),
    Row("rsub", lambda m, x: torch.rsub(x, m.side(x)), TIED, parts=side(), note="two"),
    Row("floor_divide", lambda m, x: torch.floor_divide(x, m.side(x)), frozen(UNDEFINED), parts=side(), note="zero"),
    Row("_prelu_kernel", lambda m, x: F.prelu(x, m.slope), coupled({"first": EIGHT, "slope": EIGHT}),
        parts={"slope": parameter(8)}),
    Row("_prelu_kernel", lambda m, x: F.prelu(x, m.slope), parts={"slope": parameter(1)}, note="one slope"),
    Row("rrelu_with_noise", lambda m, x: F.rrelu(x)),
    Row("addcmul", lambda m, x: torch.addcmul(x, m.side(x), x), TIED, parts=side()),
    Row("addcmul", lambda m, x: torch.addcmul(m.scale, x, x), coupled({"first": EIGHT, "scale": EIGHT}),
        parts={"scale": parameter(8, 1, 1)}, note="parameter"),
    Row("addcdiv", lambda m, x: torch.addcdiv(x, x, m.side(x)), frozen(UNDEFINED), parts=side()),
    Row("addcdiv", lambda m, x: torch.addcdiv(x, x, m.side(x).exp()), TIED, parts=side(), note="never zero"),
    Row("masked_fill", lambda m, x: x.masked_fill(m.side(x) > 0.1, 0.0), TIED, parts=side(), note="another's mask"),
    *each("masked_fill masked_fill_", lambda op: lambda m, x: op(x, x > 0.1, 0.0)),
    *each("masked_fill masked_fill_", lambda op: lambda m, x: op(x, EVERYWHERE, 1.0), frozen(WOKEN),
          note="another value"),
    Row("complex", lambda m, x: torch.complex(x, m.side(x)).abs(), TIED, parts=side()),
    Row("polar", lambda m, x: torch.polar(x, m.side(x)).abs(), TIED, parts=side()),
    Row("addcmul", lambda m, x: torch.addcmul(x, x, torch.arange(8.0).double()[:, None, None]), frozen(FIXED),
        note="constants"),
]  # fmt: skip

SAME = [
    *each("clone detach alias alias_copy _to_copy lift lift_fresh lift_fresh_copy", lambda op: lambda m, x: op(x)),
    Row("detach_", inferring(calling("detach_"))),
    Row("contiguous", inferring(channels_last(calling("contiguous")))),
    Row("pin_memory", inferring(calling("pin_memory"))),
    Row("requires_grad_", inferring(calling("requires_grad_", False))),
    Row("_conj", lambda m, x: torch.complex(x, m.side(x)).conj().abs(), TIED, parts=side()),
    Row("_neg_view", lambda m, x: torch.complex(x, m.side(x)).conj().imag.abs(), TIED, parts=side()),
    Row("fake_quantize_per_tensor_affine", inferring(calling("fake_quantize_per_tensor_affine", 0.1, 3, 0, 255))),
    Row("fake_quantize_per_tensor_affine_cachemask",
        picked(calling("fake_quantize_per_tensor_affine_cachemask", 0.1, 3, 0, 255))),
    Row("fake_quantize_per_tensor_affine_cachemask",
        gated(picked(calling("fake_quantize_per_tensor_affine_cachemask", 0.1, 3, 0, 255), 1)), note="mask"),
    Row("_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
        picked(lambda m, x: torch.ops.aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams(
            x, torch.tensor(0.1), torch.tensor(3, dtype=torch.int32), torch.tensor(1), 0, 255))),
    Row("copy_", lambda m, x: torch.empty_like(x).copy_(x)),
    Row("copy_", lambda m, x: x.clone().copy_(m.side(x)), TIED, parts=side(), note="another"),
    Row("copy", lambda m, x: torch.ops.aten.copy(x, m.side(x)), TIED, parts=side()),
    Row("native_dropout", lambda m, x: torch.native_dropout(x, 0.0, True)[0]),
    Row("glu", lambda m, x: F.glu(x, 1), coupled({"first": HALVES}), inner=4),
    Row("glu", lambda m, x: F.glu(x, 2), note="space"),
    Row("_local_scalar_dense", lambda m, x: x * x.sum().item()),
    Row("is_nonzero", inferring(lambda m, x: x if torch.is_nonzero(x.sum()) else -x)),
    Row("equal", lambda m, x: x if torch.equal(x, x.abs()) else -x, frozen(PYTHON)),
]  # fmt: skip

NOISE = "bernoulli_ uniform_ normal_ exponential_ random_"

FILLED = [
    Row("zeros_like", lambda m, x: x + torch.zeros_like(x)),
    Row("ones_like", lambda m, x: x + torch.ones_like(x), frozen(WOKEN)),
    Row("ones_like", lambda m, x: x * torch.ones_like(x), note="gate"),
    Row("full_like", lambda m, x: x + torch.full_like(x, 2), frozen(WOKEN)),
    Row("full_like", lambda m, x: x * torch.full_like(x, 2), note="gate"),
    Row("empty_like", lambda m, x: torch.empty_like(x).copy_(x)),
    Row("rand_like", lambda m, x: x + torch.rand_like(x), frozen(WOKEN)),
    Row("rand_like", lambda m, x: x * (torch.rand_like(x) < 2), note="gate"),
    Row("randn_like", lambda m, x: x + torch.randn_like(x), frozen(WOKEN)),
    Row("randn_like", lambda m, x: x * (torch.randn_like(x) < 99), note="gate"),
    Row("bernoulli", lambda m, x: torch.bernoulli((x != 0).double())),
    Row("bernoulli", lambda m, x: torch.bernoulli(x, 1.0), frozen(WOKEN), note="one chance"),
    Row("bernoulli", gated(lambda m, x: torch.bernoulli(x, 1.0)), note="gate"),
    *each(NOISE, lambda op: lambda m, x: op(x.clone()), frozen(WOKEN)),
    *each(NOISE, lambda op: lambda m, x: x * (op(x.clone()) >= -99), note="gate"),
    Row("empty", lambda m, x: torch.empty(x.shape, dtype=x.dtype).copy_(x)),
    Row("new_empty", lambda m, x: x.new_empty(x.shape).copy_(x)),
    Row("zero_", lambda m, x: x + x.clone().zero_()),
    Row("fill_", lambda m, x: x + x.clone().fill_(0)),
    Row("fill_", lambda m, x: x.clone().fill_(2), frozen(WOKEN), note="another value"),
    Row("fill_", lambda m, x: x + x.clone().fill_(torch.tensor(0.0)), note="tensor"),
    Row("fill_", gated(lambda m, x: x.clone().fill_(x.sum())), note="gate"),
    Row("zeros", lambda m, x: x + torch.zeros(x.shape)),
    *each("ones rand randn", lambda op: lambda m, x: x * (op(x.shape) < 99), note="gate"),
    *each("ones rand randn", lambda op: lambda m, x: x + op(x.shape), frozen(WOKEN)),
    Row("full", lambda m, x: x * torch.full(x.shape, 2.0), note="gate"),
    Row("full", lambda m, x: x + torch.full(x.shape, 2.0), frozen(WOKEN)),
    Row("full", lambda m, x: x + torch.full(x.shape, 0.0), note="zero"),
    Row("new_zeros", lambda m, x: x + x.new_zeros(x.shape)),
    Row("new_ones", lambda m, x: x + x.new_ones(x.shape), frozen(WOKEN)),
    Row("new_ones", lambda m, x: x * x.new_ones(x.shape), note="gate"),
    Row("new_full", lambda m, x: x + x.new_full(x.shape, 2.0), frozen(WOKEN)),
    Row("new_full", lambda m, x: x + x.new_full(x.shape, 0.0), note="zero"),
    Row("scalar_tensor", lambda m, x: x * torch.scalar_tensor(2.0)),
    Row("scalar_tensor", lambda m, x: x + torch.scalar_tensor(2.0), frozen(WOKEN), note="added"),
]  # fmt: skip

ROWS = [*POINTWISE, *SAME, *FILLED]
