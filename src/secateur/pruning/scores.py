"""Scores: the importance of a channel. The paper's, and others to compare it with.

A score observes every backward pass and gives one number per channel in the end. Where a channel has several gates or
filters, their numbers are added (Eq. 8). Subclass `Score` to write your own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from secateur.errors import InvalidSetting, unknown_name
from secateur.pruning.gates import Gates

SCORES: dict[str, type[Score]] = {}


class Score:
    """One number per channel; the smallest are removed first."""

    capturable = False
    """Whether `observe` only computes on the device, so that a CUDA graph can hold it."""
    shared = False
    """Whether all processes of a run observe the same, as gradients are; outputs are of a process's own images."""

    def begin(self, gates: Gates) -> None:
        """Start anew."""
        self.gates = gates

    def observe(self) -> None:
        """After each backward pass, before the optimizer's step."""

    def end(self) -> Tensor:
        """The score of every channel of the graph; the values for channels already removed do not matter."""
        return self.gates.per_channel(self.entries()).double()

    def entries(self) -> Tensor:
        """The score of every entry of every gate; not needed where `end` is defined."""
        raise NotImplementedError(f"{type(self).__name__} has no end(), which gives the scores")

    def branches(self, channels: Tensor, kept: Tensor) -> Tensor:
        """The score of every branch of the graph: the sum over the gates on its addend, or over its own channels.

        channels: their scores, as `end` gives them. kept: those that are left.
        """
        graph = self.gates.whole
        own = [float(channels[kept & graph.within(branch)].sum()) for branch in graph.branches]
        by_channels = torch.tensor(own, dtype=torch.float64, device="cpu")
        if type(self).end is not Score.end:
            return by_channels
        by_gates = self.gates.per_branch(self.entries())
        return torch.where(by_gates.isnan(), by_channels, by_gates)

    def close(self) -> None:
        """Leave nothing behind in the model."""

    def state(self) -> dict[str, Tensor]:
        """The tensors that hold what was observed; a run that is resumed fills them again."""
        return {}

    @property
    def resumable(self) -> bool:
        """Whether `state` is all there is to remember; a score that observes must define it."""
        return type(self).observe is Score.observe or type(self).state is not Score.state


def zero_(state: dict[str, Tensor]) -> None:
    """Start again with the same tensors: a captured step writes to them."""
    for tensor in state.values():
        tensor.zero_()


def check_state(score: Score) -> None:
    """Raise for a score whose state cannot be filled again; it has just begun."""
    state = score.state()
    wrong = [f"{type(value).__name__} for {key!r}" for key, value in state.items() if not isinstance(value, Tensor)]
    if wrong or (not state and type(score).state is not Score.state):
        raise InvalidSetting(
            f"state() of the score {type(score).__name__} is wrong",
            got=wrong[0] if wrong else "nothing",
            wanted="tensors that begin() has made, which a resumed run writes into",
        )


Kind = TypeVar("Kind", bound=type[Score])


def register(name: str) -> Callable[[Kind], Kind]:
    """Make a score available by name; defining the same class again, as in a notebook, replaces it."""

    def add(kind: Kind) -> Kind:
        known = SCORES.get(name, kind)
        if (known.__module__, known.__qualname__) != (kind.__module__, kind.__qualname__):
            raise ValueError(f"there is already a score {name!r}, {known.__qualname__}")
        SCORES[name] = kind
        return kind

    return add


def make_score(score: str | Score) -> Score:
    if isinstance(score, Score):
        return score
    if not isinstance(score, str):
        got = f"the class {score.__name__}" if isinstance(score, type) else repr(score)
        raise InvalidSetting("the score is wrong", got=got, wanted="a name, or an instance of Score")
    if score not in SCORES:
        raise unknown_name("score", score, list(SCORES))
    return SCORES[score]()


def describe(score: Score) -> str:
    """The class and the plain arguments that the instance keeps under their names: how a resumed run recognises it.

    >>> describe(Random(seed=3)), describe(Taylor()), describe(Oracle(lambda model: torch.zeros(())))
    ('Random(seed=3)', 'Taylor', 'Oracle')
    """
    kind = type(score)
    kept = {name: getattr(score, name, getattr(score, f"_{name}", ...)) for name in inspect.signature(kind).parameters}
    plain = ", ".join(f"{name}={value!r}" for name, value in kept.items() if _is_plain(value))
    return f"{kind.__name__}({plain})" if plain else kind.__name__


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def checked(score: Score, values: Tensor, kept: Tensor) -> Tensor:
    """The scores on the CPU in double precision; raise unless every channel that is left has a number."""
    name = type(score).__name__
    if not isinstance(values, Tensor) or values.shape != kept.shape or values.is_complex():
        shape = f" of {values.dtype} and shape {tuple(values.shape)}" if isinstance(values, Tensor) else ""
        raise InvalidSetting(
            f"end() of the score {name} is wrong",
            got=f"{type(values).__name__}{shape}",
            wanted=f"a tensor with one number for each of the {kept.numel()} channels, as gates.per_channel makes it",
        )
    values = values.detach().double().cpu()
    if missing := int(values[kept].isnan().sum()):
        got = f"NaN for {missing} of {int(kept.sum())} channels"
        raise InvalidSetting(f"the score {name} is not a number", got=got)
    return values


@register("taylor")
class Taylor(Score):
    """Eq. 6: |dL/dphi * phi|, summed over mini-batches; one whose gradient is not finite is left out and counted."""

    capturable = shared = True

    def __init__(self) -> None:
        self.total = torch.zeros(0)
        self.seen, self.skipped = (torch.zeros((), dtype=torch.long) for _ in range(2))

    def begin(self, gates: Gates) -> None:
        super().begin(gates)
        size, phi = gates.index.numel(), gates.phis[0]
        if self.total.shape == (size,) and self.total.device == phi.device and self.total.dtype == phi.dtype:
            zero_(self.state())
        else:
            self.total = torch.zeros(size, dtype=phi.dtype, device=phi.device)
            self.seen, self.skipped = (torch.zeros((), dtype=torch.long, device=phi.device) for _ in range(2))

    @torch.no_grad()
    def observe(self) -> None:
        change = self.change(self.gates.products())
        finite = change.isfinite().all()
        if self.total.device != change.device:
            self.total, self.seen, self.skipped = (t.to(change.device) for t in self.state().values())
        self.total += torch.where(finite, change, 0)
        self.seen += 1
        self.skipped += ~finite

    def change(self, products: Tensor) -> Tensor:
        """What one mini-batch adds."""
        return products.abs()

    def state(self) -> dict[str, Tensor]:
        return {"total": self.total, "seen": self.seen, "skipped": self.skipped}

    def entries(self) -> Tensor:
        return self.total


@register("fisher")
class Fisher(Taylor):
    """The squares of what `Taylor` adds: an estimate of the second-order term, (dL/dphi * phi)^2."""

    def change(self, products: Tensor) -> Tensor:
        return products.square()


@register("slim")
class Slim(Score):
    """The size of the factor: |gamma| of the batch norm, or phi of a gated filter."""

    capturable = True

    @torch.no_grad()
    def entries(self) -> Tensor:
        sizes = []
        for module in self.gates.modules:
            frozen = module.gate_fold.frozen and module.gate_fold.weight is not None
            factor = module.gate_apply(str(module.gate_fold.weight)) if frozen else module.gate_factor()
            assert factor is not None
            sizes.append(factor.detach().abs().double())
        return torch.cat(sizes)


@register("random")
class Random(Score):
    """Random numbers by seed."""

    capturable = True

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def end(self) -> Tensor:
        count = self.gates.graph.num_channels
        generator = torch.Generator(device="cpu").manual_seed(self.seed)
        return torch.rand(count, generator=generator, dtype=torch.float64, device="cpu")


class Oracle(Score):
    """The true change of a loss when the channel is zeroed, one evaluation per channel: for small networks.

    loss: called with the model, gives the loss over fixed data.
    """

    def __init__(self, loss: Callable[[nn.Module], Tensor]) -> None:
        self.loss = loss

    @torch.no_grad()
    def end(self) -> Tensor:
        before = self.loss(self.gates.model)
        result = torch.zeros(self.gates.graph.num_channels, dtype=torch.float64, device="cpu")
        for channel in self.gates.present.kept.nonzero()[:, 0].tolist():
            with self.gates.switched_off(channel):
                result[channel] = (self.loss(self.gates.model) - before).abs().double().cpu()
        return result
