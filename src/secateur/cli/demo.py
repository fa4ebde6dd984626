"""`secateur demo`."""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile

from secateur.cli.display import saved_in
from secateur.cli.options import Output


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Do the whole job on scikit-learn's handwritten digits: train a small ResNet, prune it by Tick-Tock, fine-tune it,
    verify the cut, time both, and save the result. About a minute on two cores, without a download.

    examples:
      secateur demo
      secateur demo --keep-macs 0.25 --out quarter
    """

    keep_macs: float = 0.4
    """Share of the MACs (multiply-adds) that is left."""

    out: Path = Path("secateur-demo")
    """Folder for the result."""

    seed: int = 0
    """Seed of everything random."""

    output: Output = field(default_factory=Output)

    def run(self) -> str:
        from secateur.recipes.demo import SETTINGS, run_demo

        settings = SETTINGS.but(keep_macs=self.keep_macs, seed=self.seed)
        self.out.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=self.out):
            pass  # raises now instead of at the end
        done = run_demo(self.out, settings, lambda text: print(text, file=sys.stderr, flush=True))
        if self.output.json:
            return json.dumps(done.to_dict())
        print(file=sys.stderr)
        return f"{done}\n\n{saved_in(self.out)}\nreport: {done.page}"
