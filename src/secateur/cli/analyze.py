"""`secateur analyze`."""

import json
from dataclasses import dataclass, field

from secateur.cli.display import waiting
from secateur.cli.flags import Switch
from secateur.cli.options import Output, parse_shape
from secateur.errors import InvalidModel


@dataclass(frozen=True, kw_only=True)
class Analyze:
    """Show which channels of a network can be removed together, which must stay, and why.

    examples:
      secateur analyze resnet56
      secateur analyze torchvision:resnet50 --input 1x3x224x224
      secateur analyze timm:mixnet_s --ignore conv_stem "blocks.0.*"
      secateur analyze my_project.task:build --json > graph.json
    """

    name: str
    """One of ours (resnet14 to resnet110, vgg16_m, fcn32s), torchvision:NAME, timm:NAME or package.module:callable."""

    input: str | None = None
    """Shape of the input, as 1x3x224x224; without it, the size that the network names as its own, or 1x3x224x224."""

    ignore: tuple[str, ...] = ()
    """Modules whose channels stay: names, with wildcards."""

    inexact: Switch = False
    """Also free channels that pass a normalisation over channels, where removing is not the same as zeroing."""

    no_probe: Switch = False
    """Skip the check that cuts the groups: faster, but blind to sizes that the code states or computes with."""

    output: Output = field(default_factory=Output)

    def run(self) -> str:
        import torch

        from secateur.channels.analyze import analyze
        from secateur.models.lookup import build_network, example_for, find_builder

        shape = parse_shape(self.input)
        torch.manual_seed(0)
        with waiting(f"analysing {self.name}") as say:
            model, own = build_network(find_builder(self.name), self.name)
            example = own if own is not None and shape is None else example_for(model, shape)
            try:
                graph = analyze(
                    model, example, ignore=self.ignore, inexact=self.inexact, probe=not self.no_probe, progress=say
                )
            except InvalidModel as error:
                if own is None:
                    error.remedy = (
                        "Name the shape of its input, as --input 1x1x28x28; for several inputs let your callable "
                        "return a secateur.Job"
                    )
                raise
        return json.dumps(graph.to_dict()) if self.output.json else str(graph)
