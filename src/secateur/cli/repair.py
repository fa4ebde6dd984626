"""`secateur repair`."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from secateur.cli.display import saved_in, waiting
from secateur.cli.flags import Switch
from secateur.cli.options import Output, Source, check_folder, find_device, order_of_run
from secateur.errors import InvalidSetting
from secateur.files import to_json
from secateur.recipes.paper import is_recipe
from secateur.words import digits

if TYPE_CHECKING:
    from secateur.recipes.jobs import Order


@dataclass(frozen=True, kw_only=True)
class Repair:
    """Re-fit the layers of a pruned network to the whole one, without training, from a few hundred unlabelled images.

    The network is that of a run, or any network with a plan. The whole, the plainly cut and the repaired network are
    tested, and the repaired one is saved.

    examples:
      secateur repair runs/digits --out runs/repaired
      secateur repair resnet56@cifar10 --data cifar --weights baseline.pth --plan plan.json --out runs/repaired
      secateur repair torchvision:resnet50@images --data photos --weights resnet50.pth --plan plan.json
    """

    network: str
    """Folder of a run; or a recipe, NETWORK@DATASET or package.module:callable, with a plan."""

    weights: Path | None = None
    """The whole network: a run, or a file with a state dict. A run has its own."""

    plan: Path | None = None
    """What stays of it: the plan.json of a result. A run has its own."""

    images: int = 512
    """Training images to use; labels are ignored."""

    seed: int = 0
    """Seed of the choice of images."""

    source: Source = field(default_factory=Source)

    out: Path = Path("repaired")
    """Folder for the repaired network."""

    device: str = "auto"
    """Where: cpu, cuda, cuda:1; auto uses CUDA if available."""

    quiet: Switch = False
    """Print no progress."""

    output: Output = field(default_factory=Output)

    def run(self) -> str:
        from secateur.recipes.repair import repair_network

        order = self._order()
        check_folder(order)
        if self.out.is_file() or (self.out.is_dir() and any(self.out.glob("[!.]*"))):
            raise InvalidSetting(f"{self.out} is there already", remedy="Name another folder: --out FOLDER")
        shown = nullcontext(lambda step: None) if self.quiet else waiting(f"repairing {self.network}")
        with shown as say:
            done = repair_network(
                order,
                self.plan,
                self.out,
                find_device(self.device),
                images=self.images,
                seed=self.seed,
                progress=say,
            )
        if self.output.json:
            return to_json({**done.networks, "notes": done.notes})
        return "\n".join([_table(done.networks), *done.notes, "", saved_in(self.out)])

    def _order(self) -> Order:
        folder = Path(self.network)
        if not (folder / "config.json").is_file() and (is_recipe(self.network) or ":" in self.network):
            if self.plan is None:
                raise InvalidSetting(f"{self.network} is not pruned", remedy="Name what stays of it: --plan FILE")
            return self.source.trained(self.network, self.weights)
        if self.weights or self.plan or replace(self.source, data=None) != Source():
            what = f"{folder} is a run, which has its own network, weights and plan"
            raise InvalidSetting(
                what, remedy="Of --weights, --plan and the flags for data and network, use --data only"
            )
        return order_of_run(folder, self.source.data)


def _table(networks: dict[str, dict[str, Any]]) -> str:
    """MACs, parameters and metrics of each network."""
    rows = [["", "whole", "plain cut", "repaired"]]
    for key, name in (("macs", "MACs"), ("params", "parameters")):
        rows.append([name, *(f"{network[key]:,}" for network in networks.values())])
    for name in networks["whole"]["metrics"]:
        rows.append([name, *(digits(network["metrics"][name]) for network in networks.values())])
    return "\n".join(f"{name:<14}" + "".join(f"{value:>16}" for value in values) for name, *values in rows)
