"""Cut the networks of `packages.py` with every release of their packages from the last two years.

    python benchmarks/releases.py                   every package and release
    python benchmarks/releases.py --only 'timm'     one package, merged into what is there
    python benchmarks/releases.py --resume          releases without a result
    python benchmarks/releases.py --page            only the page, from the data

Every release is installed with pip into a folder of its own, with what it needs of packages that are not here. A
process with that folder in front measures the networks. docs/releases.json is written after every release,
docs/releases.md at the end. The newest releases come first, then the oldest, then those between, of all packages in
turn, so that a run that is stopped has seen both ends.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from fnmatch import fnmatchcase
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

import coverage
import packages
import releases_page
from packages_list import NETWORKS
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from secateur import errors

DOCS = Path(__file__).parent.parent / "docs"
SINCE = "2024-11-19"
OLDEST = {
    "timm": "1.0.12",
    "segmentation-models-pytorch": "0.4.0",
    "ultralytics": "8.3.34",
    "transformers": "4.47.0",
    "monai": "1.5.0",
    "diffusers": "0.32.0",
    "kornia": "0.8.0",
    "braindecode": "1.0.0",
    "speechbrain": "1.0.3",
    "python-doctr": "0.11.0",
    "vit-pytorch": "1.8.9",
    "open_clip_torch": "2.30.0",
    "spandrel": "0.4.1",
    "torchxrayvision": "1.3.1",
    "denoising-diffusion-pytorch": "2.2.0",
    "dynamic-network-architectures": "0.4.1",
    "super-image": "0.2.0",
    "demucs": "4.1.0",
}
"""The first release since then, by the dates inside of the archives: an index need not tell dates. Most used first."""
MANY = 20
"""Releases in the window above which only every minor's last one is taken, and the oldest."""
KEPT = {"torch", "torchvision", "torchaudio", "numpy", "scipy", "triton"}
"""Never replaced: a release that pins another version of these gets the one that is here."""
BESIDES = {"monai": ["einops"]}
"""What networks need that their package does not require."""
SECONDS = 60
"""For one network, on average; a release that takes longer is stopped."""
OUTCOMES = ("equal", "uncut", "refused", "failed", "wrong", "not built")
Row = dict[str, Any]


def choose(versions: list[str], oldest: str) -> list[str]:
    """The final releases since the oldest, newest first; of very many the oldest and every minor's last."""
    final = [text for text in versions if not Version(text).is_prerelease and Version(text) >= Version(oldest)]
    final.sort(key=Version, reverse=True)
    if len(final) > MANY:
        last: dict[tuple[int, ...], str] = {}
        for text in final:
            last.setdefault(Version(text).release[:2], text)
        final = [text for text in final if text in last.values() or text == final[-1]]
    return final


def ordered(chosen: dict[str, list[str]]) -> list[tuple[str, str]]:
    """Of every package the newest release, then the oldest, then the second newest, and so on."""
    turns = {package: [*found[:1], *found[1:][-1:], *found[1:-1]] for package, found in chosen.items()}
    longest = max(map(len, turns.values()), default=0)
    return [(package, found[turn]) for turn in range(longest) for package, found in turns.items() if turn < len(found)]


def sort_out(row: Row) -> tuple[str, Any]:
    """One of the outcomes, with the seconds of the analysis or with what was said."""
    if row["outcome"] in ("exact", "uncut"):
        return ("equal" if row["outcome"] == "exact" else "uncut"), row["seconds"]
    if row["outcome"] in ("missing", "not built"):
        return "not built", coverage.shorten(row["error"], 160)
    kind = getattr(errors, row["error"].partition(":")[0], None)
    if "compared" in row or kind is errors.NotEquivalent:
        return "wrong", row["error"]
    ours = isinstance(kind, type) and issubclass(kind, errors.SecateurError)
    return ("refused" if ours else "failed"), row["error"]


def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def install(requirement: str, folder: Path) -> str:
    """What was wrong, if anything."""
    done = pip("install", "--quiet", "--no-deps", "--target", str(folder), requirement)
    lines = [line for line in done.stderr.splitlines() if "error" in line.lower()]
    return coverage.shorten(" ".join(lines) or "pip failed", 200) if done.returncode else ""


def needs(folder: Path, shared: Path) -> dict[str, Path]:
    """Requirements that are not met, and where to install each: another version of what is here goes to the release."""
    own = list(distributions(path=[str(folder)]))
    others = list(distributions(path=[str(shared)]))
    found: dict[str, str] = {}
    for one in [*own, *others, *distributions()]:
        found.setdefault(canonicalize_name(one.name), one.version)
    wanted = {}
    for one in [*own, *others]:
        for needed in map(Requirement, one.requires or []):
            name = canonicalize_name(needed.name)
            if needed.marker and not needed.marker.evaluate({"extra": ""}):
                continue
            if name not in found:
                wanted[name if name in KEPT else f"{name}{needed.specifier}"] = shared
            elif name not in KEPT and one in own and not needed.specifier.contains(found[name], prereleases=True):
                wanted[f"{name}{needed.specifier}"] = folder
    return wanted


def without_places(text: str, folder: Path) -> str:
    """What was said, without the places of this machine."""
    for place in (folder.parent, sys.prefix, DOCS.parent):
        text = text.replace(f"{place}/", "")
    return text


def prepare(package: str, release: str, folder: Path, shared: Path) -> Row:
    """Install a release and what it lacks; whether that went well, and what could not be had."""
    error = install(f"{package}=={release}", folder)
    if error:
        return {"installs": False, "error": error}
    without = {text for text in BESIDES.get(package, ()) if not (shared / text).exists() and install(text, shared)}
    while wanted := {text: place for text, place in needs(folder, shared).items() if text not in without}:
        without |= {text for text, place in wanted.items() if install(text, place)}
        without |= {text for text, place in wanted.items() if place == folder}  # once is enough
    for library in shared.glob("torchaudio/lib/*.so"):  # for CUDA, and not for this torch: torchaudio goes without
        library.unlink()
    unmet = {text for text in needs(folder, shared) if text in without}
    return {"installs": True} | ({"without": sorted(unmet)} if unmet else {})


def measure(package: str, release: str, folder: Path, shared: Path) -> Row:
    """The networks of a package, with that release in front, in a process that may fail or run out of time."""
    names = [network.name for network in NETWORKS if network.package == package]
    places = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")]), str(shared)]
    setting = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(places)}
    command = [sys.executable, "-W", "ignore", __file__, "--worker", package, release]
    seconds = SECONDS * (len(names) + 1)
    with tempfile.TemporaryFile("w+") as answers, tempfile.TemporaryFile("w+") as complaints:
        try:
            code = subprocess.run(command, stdout=answers, stderr=complaints, timeout=seconds, env=setting).returncode
            complaints.seek(0)
            ended = without_places(f"exit status {code}: {complaints.read()}" if code else "no answer", folder)
        except subprocess.TimeoutExpired:
            ended = f"the release takes more than {seconds} s"
        answers.seek(0)
        rows = [json.loads(without_places(line, folder)) for line in answers if line.startswith('{"package"')]
    seen = {row["name"]: row for row in rows}
    result: Row = {"imports": any(row["outcome"] != "missing" for row in rows)}
    if not result["imports"]:
        return result | {"error": coverage.shorten(rows[0]["error"] if rows else ended, 200)}
    for name in names:
        outcome, value = sort_out(seen.get(name, {"outcome": "failed", "error": coverage.shorten(ended, 300)}))
        result.setdefault(outcome, {})[name] = value
    return result


def work(package: str, release: str) -> None:
    """In the process of a release: one line for every network."""
    if Version(version(package)) != Version(release):
        raise SystemExit(f"{package} {version(package)} is imported instead of {release}")
    for network in NETWORKS:
        if network.package == package:
            print(json.dumps(packages.measure(network)), flush=True)


def save(path: Path, chosen: dict[str, int], rows: list[Row]) -> None:
    """How many releases are to be tried, and one line for each that was, newest first."""
    rank = {package: place for place, package in enumerate(OLDEST)}
    rows.sort(key=lambda row: Version(row["release"]), reverse=True)
    rows.sort(key=lambda row: rank[row["package"]])
    lines = ",\n".join(json.dumps(row) for row in rows)
    path.write_text(f'{{"since": "{SINCE}", "chosen": {json.dumps(chosen)}, "rows": [\n{lines}\n]}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="packages whose name matches")
    parser.add_argument("--resume", action="store_true", help="only releases without a result")
    parser.add_argument("--page", action="store_true", help="measure nothing, write the page")
    parser.add_argument("--worker", nargs=2, metavar=("PACKAGE", "RELEASE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(*options.worker)
        return
    path = DOCS / "releases.json"
    data = json.loads(path.read_text()) if path.exists() else {"chosen": {}, "rows": []}
    rows = [row for row in data["rows"] if row["package"] in OLDEST]
    chosen = {}
    for package, oldest in OLDEST.items():
        if fnmatchcase(package, options.only) and not options.page:
            listed = re.search(r"Available versions: (.*)", pip("index", "versions", package).stdout)
            chosen[package] = choose(listed[1].split(", ") if listed else [], oldest)
    known = {(row["package"], row["release"]): row for row in rows}
    counted = data["chosen"] | {package: len(found) for package, found in chosen.items()}
    todo = [pair for pair in ordered(chosen) if not (options.resume and pair in known)]
    with tempfile.TemporaryDirectory() as place:
        shared = Path(place) / "shared"
        for done, (package, release) in enumerate(todo, 1):
            folder = Path(place) / f"{package}-{release}"
            row = {"package": package, "release": release, **prepare(package, release, folder, shared)}
            if row["installs"]:
                row |= measure(package, release, folder, shared)
            shutil.rmtree(folder, ignore_errors=True)
            known[package, release] = row
            save(path, counted, list(known.values()))
            counts = {name: len(row[name]) for name in OUTCOMES if name in row}
            print(f"[{done}/{len(todo)}] {package} {release}: {row.get('error', counts)}", file=sys.stderr, flush=True)
    (DOCS / "releases.md").write_text(releases_page.markdown(counted, list(known.values()), SINCE, OLDEST))


if __name__ == "__main__":
    main()
