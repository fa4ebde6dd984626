"""How many channels of each group the probe cuts: numbers that reveal code that depends on widths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from secateur.channels.groups import ChannelGroup, FrozenChannels

Amounts = dict[str, int]
"""How many channels a group loses, by its name."""


def unequal_amounts(groups: Sequence[ChannelGroup]) -> list[Amounts]:
    """At least two ways to cut all groups. In all but the last, groups of equal size lose different numbers, so that
    code that takes their sizes for equal fails.

    The numbers are odd, for code that asks whether a width is even, and at most three quarters of a group.
    """
    ranks: dict[int, int] = {}
    places: dict[str, tuple[int, int]] = {}
    for group in groups:
        ranks[group.size] = ranks.get(group.size, -1) + 1
        places[group.name] = ranks[group.size], max(1 + (group.size >= 4), 3 * group.size // 8)
    # The rank in digits: two groups differ in one of them. Three are enough in practice.
    digits = min(3, max((_digits(rank, base) for rank, base in places.values()), default=1))
    result: list[Amounts] = []
    for digit in range(digits + 1):
        amounts = {}
        for group in groups:
            rank, base = places[group.name]
            number = (rank // base**digit + base // 2 ** (digit + 1)) % base
            amounts[group.name] = min(2 * number + 1, group.size - group.at_least)
        result.append(amounts)
    return result


def parted(amounts: Amounts, padded: Sequence[str]) -> list[Amounts]:
    """Some of these amounts at a time, so that each padded group is cut without the other padded groups, and the rest
    without it: the code may compute the number of zeros from a sum of widths.
    """
    numbers = {name: number for number, name in enumerate(padded, 1)}
    return [
        {name: amount * ((numbers.get(name, 0) >> bit) % 2 == chosen) for name, amount in amounts.items()}
        for bit in range(len(padded).bit_length())
        for chosen in (1, 0)
    ]


def _digits(rank: int, base: int) -> int:
    count = 1
    while base > 1 and rank >= base**count:
        count += 1
    return count


def leaves_one(groups: Sequence[ChannelGroup], amounts: Amounts) -> bool:
    """Whether a group has a single channel left that could have more, which hides how its channels are used."""
    return any(group.size > 2 and group.size - amounts[group.name] == 1 for group in groups)


def equal_widths(groups: Sequence[ChannelGroup]) -> Amounts:
    """How many channels to cut so that groups become equally wide, for code that asks whether shapes are equal."""
    width = min((group.size for group in groups if group.size >= 4), default=0)
    return {g.name: min(max(0, g.size - width), g.size - g.at_least) if width else 0 for g in groups}


def other_ways(
    groups: Sequence[ChannelGroup], frozen: Sequence[FrozenChannels], shapes: Mapping[str, tuple[int, ...]]
) -> list[Amounts]:
    """Widths at which code that compares widths may take another branch than in the whole network.

    Each group as wide as the next smaller one is, for code that compares with a number of its own; as wide as what
    stays, and what is joined as wide as what is not, for code that compares two tensors; and few channels, but enough
    that not all may be dead.
    """
    stay = {shapes[layer.tensor][layer.axis] for layer in frozen}
    parts = {
        group.name: max(
            (shapes[m.tensor][m.axis] // group.size for m in group.members if m.indices.shape[1] == 1), default=1
        )
        for group in groups
    }
    wide = min((group.size * parts[group.name] for group in groups), default=1)
    widths = [
        {group.name: _below(group.size, {other.size for other in groups}) for group in groups},
        {group.name: _below(group.size, stay) for group in groups},
        {group.name: wide // parts[group.name] for group in groups},
        {group.name: min(4, group.size // 2) for group in groups},
    ]
    return [{g.name: g.size - min(g.size, max(width[g.name], g.at_least)) for g in groups} for width in widths]


def _below(size: int, sizes: Set[int]) -> int:
    """The next smaller one; itself if there is none."""
    return max((other for other in sizes if other < size), default=size)
