"""The section on how our recipe was chosen: the runs on images held out, and how their settings differ."""

from __future__ import annotations

from typing import Any

from evidence import Evidence, accuracy, cost

from secateur.recipes.reports import in_markdown as table
from secateur.runs.settings import TickTock
from secateur.settings import flat_fields
from secateur.training.settings import Learning, Schedule

SEARCH = """\
We chose it on images held out: networks of our own were trained on 45,000 of the training images and pruned to 30% of
the MACs, with `secateur prune` and `secateur train --weights RUN`, `--hold-out 5000` and the flags in the table.
Accuracy is over the 5,000 images that neither the network nor the run has seen; the standard error of one such number
is 0.35, and the same run twice (w-erase, w2-erase) came to 94.44 and 94.14. Those with w- and w2- are the whole
network, trained from a file of random weights (w-labels-again: from w-labels); those with s-, t- and u- are pruned from
one of them, u- to 40% of the MACs.

{table}

What pays most is to erase a square of 8x8 pixels of every training image. The whole network, from random weights and on
the labels alone, comes to 94.44 and 94.14 with it and to 93.52 without; a pruned network that learns from the latter to
93.58 and 93.34 (s-erase, s-labels), and one that learns from the former to 93.84 (s-erase-erase). The loss on the
held-out images says it more clearly: 0.20 and 0.19 against 0.25 for the whole network; 0.26 and, with squares erased
for both, 0.23 against 0.30 for the pruned one.

What seems to pay, as most other differences here are about a standard error: learning from the whole network's outputs
(tune-10 93.64; from labels alone, tune-10-labels, 93.22, but with the lower loss, 0.24 against 0.30); a learning rate
up to .1 in batches of 128 (.02: 93.36); training the whole network once more (from 93.64 to 94.40, and from 93.52 to
94.20, both from its own outputs; the recipe does it on the labels); and length (60 epochs 93.56, 200 epochs 93.76).

What makes no difference that 5,000 images could show: batches of 256 with twice the rate; ten Ticks that remove 4% each
after seeing a fifth of the images (fast-auto 93.34) instead of Ticks of 2% after seeing all (again-tick-2 93.46); by
how much cost counts in the ranking (fast-auto not at all, fast-power-50 and s-power-50 by its root); twice the epochs
for the whole network; shifts that are trained in Ticks, ten times the L1 term, floors of a quarter of every layer and
Fisher's score (t-, all within 0.1 of t-ref; the loss is best with shifts, 0.239, and worst with Fisher's score, 0.254,
against 0.241); weight decay 2e-4 (s-wd2); a temperature of 2; Nesterov's momentum (w2-nesterov 94.68, but the loss is
the same) and a moving average of the weights (w2- and u-; it lowers the whole network's loss from 0.193 to 0.180, and
not that of a network which learns from it, 0.211 and 0.212, whose accuracy is 93.68 against 94.18).

What does not pay: batches of 512; weight decay 1e-3, or none on norms (w-nodecay); multiples of 8, which at this budget
leave 8 channels between any two convolutions of a block; and mixtures of two images, pasted or blended, for both
networks to look at. Those lower the loss on the held-out images (0.28 and 0.29 against 0.33) and not the error, so that
there is no setting for them.

So the recipe now trains the whole network for 80 epochs more, on the labels; prunes it in Ticks of 4% on a fifth of the
images; and fine-tunes for 200 epochs; all with squares erased and in batches of 256."""
FIRST: dict[str, Any] = TickTock.of(
    keep_macs=0.3,
    multiple_of=1,
    tick_removes=0.02,
    rank="score_per_mac",
    rank_power=0.25,
    weight_decay=5e-4,
    tock_first=True,
    distill=0.9,
    finetune_epochs=100,
    finetune_shape="warmup",
    finetune_lr=0.1,
    finetune_lr_low=0.0,
).to_dict() | {"batch_size": 128, "erase": 0}
FIRST |= {name: FIRST[f"finetune_{name}"] for name in flat_fields(Schedule)}
"""Our recipe when the search began; its fine-tuning by the names of plain training too."""
FORMER: dict[str, Any] = FIRST | {
    "ticks_per_tock": FIRST["tock_every"],
    "sparsity": FIRST["tock_sparsity"],
    "tock_lr": [FIRST["tock_lr_low"], FIRST["tock_lr"]],
    "finetune_lr": [FIRST["finetune_lr_low"], FIRST["finetune_lr"]],
    "milestones": FIRST["finetune_milestones"],
    "milestone_divides": FIRST["finetune_divide"],
    "distill_mix": "none",
}
"""The same by the names of that time, which the runs of the search have."""
OF_TRAINING = {
    *(prefix + name for prefix in ("finetune_", "") for name in ("epochs", "lr", "shape")),
    *flat_fields(Learning),
    "distill_mix",
    "batch_size",
    "erase",
}
"""The settings that matter in a run which removes nothing."""


def search(runs: dict[str, list[Evidence]]) -> tuple[str, list[Evidence]]:
    """The text, and the runs in it."""
    # What was pruned first, then what was only trained.
    ordered = sorted(runs.values(), key=lambda each: (each[0].trains_only, each[0].name))
    rows = [
        [each[0].name, start_of(each[0]), differences(each[0]), *cost(each), *accuracy(each)[1:]] for each in ordered
    ]
    heads = [
        "run",
        "starts from",
        "settings, where they differ from the recipe's first version",
        "MACs",
        "parameters",
        "accuracy",
        "n",
    ]
    return SEARCH.format(table=table(heads, rows)), [run for each in ordered for run in each]


def start_of(run: Evidence) -> str:
    weights = run.data["order"]["weights"]
    return weights.removesuffix(f"-seed{run.seed}") if weights is not None else "random weights"


def differences(run: Evidence) -> str:
    """From the recipe's first version, in what matters for this run."""
    settings = run.data["settings"] | {key: run.data["order"][key] for key in ("batch_size", "erase")}
    first = FORMER if "ticks_per_tock" in settings else FIRST
    changed = {
        key: value
        for key, value in settings.items()
        if value != first[key] and key not in ("seed", "evaluate", "keep_macs")
        if not run.trains_only or key in OF_TRAINING
    }
    return ", ".join(f"{key} {value}" for key, value in changed.items()) or "-"
