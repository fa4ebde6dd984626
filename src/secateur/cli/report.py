"""`secateur report`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True, kw_only=True)
class Report:
    """Make one page about runs, side by side: charts of what happened, what is left, and how it was set.

    The page needs no other file and no network. A run may still be going on; --live shows it as it does. Of finished
    runs that differ in their seed alone the page also has the mean ± standard deviation.

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

    live: bool = False
    """Serve the page instead, for this machine only, with numbers that follow the run; Ctrl-C ends it."""

    port: int = 0
    """Where to serve it; 0: wherever there is room."""

    json: bool = False
    """Print where the page is as JSON."""

    debug: bool = False
    """Show the traceback of an error."""

    def run(self) -> str:
        from secateur.results.report import serve, write_report

        if self.live:
            serve(self.runs, self.port, lambda address: print(self._say(address), flush=True))
            return ""
        return self._say(str(write_report(self.runs, self.out)))

    def _say(self, page: str) -> str:
        return json.dumps({"page": page}) if self.json else page
