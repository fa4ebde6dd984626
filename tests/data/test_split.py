"""Which photographs are drawn for testing."""

from collections import Counter

import pytest

from secateur.data.split import draw_count, draw_share
from secateur.errors import InvalidData


def files(sizes: dict[str, int], root: str = "/photos") -> tuple[list[str], list[int]]:
    """So many images of each class."""
    paths = [f"{root}/{name}/{i}.jpg" for name, size in sizes.items() for i in range(size)]
    return paths, [number for number, size in enumerate(sizes.values()) for _ in range(size)]


def named(paths: list[str], places: list[int]) -> set[str]:
    return {"/".join(paths[place].split("/")[-2:]) for place in places}


def test_every_class_gives_its_share_and_keeps_some() -> None:
    _, targets = drawn = files({"cat": 100, "dog": 30, "eel": 2, "fox": 3})
    places = draw_share(*drawn)
    assert places == sorted(set(places))
    assert Counter(targets[place] for place in places) == {0: 20, 1: 6, 2: 1, 3: 1}


def test_only_the_seed_and_the_names_decide() -> None:
    paths, targets = files({"cat": 40, "dog": 40})
    chosen = named(paths, draw_share(paths, targets))
    moved = files({"cat": 40, "dog": 40}, "/elsewhere/on/disk")
    assert named(moved[0], draw_share(*moved)) == chosen
    back = paths[::-1], targets[::-1]
    assert named(back[0], draw_share(*back)) == chosen
    assert named(paths, draw_share(paths, targets, seed=1)) != chosen
    numbers = [{name.partition("/")[2] for name in chosen if name.startswith(kind)} for kind in ("cat", "dog")]
    assert numbers[0] != numbers[1]  # not the same places in every folder


def test_an_image_that_is_added_moves_few_others() -> None:
    before, after = files({"cat": 100}), files({"cat": 101})
    chosen = [named(each[0], draw_share(*each)) for each in (before, after)]
    assert len(chosen[0] ^ chosen[1]) <= 2


def test_images_held_out_are_of_all_classes_in_proportion() -> None:
    _, targets = drawn = files({"cat": 60, "dog": 30, "eel": 9, "fox": 1})
    for count in (1, 10, 37, 90):
        places = draw_count(*drawn, count)
        held = Counter(targets[place] for place in places)
        assert len(places) == len(set(places)) == count
        assert held[3] == 0  # its only image
        assert all(abs(held[number] - count * size / 100) <= 1 for number, size in ((0, 60), (1, 30), (2, 9)))


@pytest.mark.parametrize("count", [-1, 0, 4, 5])
def test_a_class_is_never_held_out_whole(count: int) -> None:
    with pytest.raises(InvalidData, match=rf"got {count}, wanted 1 to 3"):
        draw_count(*files({"cat": 3, "dog": 2}), count)
