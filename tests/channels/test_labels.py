"""Connected components and groups, against the plain way of finding them."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from secateur.channels.build import number_groups
from secateur.channels.labels import connect


@settings(deadline=None)
@given(st.integers(1, 30).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.tuples(*[st.integers(0, n - 1)] * 2)))))
def test_components_equal_a_plain_union_find(case: tuple[int, list[tuple[int, int]]]) -> None:
    size, pairs = case
    parent = list(range(size))

    def find(x: int) -> int:
        while parent[x] != x:
            x = parent[x]
        return x

    for a, b in pairs:
        low, high = sorted((find(a), find(b)))
        parent[high] = low
    ties = [(2 * torch.tensor([a]), 2 * torch.tensor([b]) + 1) for a, b in pairs]
    assert connect(size, ties).tolist() == [find(x) for x in range(size)]


def test_a_long_chain_is_one_component() -> None:
    count = 20_000
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    assert int(connect(count, [(2 * order[:-1], 2 * order[1:])]).max()) == 0


SLICES = st.dictionaries(st.integers(0, 3), st.integers(1, 3), min_size=1)
"""How many slices a component has on each axis."""


@settings(deadline=None)
@given(st.lists(st.tuples(SLICES, st.booleans()), min_size=1, max_size=12))
def test_groups_are_components_with_the_same_slices(components: list[tuple[dict[int, int], bool]]) -> None:
    """Numbered in the order of their first component."""
    listed = [(number, *pair) for number, (slices, _) in enumerate(components) for pair in sorted(slices.items())]
    component, axis, counts = torch.tensor(listed).T
    numbers: dict[tuple[tuple[int, int], ...], int] = {}
    keys = [tuple(sorted(slices.items())) for slices, _ in components]
    expected = [
        numbers.setdefault(key, len(numbers)) if chosen else -1
        for key, (_, chosen) in zip(keys, components, strict=True)
    ]
    chosen = torch.tensor([chosen for _, chosen in components])
    assert number_groups(component, axis, counts, chosen).tolist() == expected
