"""The structure of a pruned network: channels of every layer before and after, from a run's folder."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from secateur.errors import InvalidData
from secateur.files import each_json_line, read_json

Some = TypeVar("Some")


@dataclass(frozen=True)
class Layer:
    """The number of a layer's filters."""

    name: str
    before: int
    after: int


@dataclass(frozen=True)
class Structure:
    """A network's layers in the order in which they run."""

    title: str
    layers: list[Layer]
    removed_branches: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        wide = max([len(layer.name) for layer in self.layers] + [5])
        head = f"{self.title}\n{'layer':<{wide}} {'before':>7} {'after':>7} {'left':>6}"
        rows = [f"{x.name:<{wide}} {x.before:>7} {x.after:>7} {x.after / x.before:>6.0%}" for x in self.layers]
        gone = [f"removed branches: {', '.join(self.removed_branches)}"] if self.removed_branches else []
        return "\n".join([head, *rows, *gone])

    def to_dict(self) -> dict[str, Any]:
        gone = {"removed_branches": self.removed_branches} if self.removed_branches else {}
        return {"title": self.title, "layers": [vars(layer) for layer in self.layers], **gone}


def layers_after(widths: Iterable[Any], removed: Mapping[str, int], gone: Container[str] = ()) -> list[Layer]:
    """Layers, from rows of name, width and filters per channel of each group, and the channels removed by group.

    gone: layers that are removed as a whole.
    """
    return [
        _layer(
            name,
            width,
            width - sum(each * removed.get(group, 0) for group, each in groups.items()) if name not in gone else 0,
        )
        for name, width, groups in widths
    ]


def read_structure(folder: str | Path, removed: Mapping[str, int] | None = None) -> Structure:
    """The structure of a run, finished or not, or of a result.

    removed: the channels of each group that the run has removed, where they are known; else its events are read. What a
        finished run has left is in its result.
    """
    path = Path(folder)
    check_holds_run(path)
    summary, config, history = path / "summary.json", path / "config.json", path / "events.jsonl"
    if summary.is_file():
        gone = _checked(summary, lambda: [str(name) for name in read_json(summary).get("removed_branches", [])])
        layers = _checked(summary, lambda: [_layer(*row) for row in read_json(summary)["layers"]])
        return Structure(str(path), layers, gone)
    gone_channels = _checked(history, lambda: _count(each_json_line(history)[1])) if removed is None else removed
    layers = _checked(config, lambda: layers_after(read_json(config)["layers"], gone_channels))
    if (path / "result" / "summary.json").is_file():
        # The events tell neither what the run started without, nor which layers went with a branch.
        return replace(read_structure(path / "result"), title=str(path))
    return Structure(str(path), layers)


def check_holds_run(folder: Path) -> None:
    """Raise if a folder holds neither a run nor a result."""
    if not any((folder / name).is_file() for name in ("summary.json", "config.json")):
        raise InvalidData(f"{folder} is neither a run nor a result", wanted="a config.json or a summary.json")


def _count(events: Iterable[dict[str, Any]]) -> dict[str, int]:
    """The channels of each group that all events together have removed."""
    removed: dict[str, int] = {}
    for event in events:
        for group, count in event.get("removed", {}).items():
            removed[group] = removed.get(group, 0) + count
    return removed


def _layer(name: str, before: int, after: int) -> Layer:
    if not isinstance(name, str):
        raise ValueError(f"a layer has the name {name!r:.40}")
    if not 0 <= after <= before < 2**31 or before < 1:
        raise ValueError(f"layer {name!r:.40} has {after!r:.20} of {before!r:.20} channels")
    return Layer(name, before, after)


def _checked(path: Path, read: Callable[[], Some]) -> Some:
    """What is read; raises an error with the path if the file does not have our form."""
    try:
        return read()
    except InvalidData:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidData(f"{path} is damaged, or of another version", got=repr(error)) from error
