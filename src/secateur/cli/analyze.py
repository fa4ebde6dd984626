"""`secateur analyze`."""

import json
from dataclasses import dataclass

from secateur.cli.display import waiting
from secateur.errors import InvalidExample


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

    json: bool = False
    """Print the graph as JSON."""

    ignore: tuple[str, ...] = ()
    """Modules to leave whole: names, with wildcards."""

    inexact: bool = False
    """Also free channels that pass a normalisation over channels, where removing is not the same as zeroing."""

    probe: bool = True
    """Check the groups by cutting them; --no-probe: faster, but fixed sizes in the network's code go unseen."""

    debug: bool = False
    """Show the traceback of an error."""

    def run(self) -> str:
        import torch

        from secateur.channels.analyze import analyze
        from secateur.models.lookup import build_network, example_for, find_builder

        shape = parse_shape(self.input) if self.input else None
        torch.manual_seed(0)
        with waiting(f"analysing {self.name}") as say:
            model, own = build_network(find_builder(self.name), self.name)
            example = own if own is not None and shape is None else example_for(model, shape)
            try:
                graph = analyze(
                    model, example, ignore=self.ignore, inexact=self.inexact, probe=self.probe, progress=say
                )
            except InvalidExample as error:
                if own is not None:
                    raise
                raise InvalidExample(
                    f"{error}, as --input 1x1x28x28; for several inputs let your callable return a secateur.Job"
                ) from error
        return json.dumps(graph.to_dict()) if self.json else str(graph)


def parse_shape(text: str) -> tuple[int, ...]:
    """Sizes from their printed form.

    >>> parse_shape("1x3x32x32")
    (1, 3, 32, 32)
    """
    sizes = text.split("x")
    if not all(size.isdecimal() and int(size) for size in sizes):
        raise InvalidExample(f"--input must be positive sizes joined by x, as 1x3x224x224, got {text!r}")
    return tuple(map(int, sizes))
