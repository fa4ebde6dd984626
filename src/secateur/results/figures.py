"""Figures as in the paper, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from secateur.errors import InvalidSetting
from secateur.extras import import_extra
from secateur.files import write_atomic
from secateur.results.structure import Structure

KINDS = (".svg", ".png", ".pdf")
STYLES = ("-", "--", ":", "-.")
Curves = dict[str, list[tuple[float, float]]]
COLOURS = ("#3b6fb6", "#d1662b", "#4b9b5f", "#8a5aa8", "#b0413e", "#7a7a7a")


def draw_structures(structures: Sequence[Structure], path: Path, percent: bool = False) -> None:
    """Channels of each layer, before in grey and after in colour; or the percentage removed. One row per structure."""
    if not structures or not all(structure.layers for structure in structures):
        raise InvalidSetting("there is nothing to draw", wanted="runs with layers that can lose channels")
    with figure(path, rows=len(structures), width=max(6.0, 0.22 * max(len(s.layers) for s in structures))) as axes:
        for ax, structure, colour in zip(axes, structures, COLOURS * len(structures), strict=False):
            places = range(len(structure.layers))
            if percent:
                removed = [100 * (1 - layer.after / layer.before) for layer in structure.layers]
                ax.bar(places, removed, color=colour)
                ax.set_ylabel("% removed")
                ax.set_ylim(0, 100)
            else:
                ax.bar(places, [layer.before for layer in structure.layers], color="#d9d9d9", label="before")
                ax.bar(places, [layer.after for layer in structure.layers], color=colour, label="after")
                ax.set_ylabel("channels")
                ax.legend(frameon=False)
            # Dollar signs in names are no formulas.
            ax.set_title(structure.title, loc="left", parse_math=False)
            names = [layer.name for layer in structure.layers]
            ax.set_xticks(places, names, rotation=90, fontsize=6, parse_math=False)


def draw_curves(panels: dict[str, Curves], path: Path, across: str, up: str) -> None:
    """Curves by name in panels by title; a curve of one name looks the same in all panels."""
    names = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    looks = [(colour, style) for style in STYLES for colour in COLOURS]
    lines = {}
    with figure(path, rows=1, columns=len(panels), width=1.5 + 4.5 * len(panels), height=4.0) as axes:
        for ax, (title, curves) in zip(axes, panels.items(), strict=True):
            for name, points in curves.items():
                colour, style = looks[names.index(name) % len(looks)]
                drawn = ax.plot(*zip(*points, strict=True), label=name, linewidth=1.2, color=colour, linestyle=style)
                lines[name] = drawn[0]
            ax.sharey(axes[0])
            ax.set_title(title, loc="left")
            ax.set_xlabel(across)
            ax.grid(alpha=0.3)
        axes[0].set_ylabel(up)
        axes[0].figure.legend(lines.values(), lines, loc="outside right upper", frameon=False)


def draw_pictures(rows: Sequence[Sequence[Any]], titles: Sequence[str], path: Path) -> None:
    """A grid of images: arrays of shape HxWx3, or of integers, which are classes and get colours."""
    colours = import_extra("matplotlib", "report").colormaps
    listed = import_extra("matplotlib.colors", "report").ListedColormap
    # Forty classes, and white for void.
    classes = listed([*colours["tab20"].colors, *colours["tab20b"].colors]).with_extremes(over="white")
    with figure(path, rows=len(rows), columns=len(titles), width=2.2 * len(titles), height=2.0) as axes:
        for index, image in enumerate(image for row in rows for image in row):
            ax = axes[index]
            ax.imshow(image, **({"cmap": classes, "vmin": -0.5, "vmax": 39.5} if image.ndim == 2 else {}))
            ax.set_axis_off()
            if index < len(titles):
                ax.set_title(titles[index])


@contextmanager
def figure(path: Path, *, rows: int, width: float, columns: int = 1, height: float = 2.6) -> Iterator[list[Any]]:
    """Axes to draw on, written to the file at the end; the same drawing gives the same bytes."""
    if path.suffix not in KINDS:
        raise InvalidSetting("a figure cannot have this ending", got=path.name, wanted=" or ".join(KINDS))
    matplotlib = import_extra("matplotlib", "report")
    drawing = import_extra("matplotlib.figure", "report").Figure(
        figsize=(width, height * rows), layout="constrained", dpi=150
    )
    grid = drawing.subplots(rows, columns, squeeze=False)
    yield [ax for row in grid for ax in row]
    # Without a date, and with identifiers that do not change.
    dated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(path.suffix[1:], {})
    with matplotlib.rc_context({"svg.hashsalt": "secateur"}):
        drawn = BytesIO()  # the PDF backend hides why it could not write to a file
        drawing.savefig(drawn, format=path.suffix[1:], metadata=dated)
    write_atomic(path, drawn.getvalue())
