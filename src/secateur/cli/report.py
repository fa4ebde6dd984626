"""`secateur report`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from secateur.cli.flags import Switch
from secateur.cli.options import Output


@dataclass(frozen=True, kw_only=True)
class Report:
    """Make one page about runs, side by side: charts of what happened, what is left, and how it was set.

    The page needs no other file and no network. A run need not be finished; --live follows it. For finished runs
    that differ only in their seed the page also has the mean ± standard deviation.

    examples:
      secateur report runs/digits
      secateur report runs/tick-only runs/tick-tock -o compared.html
      secateur report runs/seed0 runs/seed1 runs/seed2
      secateur report runs/digits --live
    """

    runs: tuple[Path, ...]
    """Folders of runs, finished or not, or of results."""

    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("report.html")
    """File of the page."""

    live: Switch = False
    """Serve the page instead, on this machine only, and update it while the run trains; Ctrl-C ends it."""

    port: int = 0
    """Port to serve it at; 0 for any that is free."""

    output: Output = field(default_factory=Output)

    def run(self) -> str:
        from secateur.results.report import serve, write_report

        if self.live:
            serve(self.runs, self.port, lambda address: print(self._text(address), flush=True))
            return ""
        return self._text(str(write_report(self.runs, self.out)))

    def _text(self, page: str) -> str:
        return json.dumps({"page": page}) if self.output.json else page
