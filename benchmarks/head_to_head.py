"""Peers on a network of ours, to the same MACs, with the fine-tuning that our recipe has.

    python benchmarks/head_to_head.py resnet56-cifar10-ours --data cifar --weights runs/lifted --method taylor \\
        --keep-macs 0.3

taylor: Torch-Pruning's group Taylor score, from gradients of ten batches before each of 100 small steps; then as many
epochs of fine-tuning as our Tock and fine-tuning have together. norm: its group norm, after ten epochs of its sparse
learning; then our fine-tuning. The classifier is excluded by hand, as its users do. fastnas: NVIDIA ModelOpt's search
over widths, by the accuracy on some of the training images; then as many epochs as after taylor. It needs
`nvidia-modelopt` and `torchprofile==0.0.4`. Fine-tuning is ours: loss, teacher, rates and epochs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from repair import draw
from torch import Tensor, nn

from secateur import Engine, Plan, Training, analyze
from secateur.channels.shrink import copy_model
from secateur.files import to_json, write_atomic
from secateur.recipes.jobs import Job, Order
from secateur.recipes.paper import find_recipe
from secateur.recipes.recipe import scaled
from secateur.recipes.starts import open_network
from secateur.runs.prune import finish, training_phases
from secateur.runs.run import Run
from secateur.training.distill import distilled
from secateur.training.loop import PRECISIONS

STEPS, BATCHES, EPOCHS = 100, 10, 40
"""Steps of removal, batches before each of them, and epochs of fine-tuning."""
SEARCHED, BATCHES_SEARCHED = 2000, 50
"""Training images by which ModelOpt compares widths, in as many batches as it wants for the statistics of norms."""
LOSS = Callable[[nn.Module, Any], Tensor]


class TorchPruning:
    """Torch-Pruning on one network."""

    def __init__(self, job: Job, model: nn.Module, limit: float, options: argparse.Namespace) -> None:
        import torch_pruning

        self.count = torch_pruning.utils.count_ops_and_params
        self.job, self.model, self.limit = job, model, limit
        self.device = torch.device(options.device)
        self.precision = PRECISIONS.get(options.precision)
        [*_, classifier] = [module for module in model.modules() if isinstance(module, nn.Linear)]
        given = {"global_pruning": True, "pruning_ratio": 1.0, "iterative_steps": STEPS, "ignored_layers": [classifier]}
        if options.method == "taylor":
            self.importance: Any = torch_pruning.importance.GroupTaylorImportance()
            self.pruner = torch_pruning.pruner.BasePruner(model, job.example, self.importance, **given)
        else:
            self.importance = torch_pruning.importance.GroupMagnitudeImportance(p=2)
            self.pruner = torch_pruning.pruner.GroupNormPruner(model, job.example, self.importance, **given)

    def backward(self, loss: LOSS, batch: Any) -> None:
        with torch.autocast(self.device.type, self.precision, enabled=self.precision is not None):
            value = loss(self.model, batch)
        value.backward()

    def learn_sparsely_(self, loss: LOSS, epochs: int, rate: float, weight_decay: float) -> None:
        optimizer = torch.optim.SGD(self.model.parameters(), lr=rate, momentum=0.9, weight_decay=weight_decay)
        self.model.train()
        for _ in range(epochs):
            self.pruner.update_regularizer()
            for batch in self.job.task.train:
                optimizer.zero_grad()
                self.backward(loss, batch)
                self.pruner.regularize(self.model)
                optimizer.step()

    def prune_(self, scores: bool) -> None:
        """Remove until the budget is met."""
        while self.count(self.model, self.job.example)[0] > self.limit:
            if scores:
                self.model.eval()
                self.model.zero_grad()
                for batch in islice(iter(self.job.task.train), BATCHES):
                    self.backward(self.job.task.loss, batch)
            self.pruner.step()
        self.model.zero_grad()


def fastnas(job: Job, model: nn.Module, limit: float, options: argparse.Namespace) -> nn.Module:
    """ModelOpt's pruning of one network; the widths of all layers may be any."""
    import modelopt.torch.opt as mto
    import modelopt.torch.prune as mtp

    images, labels = (part.to(options.device) for part in draw(job, options.images, options.seed))
    batches = list(zip(images.chunk(BATCHES_SEARCHED), labels.chunk(BATCHES_SEARCHED), strict=True))

    @torch.no_grad()
    def score(found: nn.Module) -> float:
        found.eval()
        right = sum(float((found(some).argmax(1) == wanted).sum()) for some, wanted in batches)
        return right / len(labels)

    widths = {"*": {"channel_divisor": 1}}
    pruned, _ = mtp.prune(
        model,
        mode=[("fastnas", {"nn.Conv2d": widths, "nn.BatchNorm2d": {"*": {}}})],
        constraints={"flops": limit},
        dummy_input=job.example,
        config={"data_loader": batches, "score_func": score, "verbose": False},
    )
    mto.ModeloptStateManager.remove_state(pruned)
    return pruned


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="a recipe")
    parser.add_argument("--data", type=Path, help="folder of the dataset")
    parser.add_argument("--weights", required=True, help="the trained network: a run, or a file with a state dict")
    parser.add_argument("--method", choices=["taylor", "norm", "fastnas"], required=True)
    parser.add_argument("--keep-macs", type=float, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--images", type=int, default=SEARCHED, help="training images for fastnas")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--epochs-scale", type=float, default=1.0, help="0.1 for a rehearsal")
    parser.add_argument("--out", type=Path, help="file for the numbers, as JSON")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    order = Order(recipe=options.recipe, data=str(options.data) if options.data else None, weights=options.weights)
    job = open_network(order, torch.device(options.device), options.seed)
    pruning = find_recipe(options.recipe).pruning
    whole, teacher = job.model, copy_model(job.model)
    model = copy_model(whole)
    macs = analyze(whole, job.example, probe=False).macs
    limit = options.keep_macs * macs
    learning = pruning.learning
    epochs = EPOCHS
    if options.method == "fastnas":
        model = fastnas(job, model, limit, options)
        epochs += pruning.tocks.epochs
    elif options.method == "norm":
        peer = TorchPruning(job, model, limit, options)
        loss = distilled(job.task.loss, teacher, learning.distill, learning.distill_temperature)
        sparse = max(1, round(options.epochs_scale * pruning.tocks.epochs))
        peer.learn_sparsely_(loss, sparse, pruning.tocks.lr, learning.weight_decay)
        peer.prune_(scores=False)
    else:
        TorchPruning(job, model, limit, options).prune_(scores=True)
        epochs += pruning.tocks.epochs
    graph = analyze(model, job.example, probe=False)
    settings = Training(schedule=replace(pruning.finetune, epochs=epochs), learning=learning)
    settings = scaled(settings, options.epochs_scale).but(seed=options.seed, evaluate="phases")
    engine = Engine(precision=options.precision, channels_last=options.device != "cpu")
    plan = Plan(graph, graph.all_kept())
    run = Run(
        settings, training_phases(settings), model, plan, job.task, teacher=teacher, engine=engine, progress=print
    )
    result = finish(run)
    before = job.task.metrics(whole)
    told = {"whole": before, "cut": result.metrics_before, "after": result.metrics, "macs": graph.macs / macs}
    print(options.method, told)
    if options.out is not None:
        about = {key: getattr(options, key) for key in ("recipe", "method", "seed", "precision", "epochs_scale")}
        peer = "nvidia-modelopt" if options.method == "fastnas" else "torch-pruning"
        versions = {name: version(name) for name in ("torch", peer)}
        write_atomic(options.out, to_json({**about, **told, **versions}).encode())


if __name__ == "__main__":
    main()
