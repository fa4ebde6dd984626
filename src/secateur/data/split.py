"""Which photographs of a class are for testing: a seed and the names of the files decide, not their order or place."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from secateur.errors import InvalidData

TEST_SHARE = 0.2
"""Of the photographs of each class, where a folder does not say which are for testing."""


def draw_share(paths: Sequence[str], targets: Sequence[int], share: float = TEST_SHARE, seed: int = 0) -> list[int]:
    """The places of this share of the images of each class: at least one, and never all. A class has two or more."""
    ranked = _ranked(paths, targets, seed)
    counts = {target: min(max(1, round(share * len(places))), len(places) - 1) for target, places in ranked.items()}
    return _first(ranked, counts)


def draw_count(paths: Sequence[str], targets: Sequence[int], count: int, seed: int = 0) -> list[int]:
    """The places of so many images, of each class in proportion; of every class one is left."""
    ranked = _ranked(paths, targets, seed)
    most = len(paths) - len(ranked)
    if not 1 <= count <= most:
        raise InvalidData("so many images cannot be held out", got=count, wanted=f"1 to {most}")
    exact = {target: count * len(places) / len(paths) for target, places in ranked.items()}
    counts = {target: min(int(number), len(ranked[target]) - 1) for target, number in exact.items()}
    while sum(counts.values()) < count:
        rest = [target for target in ranked if counts[target] < len(ranked[target]) - 1]
        counts[max(rest, key=lambda target: exact[target] - counts[target])] += 1
    return _first(ranked, counts)


def _ranked(paths: Sequence[str], targets: Sequence[int], seed: int) -> dict[int, list[int]]:
    """The places of the images of each class, in an order by chance that does not depend on other images."""

    def rank(place: int) -> bytes:
        name = "/".join(Path(paths[place]).parts[-2:])
        return hashlib.sha256(f"{seed}/{name}".encode(errors="surrogateescape")).digest()

    places: dict[int, list[int]] = {}
    for place, target in enumerate(targets):
        places.setdefault(target, []).append(place)
    return {target: sorted(places[target], key=rank) for target in sorted(places)}


def _first(ranked: dict[int, list[int]], counts: dict[int, int]) -> list[int]:
    return sorted(place for target, places in ranked.items() for place in places[: counts[target]])
