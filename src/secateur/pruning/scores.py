"""Scores: the importance of a channel. The paper's, and others to compare it with.

A score observes every backward pass and gives one number per channel in the end. Where a channel has several gates or
filters, their numbers are added (Eq. 8). Subclass `Score` to write your own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from secateur.channels.cost import is_kept
from secateur.channels.labels import Role
from secateur.channels.plan import Plan
from secateur.channels.shrink import cut
from secateur.errors import InvalidModel, InvalidSetting, unknown_name
from secateur.pruning.gates import Gates
from secateur.pruning.hook import Hook

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


class OutputScore(Score):
    """A score computed from the outputs of the gated modules."""

    capturable = True

    def __init__(self) -> None:
        self.handles: list[Any] = []
        self.sums: list[Tensor] = []
        self.counts = torch.zeros(0)

    def begin(self, gates: Gates) -> None:
        super().begin(gates)
        self.close()
        for site, module in zip(gates.sites, gates.modules, strict=True):
            if site.kind != "norm" and not isinstance(module, nn.Linear | _ConvNd):
                raise InvalidModel(
                    f"{type(self).__name__} needs the outputs of the weight {site.weight!r} of {site.module!r}",
                    got="those of a module that may do more than apply it",
                    remedy="Use a score of gradients or weights, such as taylor, or leave the module whole by `ignore`",
                )
        phis = [module.gate_phi for module in gates.modules]
        if [(s.shape, s.device) for s in self.sums] == [(phi.shape, phi.device) for phi in phis]:
            zero_(self.state())
        else:
            self.sums = [torch.zeros_like(phi, dtype=torch.float64, requires_grad=False) for phi in phis]
            self.counts = torch.zeros(len(phis), dtype=torch.long, device=phis[0].device)
        self.handles = [m.register_forward_hook(Hook(self._hook(i))) for i, m in enumerate(gates.modules)]

    def _hook(self, number: int) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            if not torch.is_grad_enabled():
                return  # a validation
            # (batch, channels, space) for any number of axes of space; the channels of a linear layer come last.
            channel_axis = -1 if isinstance(module, nn.Linear) else min(1, output.dim() - 1)
            self.see(
                number, output, lambda t: t.movedim(channel_axis, -1).reshape(t.shape[0], -1, t.shape[channel_axis])
            )

        return hook

    @property
    def resumable(self) -> bool:
        return type(self).begin is OutputScore.begin or type(self).state is not OutputScore.state

    def see(self, number: int, output: Tensor, shape: Callable[[Tensor], Tensor]) -> None:
        """`shape` brings it to (batch, places, channels)."""
        raise NotImplementedError

    def add(self, number: int, value: Tensor) -> None:
        self.sums[number] = self.sums[number].to(value.device)
        self.sums[number] += value

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles = []

    def means(self) -> list[Tensor]:
        """The mean of each entry of each gate."""
        result = []
        for total, count, site in zip(self.sums, self.counts.tolist(), self.gates.sites, strict=True):
            if not count:
                raise InvalidModel(f"{site.module!r} was never called, and {type(self).__name__} needs its output")
            result.append(total / count)
        self.close()
        return result

    def state(self) -> dict[str, Tensor]:
        return {"counts": self.counts, **{str(number): total for number, total in enumerate(self.sums)}}


@register("pcnn")
class PCNN(OutputScore):
    """Molchanov et al.: |mean over places of z * dL/dz|, averaged over images, each layer scaled to unit L2 norm."""

    def see(self, number: int, output: Tensor, shape: Callable[[Tensor], Tensor]) -> None:
        if not output.requires_grad:
            return
        wide = torch.promote_types(output.dtype, torch.float32)
        seen = output.detach().to(wide, copy=True)  # what follows may work in place

        def backward(gradient: Tensor) -> None:
            found = shape(seen * gradient).mean(1, dtype=torch.float64).abs().sum(0)
            # Scaled gradients that overflow are left out. Their number does not matter: a layer has norm 1.
            self.add(number, torch.where(found.isfinite().all(), found, 0.0))
            self.counts[number] += seen.shape[0]

        output.register_hook(backward)

    def entries(self) -> Tensor:
        return torch.cat([mean / mean.norm().clamp_min(1e-300) for mean in self.means()])


@register("apoz")
class APoZ(OutputScore):
    """Hu et al.: the share of places where the response is positive, which is what a ReLU lets pass."""

    def see(self, number: int, output: Tensor, shape: Callable[[Tensor], Tensor]) -> None:
        positive = shape(output.detach()) > 0
        self.add(number, positive.mean(1, dtype=torch.float64).sum(0))
        self.counts[number] += positive.shape[0]

    def entries(self) -> Tensor:
        return torch.cat(self.means())


class FilterScore(Score):
    """A score computed from the weights of the filters alone."""

    capturable = True

    @torch.no_grad()
    def end(self) -> Tensor:
        total = torch.zeros(self.gates.graph.num_channels, dtype=torch.float64, device="cpu")
        for rows, channels in self._filters():
            worth, removable = self.worth(rows).cpu(), channels >= 0
            total.index_add_(0, channels[removable], worth[removable])
        return total

    def worth(self, rows: Tensor) -> Tensor:
        """One number per row; the rows are the filters of one layer."""
        raise NotImplementedError

    def _filters(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The filters of each layer as rows, and the channel of each; masked filters are left out, as if cut."""
        graph, gates = self.gates.whole, self.gates
        masked = Plan(gates.graph, gates.kept).cuts(gates.present).kept
        for (tensor, axis), channels in graph.axes.items():
            if tensor in gates.present.gone:
                continue
            if graph.roles[tensor, axis] == Role.PRODUCES and len(graph.shapes[tensor]) > 1:
                path, _, attribute = tensor.rpartition(".")
                weight = getattr(gates.model.get_submodule(path), attribute).detach()
                weight = cut(weight, weight.shape, masked.get(tensor, {}))
                yield weight.double().movedim(axis, 0).flatten(1), channels[is_kept(channels, gates.kept)]


@register("l1")
class L1Norm(FilterScore):
    """Li et al.: the sum of the filter's absolute weights."""

    def worth(self, rows: Tensor) -> Tensor:
        return rows.abs().sum(1)


@register("l2")
class L2Norm(FilterScore):
    """The filter's Euclidean norm."""

    def worth(self, rows: Tensor) -> Tensor:
        return rows.norm(dim=1)


@register("fpgm")
class FPGM(FilterScore):
    """He et al.: the sum of distances to all filters of the layer; near the geometric median is redundant."""

    def worth(self, rows: Tensor) -> Tensor:
        return torch.cdist(rows, rows).sum(1)


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
