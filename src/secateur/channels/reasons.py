"""Why channels stay: a kind with details, as data. Only people read the text."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """Why channels cannot be removed, or cannot take a factor; the value is the text, with a place for the detail."""

    OUTPUT = "reaches the model's output"
    UNUSED = "is not used in the forward pass on this example"
    IGNORED = "is ignored as requested"
    ONLY = "is the only channel of a tensor"
    WHOLE_LAYER = "is coupled with every other channel of its layer"
    SHARED_MEMORY = "shares memory with {}"
    UNKNOWN_OPERATOR = "operator {} has no rule"
    UNSUPPORTED = "is used by {} in a way that has no rule"
    MIXES = "passes {}, which combines channels"
    IN_NORM = (
        "is part of a norm that {} takes of a weight: remove that first, with remove_weight_norm or "
        "remove_parametrizations"
    )
    INDEXED = "is addressed by position in {}"
    MERGED = "is merged with another axis of channels"
    FIXED_TENSOR = "meets a tensor of fixed size in {}"
    FIXED_PARTS = "is split or sliced at fixed positions"
    NOT_ZERO = "does not stay zero after {}"
    UNDEFINED = "passes {}, which is undefined where a removed channel leaves zeros"
    COMPUTED_WEIGHT = "is used with a weight that is computed in the forward pass"
    READ_BY_PYTHON = "is read by Python code"

    # Found by the probe.
    FIXED_SIZE = "the forward pass uses a fixed size: {}"
    DIFFERS = "changes the result by {} when removed: the code depends on the number of channels"
    NOT_COPIED = "cannot be tried on a copy of the model: {}"

    # Why a group cannot take a factor per channel.
    NO_WEIGHT = "is not made by a layer whose weight can take a factor per channel"
    NORM_WITHOUT_WEIGHT = "passes a norm that cancels its scale and cannot take a factor"
    SHARED_WEIGHT = "has a weight or bias that is shared"
    WRITTEN_WEIGHT = "has a weight that the forward pass changes"

    # Why a branch cannot go.
    NO_BLOCK = "no module within the model holds the branch and the sum"
    SEVERAL_TENSORS = "{} takes or returns more than one tensor"
    NO_CHAIN = "what would be left is no chain of modules and activations: {}"
    VALUES = "the code of {} depends on values"
    READ_INSIDE = "results from within {} are used outside of it"
    WRITTEN_LATER = "what {} takes or returns is changed in place later"
    USED_ELSEWHERE = "{} is used elsewhere too"
    UNUSED_PARAMETER = "{} is not used in the forward pass on this example"
    HOOKED = "{} has hooks or a weight that is computed"
    TRAINING = "runs differently in training mode"
    NEEDED = "the forward pass fails without it: {}"
    NOT_NEUTRAL = "a network without it differs by {} from one in which its tensors are zero"


@dataclass(frozen=True)
class Reason:
    """A kind, what it is about (an operator, a tensor, an error), and the module that was running.

    >>> print(Reason(Kind.MIXES, "softmax", "attention"))
    passes softmax, which combines channels (in attention)
    """

    kind: Kind
    detail: str = ""
    module: str = ""

    def __str__(self) -> str:
        text = self.kind.value.replace("{}", self.detail)
        return f"{text} (in {self.module})" if self.module else text

    def to_dict(self) -> dict[str, str]:
        """Plain data, ready for JSON."""
        return {"kind": self.kind.name.lower(), "text": str(self)}
