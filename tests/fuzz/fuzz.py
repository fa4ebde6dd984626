"""Random networks for as long as you like: python tests/fuzz/fuzz.py --count 20000 --seed 0

Every failure is printed with the seed that repeats it: --count 1 --seed N.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).parent.parent / folder) for folder in ("shim", "support")]

import torch  # noqa: E402
from cases import Found, case_of  # noqa: E402
from checks import Outcome, check  # noqa: E402
from grammar import STEPS  # noqa: E402

CLEAN = {"chain", "residual", "transposed", "coupled", "excited", "tied", "other_dimensions", "computed"}
"""Steps whose code takes sizes from no shape that a cut changes."""

MIX = sorted([*STEPS, *["chain", "residual"] * 2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="networks")
    parser.add_argument("--seed", type=int, default=0, help="of the first; each next has the next number")
    parser.add_argument("--steps", nargs="*", default=MIX, help="what they are made of")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after that")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    started, counts, refused = time.monotonic(), Counter[str](), Counter[str]()
    for seed in range(options.seed, options.seed + options.count):
        if time.monotonic() - started > 60 * options.minutes:
            break
        counts["tried"] += 1
        try:
            outcome = one(seed, options.steps)
        except Exception as error:
            counts["found"] += 1
            kind = str(error) if isinstance(error, Found) else traceback.format_exc(limit=-4)
            print(f"FOUND --seed {seed}: {kind}", flush=True)
            continue
        if outcome.refused:
            counts["refused"] += 1
            refused[outcome.refused[:100]] += 1
        counts["with channels"] += outcome.channels > 0
        counts["channels"] += outcome.channels
        counts["plans"] += outcome.plans
        counts["with branches"] += outcome.branches > 0
        counts.update(outcome.done)
        if counts["tried"] % 100 == 0:
            print(f"{time.monotonic() - started:.0f} s: {dict(counts)}", flush=True)
    print(f"{time.monotonic() - started:.0f} s: {dict(counts)}")
    for text, number in refused.most_common(20):
        print(f"refused {number} times: {text}")


def one(seed: int, steps: list[str]) -> Outcome:
    """Also without the probe, where no code writes down a size or computes with one."""
    case = case_of(seed, steps)
    rare = [part for number, part in enumerate(("program", "again", "loop")) if (seed + number) % 20 == 0]
    return check(case, seed % 4 > 0 or not CLEAN.issuperset(case.network.kinds), ["gates", "repair", "folder", *rare])


if __name__ == "__main__":
    main()
