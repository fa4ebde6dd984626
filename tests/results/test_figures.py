"""Figures: what is drawn, and that it is drawn the same way twice."""

import errno
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from faults import Faults

from secateur.errors import InvalidSetting
from secateur.results.figures import COLOURS, draw_curves, draw_pictures, draw_structures
from secateur.results.structure import Layer, Structure

KINDS = [".svg", ".png", ".pdf"]
PRUNED = Structure("pruned", [Layer("conv1", 64, 16), Layer("conv2", 128, 96), Layer("conv3", 256, 256)])
OTHER = Structure("other", [Layer("conv1", 64, 32), Layer("conv2", 128, 12)])


def paths(figure: Path, look: str) -> list[ElementTree.Element]:
    """What has that in its style."""
    nodes = [node for node in ElementTree.parse(figure).iter() if node.tag.endswith("}path")]
    return [node for node in nodes if look in node.get("style", "")]


def height(bar: ElementTree.Element) -> float:
    """Of "M left bottom L right bottom L right top L left top z"."""
    words = bar.get("d", "").split()
    return float(words[2]) - float(words[8])


@pytest.mark.parametrize("suffix", KINDS)
def test_the_same_drawing_has_the_same_bytes(suffix: str, tmp_path: Path) -> None:
    for number in (1, 2):
        draw_structures([PRUNED], tmp_path / f"structures{number}{suffix}")
        draw_pictures([[np.zeros((4, 4, 3)), np.eye(4)]], ["image", "map"], tmp_path / f"pictures{number}{suffix}")
    for name in ("structures", "pictures"):
        one, two = ((tmp_path / f"{name}{number}{suffix}").read_bytes() for number in (1, 2))
        assert one == two
    draw_structures([OTHER], tmp_path / f"other{suffix}")
    assert (tmp_path / f"other{suffix}").read_bytes() != (tmp_path / f"structures1{suffix}").read_bytes()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_bars_are_as_high_as_layers_are_wide(tmp_path: Path) -> None:
    draw_structures([PRUNED, OTHER] * 2, tmp_path / "figure.svg")
    assert len(paths(tmp_path / "figure.svg", "fill: #d9d9d9")) == 2 * (3 + 1) + 2 * (2 + 1)
    draw_structures([PRUNED], tmp_path / "figure.svg")
    # The last of each colour stands in the legend.
    *before, _ = map(height, paths(tmp_path / "figure.svg", "fill: #d9d9d9"))
    *after, _ = map(height, paths(tmp_path / "figure.svg", f"fill: {COLOURS[0]}"))
    unit = before[0] / 64
    assert before == pytest.approx([64 * unit, 128 * unit, 256 * unit], rel=1e-3)
    assert after == pytest.approx([16 * unit, 96 * unit, 256 * unit], rel=1e-3)


def test_percent_is_what_was_removed(tmp_path: Path) -> None:
    draw_structures([PRUNED], tmp_path / "figure.svg", percent=True)
    bars = list(map(height, paths(tmp_path / "figure.svg", f"fill: {COLOURS[0]}")))
    unit = bars[0] / 75
    assert bars == pytest.approx([75 * unit, 25 * unit, 0.0], rel=1e-3, abs=1e-3)
    assert not paths(tmp_path / "figure.svg", "fill: #d9d9d9")


def test_a_title_is_not_a_formula(tmp_path: Path) -> None:
    titles = [r"runs/$\frac$", "runs/$a_b$ & <c>"]
    draw_structures([Structure(title, PRUNED.layers) for title in titles], tmp_path / "figure.svg")
    comments = (tmp_path / "figure.svg").read_text()
    assert r"<!-- runs/$\frac$ -->" in comments


def test_every_curve_is_drawn_through_its_points(tmp_path: Path) -> None:
    curves = {"a": [(0.0, 0.0), (50.0, 10.0), (100.0, 0.0)], "b": [(0.0, 10.0), (100.0, 10.0)]}
    draw_curves({"all": curves}, tmp_path / "figure.svg", "% removed", "accuracy")
    drawn = [paths(tmp_path / "figure.svg", f"stroke: {colour}; stroke-width: 1.2")[0] for colour in COLOURS[:2]]
    numbers = [[float(word) for word in node.get("d", "").split() if word not in "ML"] for node in drawn]
    (x0, y0, x1, y1, x2, y2), (_, top, _, same) = numbers
    assert (x1, y0, top) == pytest.approx(((x0 + x2) / 2, y2, same))
    assert y1 == pytest.approx(top)
    assert y0 > y1  # down is up in a drawing


def test_each_of_nine_curves_can_be_told_from_the_others(tmp_path: Path) -> None:
    curves = {str(n): [(0.0, n), (1.0, n)] for n in range(9)}
    draw_curves({"left": curves, "right": dict(reversed(curves.items()))}, tmp_path / "figure.svg", "x", "y")
    styles = [node.get("style") for node in paths(tmp_path / "figure.svg", "stroke-width: 1.2")]
    left, right, legend = styles[:9], styles[9:18], styles[18:]
    assert len(set(left)) == 9
    assert left == right[::-1] == legend


def test_pictures_stand_in_a_grid(tmp_path: Path) -> None:
    labels = np.arange(20).reshape(4, 5)
    rows = [[np.random.default_rng(0).random((4, 5, 3)), labels, labels]] * 2
    draw_pictures(rows, ["image", "truth", "seen"], tmp_path / "figure.svg")
    nodes = list(ElementTree.parse(tmp_path / "figure.svg").iter())
    assert sum(node.tag.endswith("}image") for node in nodes) == 6


def test_classes_and_void_have_colours_of_their_own(tmp_path: Path) -> None:
    values = (0, 19, 20, 255)
    for value in values:
        draw_pictures([[np.full((4, 4), value)]], ["truth"], tmp_path / f"{value}.png")
    assert len({(tmp_path / f"{value}.png").read_bytes() for value in values}) == len(values)


@pytest.mark.parametrize(
    ("structures", "name"),
    [([PRUNED], "figure.jpg"), ([PRUNED], "figure"), ([PRUNED], "figure.svg.gz"), ([], "figure.svg")],
)
def test_what_cannot_be_drawn_leaves_no_file(structures: list[Structure], name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting):
        draw_structures(structures, tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_full_is_an_error_of_the_disk(tmp_path: Path) -> None:
    with Faults(tmp_path).active() as counted:
        draw_structures([PRUNED], tmp_path / "figure.pdf")
    writes = [number for number, call in enumerate(counted.calls) if call.startswith("write")]
    (tmp_path / "figure.pdf").unlink()
    assert writes
    for number in writes:
        with Faults(tmp_path, number, errno.ENOSPC, True).active(), pytest.raises(OSError, match="No space left"):
            draw_structures([PRUNED], tmp_path / "figure.pdf")
        assert list(tmp_path.iterdir()) == []
