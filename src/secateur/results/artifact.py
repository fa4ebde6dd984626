"""A result on disk: the plan, the weights, the history, and a card that says what it is."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import save_model

from secateur.results.summary import summarize
from secateur.ticktock.events import Result


def save(result: Result, path: str | Path, **about: Any) -> Path:
    """Write the result into a folder: `plan.json`, `model.safetensors`, `history.jsonl`, `summary.json` and `card.md`.

    Each file appears whole or not at all; files of an earlier result in the same folder are replaced. `about` is plain
    data for the summary: where the network came from, say.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    history = "".join(json.dumps(event.to_dict()) + "\n" for event in result.history)
    write(folder / "model.safetensors", lambda target: save_model(result.model, str(target)))
    write(folder / "history.jsonl", lambda target: target.write_text(history))
    summary = json.dumps(summarize(result, about), indent=2)
    write(folder / "summary.json", lambda target: target.write_text(summary))
    write(folder / "plan.json", lambda target: target.write_text(result.plan.to_json()))
    write(folder / "card.md", lambda target: target.write_text(card(result)))
    return folder


def write(path: Path, fill: Callable[[Path], object]) -> None:
    """Let `fill` write a new file beside it, then put that in its place."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        fill(Path(name))
        # A new file of the user's, not one of tempfile's that nobody else may read.
        mask = os.umask(0)
        os.umask(mask)
        Path(name).chmod(0o666 & ~mask)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def card(result: Result) -> str:
    """What the network was, what it is, and how to load it."""
    settings = json.dumps(result.settings.to_dict(), indent=2, default=list)
    return f"""# {type(result.model).__name__}, pruned by Secateur

| | before | after | left |
|---|---|---|---|
| MACs | {result.before.macs:,} | {result.after.macs:,} | {result.after.macs / result.before.macs:.1%} |
| parameters | {result.before.params:,} | {result.after.params:,} | {result.after.params / result.before.params:.1%} |
{"".join(f"| {n} | {a:.4g} | {result.metrics[n]:.4g} | |{chr(10)}" for n, a in result.metrics_before.items())}
MACs are multiply-adds of convolutions and linear layers for an input of {result.plan.graph.input}.

To load it, with `build()` for what made the network and `example` for an input of that size:

```python
from pathlib import Path
import safetensors.torch, secateur

model = build()
graph = secateur.analyze(model, example)
secateur.shrink_(model, secateur.Plan.from_json(graph, Path("plan.json").read_text()))
safetensors.torch.load_model(model, "model.safetensors")
```

Settings:

```json
{settings}
```
"""
