"""A result on disk: the plan, the weights, the history, a summary, and a card for people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from secateur.channels.guard import check_extra_state
from secateur.channels.shrink import tensors_of
from secateur.data.preprocessing import Preprocessing
from secateur.errors import InvalidSetting
from secateur.files import serialize, to_json, write_together
from secateur.models.lookup import is_known
from secateur.results.summary import summarize
from secateur.runs.events import Result
from secateur.runs.record import kind_of
from secateur.words import digits

FILES = (".bin", ".ckpt", ".onnx", ".pt", ".pth", ".safetensors")
"""Endings of files that hold a network."""
SHOWN = 50
"""Names of classes in a card."""


def save(result: Result, path: str | Path, **about: Any) -> Path:
    """Write the result into a folder: `plan.json`, `model.safetensors`, `history.jsonl`, `summary.json` and `card.md`.

    An earlier result in the folder stays until the new one is on the disk, and is then replaced. `about` is plain data
    for the summary, such as where the network came from. Three of its names are read again: `network` (name and
    options), `classes` (their names) and `preprocessing` (a `Preprocessing(...).to_dict()`).
    """
    _check(result, about)
    folder = Path(path)
    if not folder.is_dir() and (folder.exists() or folder.suffix.lower() in FILES):
        raise InvalidSetting(
            f"{path} is the name of a file, and a result is several",
            wanted="a folder",
            remedy=f"For weights alone: secateur.export(result, {str(folder.with_suffix('.safetensors'))!r})",
        )
    write_result(result, folder, about)
    return folder


def _check(result: Any, about: dict[str, Any]) -> None:
    if not isinstance(result, Result):
        remedy = "For a model: secateur.export(model, 'model.safetensors')"
        got, wanted = type(result).__name__, "what prune or train gives"
        raise InvalidSetting("this is no result", got=got, wanted=wanted, remedy=remedy)
    network, classes = about.get("network"), about.get("classes")
    if network is not None and not (isinstance(network, Mapping) and isinstance(network.get("name"), str)):
        raise InvalidSetting("network is wrong", got=network, wanted='{"name": "resnet56", "options": {}}')
    if classes is not None and not (
        isinstance(classes, list | tuple) and all(isinstance(name, str) for name in classes)
    ):
        raise InvalidSetting("classes are wrong", got=classes, wanted="a list of names")


def write_result(result: Result, folder: Path, about: dict[str, Any], more: Mapping[str, bytes] | None = None) -> None:
    """Write the files of `save`, and more of them."""
    check_extra_state(result.model)
    history = "".join(to_json(event.to_dict()) + "\n" for event in result.history)
    plan = {**result.plan.to_dict(), "network": about.get("network")}
    files = {
        **(more or {}),
        "model.safetensors": serialize(tensors_of(result.model)),
        "history.jsonl": history,
        "card.md": card(result, about),
        "plan.json": json.dumps(plan),  # a folder with a plan can be loaded,
        "summary.json": to_json(summarize(result, about), indent=2),  # and one with a summary holds a whole result
    }
    write_together(folder, files)


def _inputs(about: dict[str, Any]) -> str:
    """The classes and the preprocessing, in words, as far as they are known."""
    classes, preprocessing = about.get("classes"), about.get("preprocessing")
    text = f"What an image goes through: {Preprocessing.from_dict(preprocessing)}.\n\n" if preprocessing else ""
    if classes:
        more = f" and {len(classes) - SHOWN} more, in summary.json" if len(classes) > SHOWN else ""
        names = ", ".join(f"`{name}`" for name in classes[:SHOWN])
        text += f"Classes, in the order of the outputs: {names}{more}.\n\n"
    return text


def card(result: Result, about: dict[str, Any]) -> str:
    """The network before and after, and how to load it."""
    settings = json.dumps(result.settings.to_dict(), indent=2, default=list)
    network = about.get("network")
    is_ours = network is not None and is_known(network["name"])
    call = "secateur.load(folder)"
    if not is_ours:
        call = "secateur.load(folder, build=build)  # build() makes the network as it was before pruning"
    whose = f", {network['name']}" if network is not None else ""
    known = {name: digits(value) for name, value in result.metrics_before.items()}
    metrics = "".join(f"| {name} | {known.get(name, '-')} | {digits(v)} | |\n" for name, v in result.metrics.items())
    taken = about.get("latency")
    latency = ""
    if taken is not None:
        before, after = taken["before"], taken["after"]
        runtime = f", {taken['how']}" if "how" in taken else ""
        where = f"time in ms ({taken['device']}{runtime}, batch {taken['batch']})"
        latency = f"| {where} | {1000 * before:.2f} | {1000 * after:.2f} | {after / before:.1%} |\n"
    checked = f"The cut was checked: {result.verification}.\n\n" if result.verification is not None else ""
    told = "\ntold = secateur.results.load.about(folder)  # told.classes, told.preprocessing" if _inputs(about) else ""
    is_whole = bool(result.plan.kept.all()) and not result.plan.without
    done = "trained" if is_whole and kind_of(result.settings) == "train" else "pruned"
    return f"""# {type(result.model).__name__}, {done} by Secateur{whose}

| | before | after | left |
|---|---|---|---|
| MACs | {result.before.macs:,} | {result.after.macs:,} | {result.after.macs / result.before.macs:.1%} |
| parameters | {result.before.params:,} | {result.after.params:,} | {result.after.params / result.before.params:.1%} |
{metrics}{latency}
MACs are multiply-adds of convolutions, linear layers and other matrix products, for an input of
{result.plan.graph.input}.

{checked}{_inputs(about)}To load it, with `folder` for where this card is:

```python
import secateur

model = {call}{told}
```

Settings:

```json
{settings}
```
"""
