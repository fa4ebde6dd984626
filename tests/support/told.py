"""Runs and events of training, written by hand."""

import json
from pathlib import Path
from typing import Any

from secateur.files import read_json_lines, to_json


def write_training(folder: Path, like: Path) -> None:
    """Two epochs of training of the network of another run."""
    folder.mkdir()
    config = json.loads((like / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "kind": "train", "settings": {"epochs": 2, "seed": 0}}))
    write_events(folder, [train_event(like, "train", epoch) for epoch in (1, 2)])


def train_event(like: Path, phase: str, epoch: int) -> dict[str, Any]:
    """An epoch of training of the network of another run."""
    start = read_json_lines(like / "events.jsonl")[0]
    return {**start, "event": "Train", "phase": phase, "epoch": epoch, "epochs": 2, "loss": 1 / epoch}


def write_events(folder: Path, events: list[dict[str, Any]]) -> None:
    (folder / "events.jsonl").write_text("".join(to_json(event) + "\n" for event in events))
