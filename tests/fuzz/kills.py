"""Kill a run at random moments and resume it, again and again: it must end with the same bits as one that is not.

python tests/fuzz/kills.py --count 100 --seed 0
python tests/fuzz/kills.py --count 100 --seed 0 --device cuda

The run trains, prunes, repairs and fine-tunes. It is killed at a random moment after it takes its folder, or after it
saves a checkpoint. When it ends, all that it leaves is compared; another is begun until all kills are done.
"""

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS / "shim"), str(TESTS / "support")]

from killing import begin, check_same, finish, has_begun, has_saved, kill, outcome, place, resume  # noqa: E402

AT_ONCE = 0.05
"""Seconds: many files are written right after the moments from which they are counted."""
AT_MOST = 25
"""Kills of one run; all of them may hit one phase."""


def one_run(folder: Path, dice: random.Random, within: float, most: int, device: str, killed: Counter[str]) -> None:
    """Kill a run at most so often, and let it end."""
    kills, most = 0, min(most, AT_MOST)
    while True:
        begun = (folder / "config.json").exists()
        process = resume(folder, "--device", device) if begun else begin(folder, device)
        reached, moment = dice.choice([has_begun, has_saved]), dice.uniform(0, dice.choice([AT_ONCE, within]))
        if kills < most and reached(process, folder):
            time.sleep(moment)
            if process.poll() is None:
                kill(process)
                kills += 1
                where = place(folder)
                killed[where.split(",")[0]] += 1
                print(f"{killed.total():3}  {moment:.2f} s after {reached.__name__}: resumes at {where}", flush=True)
                continue
        status, _, err = finish(process)
        if status == 0:
            return
        raise AssertionError(f"the run in {folder} ended with {status}: {err}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--within", type=float, default=1.0, help="kill so many seconds later at most")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    dice, killed, runs = random.Random(options.seed), Counter[str](), 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        process = begin(folder / "whole", options.device)
        status, _, err = finish(process)
        assert status == 0, err
        whole = outcome(folder / "whole")
        while killed.total() < options.count:
            own = folder / f"run{runs}"
            one_run(own, dice, options.within, options.count - killed.total(), options.device, killed)
            check_same(outcome(own), whole)
            runs += 1
            print(f"run {runs} is the same to the last bit", flush=True)
    places = ", ".join(f"{where} {count}" for where, count in sorted(killed.items()))
    print(f"{killed.total()} kills of {runs} runs, all with the same bits. Resumed at: {places}")


if __name__ == "__main__":
    main()
