"""Mean and standard deviation of runs that differ in their seed only."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, stdev

from secateur.results.report.read import COSTS, Run
from secateur.results.report.words import precise, sentence, share


def make_seeds(runs: Sequence[Run]) -> list[list[str]]:
    """A table, heads first: a row for every setting with several seeds; empty without any."""
    settings: dict[str, dict[object, Run]] = {}
    for run in runs:
        if run.finished and "seed" in run.settings:
            settings.setdefault(run.setting, {})[str(run.settings["seed"])] = run
    several = [list(seeds.values()) for seeds in settings.values() if len(seeds) > 1]
    metrics = list(dict.fromkeys(run.main_metric for each in several for run in each if run.main_metric is not None))
    rows = [
        [
            ", ".join(run.name for run in each),
            str(len(each)),
            *(_spread([run.metric(name)[1] for run in each]) for name in metrics),
            *(_spread([_left(run, key) for run in each], "%") for key in COSTS),
        ]
        for each in several
    ]
    heads = ["runs", "n", *map(sentence, metrics), *(f"{sentence(word)} left" for word in COSTS.values())]
    return [heads, *rows] if rows else []


def _left(run: Run, key: str) -> float | None:
    before, after = run.cost(key)
    left = share(after, before)
    return 100 * left if left is not None else None


def _spread(values: Sequence[float | None], unit: str = "") -> str:
    """Mean and standard deviation.

    >>> _spread([93.8, 93.9, 94.0]), _spread([40.0, 40.0], "%"), _spread([1.0, None])
    ('93.9 ± 0.1', '40% ± 0%', '-')
    """
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return "-"
    return f"{precise(mean(known))}{unit} ± {stdev(known):.2g}{unit}"
