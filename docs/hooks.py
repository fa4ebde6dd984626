"""Fills pages when the site is built: with the help of commands, the folders of datasets, and files of the project.

Pages say where with `<!-- commands -->`, `<!-- datasets -->`, `<!-- CONTRIBUTING.md -->` and the like.
"""

import contextlib
import io
import os
import re
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any
from unittest import mock

DOCS = Path(__file__).parent
WIDTH = "84"
MEASURED = "Measured"
"""The part of the navigation for pages that benchmarks write."""


def on_config(config: Any) -> Any:
    """Add pages of benchmarks that the navigation does not list."""
    for part in config.nav:
        if MEASURED in part:
            listed = {next(iter(entry.values())) for entry in part[MEASURED]}
            for page in sorted(DOCS.glob("*.md")):
                made = "\nMade by `" in page.read_text()[:2000]
                if made and page.name not in listed and page.name != "coverage.md":
                    part[MEASURED].append({title_of(page): page.name})
    return config


def on_page_markdown(markdown: str, **about: Any) -> str:
    """Replace the placeholders of a page."""
    for place, make in (("<!-- commands -->", commands), ("<!-- datasets -->", datasets)):
        if place in markdown:
            markdown = markdown.replace(place, make())
    for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"):
        if f"<!-- {name} -->" in markdown:
            # Its links are relative to the root of the project, those of the page to docs/.
            text = (DOCS.parent / name).read_text().replace("](docs/", "](")
            markdown = markdown.replace(f"<!-- {name} -->", text)
    return markdown


def title_of(page: Path) -> str:
    return page.read_text().partition("\n")[0].removeprefix("# ")


def commands() -> str:
    """Every command with its help."""
    from secateur.cli.command import commands as known_commands

    known = known_commands()
    rows = [f"| [`{name}`](#secateur-{name}) | {summary_of(kind)} |" for name, kind in known.items()]
    parts = ["| command | |", "|---|---|", *rows]
    for name in known:
        parts += ["", f"## secateur {name}", "", "```text", help_of(name), "```"]
    return "\n".join(parts)


def summary_of(kind: Any) -> str:
    """The first sentence of a command's description."""
    return re.split(r"(?<=\.) |\n\n", " ".join(dedent(kind.__doc__).split("\n\n")[0].split()))[0].removesuffix(".")


def help_of(name: str) -> str:
    """What `secateur NAME --help` prints, at a fixed width, without colours and frames."""
    from secateur.cli import main

    # With an encoding, as a terminal has: the parser chooses its frames by it.
    printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    with (
        mock.patch.dict(os.environ, COLUMNS=WIDTH, NO_COLOR="1"),
        mock.patch.object(sys, "path", [*sys.path]),
        contextlib.redirect_stdout(printed),
        contextlib.suppress(SystemExit),
    ):
        main([name, "--help"])
    printed.seek(0)
    return unframed(printed.read())


def unframed(text: str) -> str:
    """Without the frames around groups of options; their titles stand by themselves.

    >>> print(unframed("╭─ options ───╮\\n│ -h   help   │\\n│ ─────────── │\\n╰─────────────╯"))
    options:
      -h   help
    """
    lines = []
    for line in text.rstrip().splitlines():
        if title := re.fullmatch(r"╭─ (.*?) ─*╮", line):
            lines += ["", f"{title[1]}:"]
        elif row := re.fullmatch(r"│ (.*) │", line):
            if set(row[1]) != {"─"}:
                lines.append(f"  {row[1]}".rstrip())
        elif not line.startswith("╰"):
            lines.append(line.rstrip())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")


def datasets() -> str:
    """Every dataset, with the folder that its reader expects."""
    from secateur.data.catalog import DATASETS

    parts = []
    for name, dataset in DATASETS.items():
        size = "x".join(map(str, dataset.input_size))
        labels = (
            "a label for each pixel" if dataset.maps else "a label for each image" if dataset.labelled else "no labels"
        )
        parts += ["", f"## {dataset.summary[0].upper()}{dataset.summary[1:]} {{ #{name} }}", ""]
        parts.append(f"`NETWORK@{name}`: images of {size}, {labels}, batches of {dataset.batch_size} by default.")
        if dataset.folder:
            module, function = dataset._home()
            layout = getattr(module, function.upper().removesuffix("_SEGMENTATION"))
            parts += ["", f"Made from {layout.source}.", "", "```text", layout.tree, "```"]
        else:
            parts += ["", "Comes with scikit-learn; there is no folder."]
    return "\n".join(parts)
