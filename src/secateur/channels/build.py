"""From labels to groups: number the channels, collect their slices, and separate those that must stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from secateur.channels.attributes import Assumed, Name
from secateur.channels.cost import CostRow
from secateur.channels.example import Calls
from secateur.channels.groups import ChannelGraph, ChannelGroup, FrozenChannels, Member, SizeAttribute, owner
from secateur.channels.labels import Role, labels_of
from secateur.channels.reasons import Kind, Reason
from secateur.channels.rules.call import Axis
from secateur.channels.sites import Site
from secateur.channels.trace import Leaf, Watch

NO_RULE = {Kind.UNKNOWN_OPERATOR, Kind.UNSUPPORTED}
"""Why weights may stay before a layer uses them."""


@dataclass(frozen=True)
class Slices:
    """Every label of a parameter or buffer: which axis it is on, where, in which component, in which role."""

    axes: list[tuple[Leaf, int]]
    lengths: Tensor
    axis: Tensor
    index: Tensor
    component: Tensor
    role: Tensor

    @staticmethod
    def of(watch: Watch, component: Tensor) -> Slices:
        axes = [(leaf, axis) for leaf in watch.leaves.values() for axis in range(leaf.tensor.dim())]
        lengths = torch.tensor([leaf.tensor.shape[axis] for leaf, axis in axes], dtype=torch.long, device="cpu")
        count = int(lengths.sum())
        axis = torch.repeat_interleave(torch.arange(len(axes), device="cpu"), lengths)
        index = torch.arange(count, device="cpu") - (torch.cumsum(lengths, 0) - lengths)[axis]
        return Slices(axes, lengths, axis, index, component[:count], watch.table.roles()[:count])

    @cached_property
    def axis_roles(self) -> list[Role]:
        """The strongest role on each axis."""
        roles = torch.zeros(len(self.axes), dtype=torch.int8, device="cpu")
        roles.scatter_reduce_(0, self.axis, self.role, "amax")
        return [Role(role) for role in roles.tolist()]


def build_graph(
    watch: Watch, example: str, notes: tuple[str, ...], calls: Calls, partial: bool, assumed: Assumed = ()
) -> ChannelGraph:
    """The channel graph of a watched run, with the attributes that are assumed to count channels."""
    counted = [(Name(module, attribute), codes) for module, attribute, codes in watch.counted]
    counted += [(name, place.codes) for name, place in assumed]
    known = {place for _, place in assumed}
    frozen = [*watch.table.frozen, *((b.codes, b.reason) for b in watch.borders if not b.is_known(known))]
    component = watch.table.channels(_ties_of(counted))
    num_components = int(component.max()) + 1 if component.numel() else 0
    slices = Slices.of(watch, component)
    active = torch.zeros(num_components, dtype=torch.bool, device="cpu")
    active[slices.component[slices.role >= Role.PASSES]] = True
    reasons, why = _reasons(frozen, component, num_components)
    pair_of = slices.component * len(slices.axes) + slices.axis
    by_component = torch.argsort(pair_of, stable=True)
    pairs, counts = torch.unique_consecutive(pair_of[by_component], return_counts=True)
    pair_component, pair_axis = pairs // len(slices.axes), pairs % len(slices.axes)
    whole = pair_component[(counts == slices.lengths[pair_axis]) & (active & (why < 0))[pair_component]]
    reasons.append(Reason(Kind.WHOLE_LAYER))
    why[whole] = len(reasons) - 1
    chosen = active & (why < 0)
    group_of = number_groups(pair_component, pair_axis, counts, chosen)
    squeezed = {c for codes in watch.squeezed for c in component[labels_of(codes)].unique().tolist()}
    groups, channel_of = _gather(group_of, chosen, slices, by_component, _inexact(watch, component), squeezed)

    channel_at = channel_of[slices.component]
    touched = torch.unique(slices.axis[channel_at >= 0]).tolist()
    on_axis = channel_at.split(slices.lengths.tolist())
    names = [(leaf.name, axis) for leaf, axis in slices.axes]
    axes = {names[number]: on_axis[number] for number in touched}

    wanted: list[Axis] = [axis for product in watch.products for axis in product.axes]
    wanted += [codes for _, codes in counted]
    unused = {leaf.name for leaf in watch.leaves.values() if not leaf.used}
    written = {leaf.name for leaf in watch.leaves.values() if leaf.written}
    gated, barred = watch.layers.settled(unused, written)
    wanted += [layer.codes for layer in (*gated, *barred)]
    found = iter(_channels_on(wanted, channel_of, component))
    products = [(p, tuple(next(found) for _ in p.axes)) for p in watch.products]
    attributes: dict[Name, SizeAttribute] = {}
    for (name, codes), channels in zip(counted, found, strict=False):
        if channels is not None:
            attributes.setdefault(name, SizeAttribute(*name, size=codes.numel(), channels=channels))
    sites = [replace(layer.site, channels=on) for layer in gated if (on := next(found)) is not None]
    obstacles = [(layer.obstacle, on) for layer in barred if (on := next(found)) is not None]
    zeros = channel_of[component[labels_of(torch.cat([*watch.table.zeros, component[:0]]))]]
    final = [name for key in sorted(watch.layers.final) for name in watch.layers.filters[key].parameters]
    leaves = list(watch.leaves.values())
    return ChannelGraph(
        groups=groups,
        frozen=_frozen(slices, why, reasons),
        shapes={leaf.name: tuple(leaf.tensor.shape) for leaf in leaves},
        axes=axes,
        roles={names[number]: slices.axis_roles[number] for number in touched},
        attributes=tuple(attributes.values()),
        layers=tuple(CostRow(p.module, p.kind, p.volume, tuple(p.sizes), channels) for p, channels in products),
        sizes=tuple(_size_row(leaf, axes) for leaf in leaves if isinstance(leaf.tensor, nn.Parameter)),
        sites=tuple(sites),
        ungated=_ungated(groups, sites, obstacles),
        final=tuple(dict.fromkeys(final)),
        input=example,
        notes=notes,
        calls=calls,
        partial=partial,
        channel_of=channel_of[component],
        padded=tuple(group.name for group in groups if group.has_any(zeros)),
    )


def _ungated(
    groups: Sequence[ChannelGroup], sites: list[Site], barred: list[tuple[Reason | None, Tensor]]
) -> dict[str, Reason]:
    """The groups that cannot take a factor per channel, with the reason."""
    number = torch.repeat_interleave(torch.tensor([group.size for group in groups], dtype=torch.long, device="cpu"))
    covered = torch.zeros(len(groups), dtype=torch.bool, device="cpu")
    for site in sites:
        covered[number[site.channels[site.channels >= 0]]] = True
    found = {groups[index].name: Reason(Kind.NO_WEIGHT) for index in (~covered).nonzero()[:, 0].tolist()}
    for obstacle, channels in barred:
        assert obstacle is not None
        for index in number[channels[channels >= 0]].unique().tolist():
            found[groups[index].name] = obstacle
    return found


def _channels_on(axes: list[Axis], channel_of: Tensor, component: Tensor) -> list[Tensor | None]:
    """For each axis the channel number at each index; None for those without any."""
    codes = [axis for axis in axes if isinstance(axis, Tensor)]
    if not codes:
        return [None] * len(axes)
    lengths = [c.numel() for c in codes]
    channels = channel_of[component[labels_of(torch.cat(codes))]]
    number = torch.repeat_interleave(torch.arange(len(codes), device="cpu"), torch.tensor(lengths, device="cpu"))
    any_on = torch.bincount(number[channels >= 0], minlength=len(codes)).tolist()
    parts = iter(zip(channels.split(lengths), any_on, strict=True))
    result: list[Tensor | None] = []
    for axis in axes:
        part, count = next(parts) if isinstance(axis, Tensor) else (None, 0)
        result.append(part if count else None)
    return result


def _size_row(leaf: Leaf, axes: dict[tuple[str, int], Tensor]) -> CostRow:
    shape = tuple(leaf.tensor.shape)
    return CostRow(leaf.name, "parameter", 1, shape, tuple(axes.get((leaf.name, d)) for d in range(len(shape))))


def _reasons(
    frozen: list[tuple[Tensor, Reason]], component: Tensor, num_components: int
) -> tuple[list[Reason], Tensor]:
    """All reasons, and for every component the number of the first that freezes it, or -1."""
    reasons = [reason for _, reason in frozen]
    why = torch.full((num_components,), len(reasons), dtype=torch.long, device="cpu")
    if reasons:
        codes = [codes.reshape(-1) for codes, _ in frozen]
        lengths = torch.tensor([c.numel() for c in codes], device="cpu")
        numbers = torch.repeat_interleave(torch.arange(len(reasons), device="cpu"), lengths)
        why.scatter_reduce_(0, component[labels_of(torch.cat(codes))], numbers, "amin")
    why[why == len(reasons)] = -1
    return reasons, why


def _inexact(watch: Watch, component: Tensor) -> dict[int, Reason]:
    """The components that are allowed although removing is not zeroing, with the reason."""
    found: dict[int, Reason] = {}
    for codes, reason in watch.table.inexact:
        for number in component[labels_of(codes)].unique().tolist():
            found.setdefault(number, reason)
    return found


def _ties_of(counted: list[tuple[Name, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """An attribute has one value: what it counts at several places goes together."""
    first: dict[Name, Tensor] = {}
    pairs = [(first.setdefault(name, codes), codes) for name, codes in counted]
    return [(known, codes) for known, codes in pairs if known is not codes]


def number_groups(component: Tensor, axis: Tensor, counts: Tensor, chosen: Tensor) -> Tensor:
    """Number the sets of components that have equally many slices on the same axes; -1 for those not chosen.

    component, axis, counts: for every component and axis that it lies on the number of its slices there, sorted.
    """
    slices = torch.stack([axis, counts], 1)
    lengths = torch.bincount(component, minlength=chosen.numel())
    starts = torch.cumsum(lengths, 0) - lengths
    result = torch.full(chosen.shape, -1, dtype=torch.long, device="cpu")
    members = chosen.nonzero()[:, 0]
    number = torch.zeros_like(members)
    for length in lengths[members].unique().tolist():
        alike = lengths[members] == length
        some = members[alike]
        rows = slices[starts[some, None] + torch.arange(length, device="cpu")].reshape(some.numel(), -1)
        number[alike] = rows.unique(dim=0, return_inverse=True)[1] + int(number.max()) + 1
    unique, inverse = number.unique(return_inverse=True)
    first = torch.full(unique.shape, chosen.numel(), dtype=torch.long, device="cpu")
    first.scatter_reduce_(0, inverse, members, "amin")
    result[members] = torch.argsort(torch.argsort(first))[inverse]
    return result


def _gather(
    group_of: Tensor,
    chosen: Tensor,
    slices: Slices,
    by_component: Tensor,
    inexact: dict[int, Reason],
    squeezed: set[int],
) -> tuple[tuple[ChannelGroup, ...], Tensor]:
    """The groups, and for every component its channel number or -1."""
    channel_of = torch.full(chosen.shape, -1, dtype=torch.long, device="cpu")
    components = chosen.nonzero()[:, 0]
    order = components[torch.argsort(group_of[components], stable=True)]
    channel_of[order] = torch.arange(order.numel(), device="cpu")
    sizes = torch.bincount(group_of[components]).tolist() if components.numel() else []

    widths = torch.bincount(slices.component, minlength=chosen.numel())
    first = torch.cumsum(widths, 0) - widths
    members: list[list[Member]] = []
    for part in order.split(sizes):
        # The slices of each component lie together, ordered by axis, and alike for all components of a group.
        rows = by_component[first[part, None] + torch.arange(int(widths[part[0]]), device="cpu")]
        axes, counts = torch.unique_consecutive(slices.axis[rows[0]], return_counts=True)
        columns = slices.index[rows].split(counts.tolist(), dim=1)
        members.append(
            [
                Member(slices.axes[a][0].name, slices.axes[a][1], slices.axis_roles[a].word, indices)
                for a, indices in zip(axes.tolist(), columns, strict=True)
            ]
        )

    vectors = {leaf.name for leaf, _ in slices.axes if leaf.tensor.dim() == 1}
    groups = []
    names: dict[str, int] = {}
    start = 0
    for number, size in enumerate(sizes):
        made = [m for m in members[number] if m.role == "produces"]
        name = owner((made or members[number])[0].tensor)
        names[name] = names.get(name, 0) + 1
        if names[name] > 1:
            name = f"{name}#{names[name]}"
        # A bias is produced along with its filter and does not count twice.
        filters = sum(m.indices.shape[1] for m in made if m.tensor not in vectors)
        components_of = order[start : start + size].tolist() if inexact or squeezed else []
        reason = next((inexact[c] for c in components_of if c in inexact), None)
        at_least = 2 if squeezed and not squeezed.isdisjoint(components_of) else 1
        groups.append(ChannelGroup(name, start, size, tuple(members[number]), at_least, filters, reason))
        start += size
    return tuple(groups), channel_of


def _frozen(slices: Slices, why: Tensor, reasons: list[Reason]) -> tuple[FrozenChannels, ...]:
    """The filters that stay, layer by layer and reason by reason."""
    listed = [
        leaf.tensor.dim() > 1
        and (role == Role.PRODUCES or (axis == 0 and not leaf.used and isinstance(leaf.tensor, nn.Parameter)))
        for (leaf, axis), role in zip(slices.axes, slices.axis_roles, strict=True)
    ]
    on_list = torch.tensor(listed, device="cpu")[slices.axis]
    # Weights that go through an operator without a rule before a layer uses them, as those of weight norm do; the
    # filters' lengths, which go along, are not filters.
    first = torch.tensor(
        [leaf.tensor.numel() > leaf.tensor.shape[0] and axis == 0 for leaf, axis in slices.axes], device="cpu"
    )
    unknown = torch.tensor([*(reason.kind in NO_RULE for reason in reasons), False], device="cpu")
    on_list |= first[slices.axis] & (slices.role == Role.UNUSED) & unknown[why[slices.component]]
    stays = (on_list & (why[slices.component] >= 0)).nonzero()[:, 0]
    key = slices.axis[stays] * len(reasons) + why[slices.component[stays]]
    position = torch.argsort(key, stable=True)
    keys, lengths = torch.unique_consecutive(key[position], return_counts=True)
    result = []
    for number, indices in zip(keys.tolist(), slices.index[stays[position]].split(lengths.tolist()), strict=True):
        axis_number, reason = divmod(number, len(reasons))
        leaf, axis = slices.axes[axis_number]
        result.append(FrozenChannels(owner(leaf.name), leaf.name, axis, indices, reasons[reason]))
    return tuple(result)
