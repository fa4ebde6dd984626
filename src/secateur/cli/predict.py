"""`secateur predict`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from secateur.cli.display import waiting
from secateur.cli.options import Output
from secateur.errors import InvalidSetting
from secateur.files import to_json

if TYPE_CHECKING:
    from secateur.results.predict import Prediction


@dataclass(frozen=True, kw_only=True)
class Predict:
    """Show the most probable classes of photographs: by the pruned network, and by the whole one where the run has it.

    examples:
      secateur predict runs/pruned photo.jpg
      secateur predict runs/pruned photos/cat/*.jpg --top 3 --json
    """

    network: Path
    """A run or its result."""

    images: tuple[Path, ...]
    """Image files."""

    top: int = 5
    """Classes to show per image."""

    build: str | None = None
    """What makes the whole network, where that is your own code: package.module:callable."""

    output: Output = field(default_factory=Output)

    def run(self) -> str:
        from secateur.results.predict import predict

        if not self.images:
            remedy = "Name one or several: secateur predict runs/pruned photo.jpg"
            raise InvalidSetting("no image is named", remedy=remedy)
        if self.top < 1:
            raise InvalidSetting("--top is out of range", got=self.top, wanted="1 or more")
        with waiting(f"predicting with {self.network}"):
            found = predict(self.network, self.images, self.build)
        if self.output.json:
            return to_json([{"image": each.image, **each.top(self.top)} for each in found])
        return "\n\n".join(_table(each, self.top) for each in found)


def _table(prediction: Prediction, top: int) -> str:
    """The best classes of an image, one network beside the other."""
    columns, best = prediction.probabilities, prediction.best(top)
    wide = max(len(name) for name in best) + 2
    heads = "".join(f"{name:>9}" for name in columns) if len(columns) > 1 else ""
    rows = [f"  {name:<{wide}}" + "".join(f"{column[name]:>9.1%}" for column in columns.values()) for name in best]
    return "\n".join([prediction.image, *([f"  {'':<{wide}}{heads}"] if heads else []), *rows])
