"""The gates of a model: on every channel that can be removed, as one list."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor, nn

from secateur.channels.cost import is_kept
from secateur.channels.groups import ChannelGraph, ChannelGroup, Member, check_graph
from secateur.channels.guard import check_module
from secateur.channels.labels import Role
from secateur.channels.plan import Plan
from secateur.channels.shrink import check_same_network, shrink_, tensors_of
from secateur.errors import InvalidModel
from secateur.pruning.gated import FilterScale, Gated, along, merge_gate_, put_gate_


@torch.no_grad()
def insert_gates_(model: nn.Module, graph: ChannelGraph, *, filter_scale: FilterScale = "norm") -> Gates:
    """Put a gate on every channel that can be removed. The function of the model does not change.

    >>> from secateur import analyze
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 1))
    >>> graph = analyze(net, torch.randn(1, 3, 8, 8))
    >>> gates = insert_gates_(net, graph)
    >>> [name for name, _ in net.named_parameters() if "gate" in name]
    ['1.gate_phi']
    >>> type(merge_gates_(net)[1]).__name__
    'BatchNorm2d'
    """
    check_module(model)
    for name, module in model.named_modules():
        if isinstance(module, Gated):
            raise InvalidModel(f"{name!r} already has a gate", remedy="Call merge_gates_(model) first")
        if any(hasattr(module, own) for own in Gated.__annotations__):
            raise InvalidModel(f"{name!r} has an attribute that begins with gate_", remedy="Rename it: gates need it")
    check_same_network(model, check_graph(graph))
    if not any(group.size > group.at_least and group.name not in graph.ungated for group in graph.groups):
        reasons = sorted({str(f.reason) for f in graph.frozen} | {str(reason) for reason in graph.ungated.values()})
        listed = "; or ".join(reasons) or "is the only one of its layer"
        what = "take a gate" if graph.ungated else "be removed"
        raise InvalidModel(f"no channel of this model can {what}: each {listed}")
    some = next(p for p in model.parameters() if p.is_floating_point())
    for site in graph.sites:
        put_gate_(model.get_submodule(site.module), site, some, filter_scale)
    return Gates(model, graph)


@torch.no_grad()
def merge_gates_(model: nn.Module) -> nn.Module:
    """Multiply every gate into its module and remove it; nothing of ours remains."""
    check_module(model)
    for name, module in model.named_modules():
        if isinstance(module, Gated) and module.gate_fold.weight is None and not bool(module.gate_mask.all()):
            raise InvalidModel(f"{name!r} has no parameters that could hold a mask", remedy="Cut the channels first")
    for module in list(model.modules()):
        if isinstance(module, Gated):
            merge_gate_(module)
    return model


class Gates:
    """The gates of a model as one list, and the channel of each entry."""

    def __init__(self, model: nn.Module, graph: ChannelGraph) -> None:
        self.model = model
        self.whole = graph
        self.graph = _with_gates(graph)
        """The same graph with the gates among its tensors, so that they are cut too."""
        self.present = Plan(self.graph, graph.all_kept())
        """What is left of the tensors."""
        self.kept = graph.all_kept()
        """What is not masked."""
        self.sites = list(graph.sites)
        """Where they are; none in branches that are gone."""
        self.modules: list[Gated] = []
        for site in self.sites:
            module = model.get_submodule(site.module)
            if not isinstance(module, Gated):
                raise InvalidModel(f"{site.module!r} has no gate", remedy="Call insert_gates_(model, graph) first")
            self.modules.append(module)

    @property
    def phis(self) -> list[nn.Parameter]:
        return [module.gate_phi for module in self.modules]

    @property
    def trainable(self) -> list[nn.Parameter]:
        """The gates that train: not those of norms without parameters or of frozen weights."""
        return [module.gate_phi for module in self.modules if module.gate_fold.trained]

    @cached_property
    def removable(self) -> Tensor:
        """The channels of groups that gates can switch off."""
        gated = torch.tensor([group.name not in self.whole.ungated for group in self.whole.groups], device="cpu")
        return gated[self.whole.group_of]

    @cached_property
    def channels(self) -> list[Tensor]:
        """For every gate the channel number of each entry, -1 where none can be removed."""
        return [s.channels[is_kept(s.channels, self.present.kept)] for s in self.sites]

    @cached_property
    def index(self) -> Tensor:
        """The channel of every entry of every gate; one past the last for entries that stay."""
        joined = torch.cat([*self.channels, torch.empty(0, dtype=torch.long, device="cpu")])
        return torch.where(joined < 0, self.graph.num_channels, joined)

    @cached_property
    def _penalties(self) -> list[Tensor]:
        """The weight of each entry in the L1 term."""
        return [
            (module.gate_fold.penalty * (is_kept(on, self.removable) & (on >= 0))).to(module.gate_phi)
            for module, on in zip(self.modules, self.channels, strict=True)
        ]

    def products(self) -> Tensor:
        """The gradient of every entry times what it multiplies its channel with; a few kernels for all gates."""
        phis = [module.gate_phi for module in self.modules]
        gradients = [torch.zeros_like(phi) if phi.grad is None else phi.grad for phi in phis]
        masks = [module.gate_mask for module in self.modules]
        factors = [
            mask if m.gate_fold.weight is None else m.gate_phi for m, mask in zip(self.modules, masks, strict=True)
        ]
        return torch.cat(gradients) * torch.cat(factors) * torch.cat(masks)

    def per_channel(self, entries: Tensor) -> Tensor:
        """Sum what was computed for every entry of every gate by channel (Eq. 8); on the CPU, where sums round the same
        way each time.
        """
        total = torch.zeros(self.graph.num_channels + 1, dtype=entries.dtype, device="cpu")
        return total.index_add_(0, self.index, entries.cpu())[:-1]

    def per_branch(self, entries: Tensor) -> Tensor:
        """The sum over the gates on the addend of each branch, as if its channels were coupled; NaN without gates."""
        sizes = [phi.numel() for phi in self.phis]
        parts = dict(zip((site.module for site in self.sites), entries.detach().cpu().split(sizes), strict=True))
        sums = [float(parts[b.gate].double().sum()) if b.gate in parts else torch.nan for b in self.whole.branches]
        return torch.tensor(sums, dtype=torch.float64, device="cpu")

    @torch.no_grad()
    def mask_(self, kept: Tensor) -> None:
        """Switch off every channel that is not kept; those with `loose` members must be cut as well."""
        self.kept = kept.clone()
        for module, channels in zip(self.modules, self.channels, strict=True):
            module.gate_mask.copy_(is_kept(channels, kept))

    @contextmanager
    def switched_off(self, channel: int) -> Iterator[None]:
        """Make one channel zero while the context lasts."""
        tensors = tensors_of(self.model)
        saved: list[tuple[Tensor, Tensor]] = []
        loose = {member.tensor for group in self.whole.groups for member in self.loose(group)}
        names = [
            (name, axis)
            for name, axis in self.graph.axes
            if (name in loose or name.endswith("gate_mask")) and name not in self.present.gone
        ]
        with torch.no_grad():
            for name, axis in names:
                channels = self.graph.axes[name, axis]
                here = (channels[is_kept(channels, self.present.kept)] == channel).nonzero()[:, 0]
                if here.numel():
                    saved.append((tensors[name], tensors[name].clone()))
                    tensors[name].index_fill_(axis, here.to(tensors[name].device), 0)
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, before in reversed(saved):
                    tensor.copy_(before)

    def loose(self, group: ChannelGroup) -> list[Member]:
        """Members behind the gates that no mask reaches, such as a learnt shift: they could make a channel non-zero."""
        return [m for m in group.members if m.role == "passes" and m.tensor not in self._held]

    @cached_property
    def _held(self) -> set[str]:
        """Tensors that a gate multiplies, and the statistics of its norm."""
        return {
            f"{site.module}.{part}" if site.module else part
            for site in self.sites
            for part in (site.weight, site.bias, *(("running_mean", "running_var") if site.kind == "norm" else ()))
            if part is not None
        }

    @property
    def merged(self) -> bool:
        """Whether `merge_gates_` has taken them away; not if they have gone with their branches."""
        return bool(self.modules) and not isinstance(self.modules[0], Gated)

    def masked(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Every gated parameter with masked channels, and a factor for it: 0 for these channels, 1 for the others."""
        for module, site, channels in zip(self.modules, self.sites, self.channels, strict=True):
            kept = is_kept(channels, self.kept)
            for name, axis in ((site.weight, site.axis), (site.bias, 0)):
                parameter = module._parameters[name] if name is not None else None
                if parameter is not None and not bool(kept.all()):
                    yield parameter, along(kept.to(parameter), axis, parameter)

    def cut_(self, kept: Tensor, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Cut the tensors, gates and optimizer state to these channels; branches that keep none of theirs go."""
        graph = self.whole if self.merged else self.graph
        since = self.present if self.present.graph is graph else Plan(graph, self.present.kept)
        plan = Plan(graph, kept.clone())
        shrink_(self.model, plan, optimizer, since=since)
        self.present = plan
        self.kept = self.kept & kept
        if plan.without != since.without:
            pairs = zip(self.sites, self.modules, strict=True)
            left = [(s, m) for s, m in pairs if not any(b.cut.takes(s.module) for b in plan.removed_branches)]
            self.sites, self.modules = [site for site, _ in left], [module for _, module in left]
        for name in ("channels", "index", "_penalties"):
            self.__dict__.pop(name, None)

    @torch.no_grad()
    def add_l1_(self, strength: float) -> None:
        """Add the subgradient of `strength * sum |phi|` to the gradients, over the channels that can be removed."""
        drawn = [
            (module.gate_phi, module.gate_phi.grad, module.gate_mask, penalty)
            for module, penalty in zip(self.modules, self._penalties, strict=True)
            if module.gate_fold.weight is not None and module.gate_phi.grad is not None
        ]
        if drawn:
            phis, gradients, masks, penalties = zip(*drawn, strict=True)
            signs = torch._foreach_sign(phis)  # pyright: ignore[reportPrivateImportUsage]
            torch._foreach_mul_(signs, masks)  # pyright: ignore[reportPrivateImportUsage]
            weights = [penalty.to(sign) for penalty, sign in zip(penalties, signs, strict=True)]
            torch._foreach_mul_(signs, weights)  # pyright: ignore[reportPrivateImportUsage]
            torch._foreach_add_(gradients, signs, alpha=strength)  # pyright: ignore[reportPrivateImportUsage]


def _with_gates(graph: ChannelGraph) -> ChannelGraph:
    shapes, axes, roles = dict(graph.shapes), dict(graph.axes), dict(graph.roles)
    for site in graph.sites:
        for part in ("gate_phi", "gate_mask"):
            name = f"{site.module}.{part}" if site.module else part
            shapes[name] = (site.channels.numel(),)
            axes[name, 0] = site.channels
            roles[name, 0] = Role.PASSES
    branches = []
    for branch in graph.branches:
        own = {f"{site.module}." for site in graph.sites if branch.cut.takes(site.module)}
        gates = [name for name in shapes if name not in graph.shapes and name.startswith(tuple(own))]
        branches.append(replace(branch, cut=replace(branch.cut, tensors=(*branch.cut.tensors, *gates))))
    return replace(graph, shapes=shapes, axes=axes, roles=roles, branches=tuple(branches))
