"""The `secateur` command: parse, then one library call.

Torch, tyro and rich are imported where they are used, so that `secateur --help` answers at once and a missing extra
is a sentence, not a traceback.
"""

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from secateur.errors import InvalidExample, MissingExtra, SecateurError


@dataclass(frozen=True, kw_only=True)
class Analyze:
    """Show which channels of a network can be removed together, which must stay, and why.

    examples:
      secateur analyze resnet56
      secateur analyze torchvision:resnet50 --input 1x3x224x224
      secateur analyze timm:mixnet_s --ignore conv_stem "blocks.0.*"
      secateur analyze my.networks:build --json > graph.json
    """

    name: str
    """The network: a built-in name (resnet20, 32, 44, 56, 110), torchvision:NAME, timm:NAME, or
    package.module:callable."""

    input: str | None = None
    """Shape of the input, as 1x3x224x224; without it, the size that the network names as its own."""

    json: bool = False
    """Print the graph as JSON."""

    ignore: tuple[str, ...] = ()
    """Modules to leave whole: names, with wildcards."""

    inexact: bool = False
    """Also free channels that pass a normalisation over channels, where removing is not the same as zeroing."""

    probe: bool = True
    """Do not check the groups by cutting them: faster, but fixed sizes in the network's code go unseen."""

    debug: bool = False
    """Show the traceback of an error."""

    def run(self) -> str:
        import torch

        from secateur.channels.analyze import analyze
        from secateur.models.lookup import example_for, find_model

        shape = parse_shape(self.input) if self.input else None
        torch.manual_seed(0)
        with _progress(f"analysing {self.name}") as say:
            model = find_model(self.name)
            example = example_for(model, shape)
            graph = analyze(model, example, ignore=self.ignore, inexact=self.inexact, probe=self.probe, progress=say)
        return json.dumps(graph.to_dict()) if self.json else str(graph)


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Do the whole job on scikit-learn's handwritten digits: train a small ResNet, prune it by Tick-Tock, fine-tune it,
    verify the cut, time both, and save the result. About a minute on two cores, without a download.

    examples:
      secateur demo
      secateur demo --keep-macs 0.25 --out quarter
    """

    keep_macs: float = 0.4
    """Share of the MACs (multiply-adds) that is left."""

    out: Path = Path("secateur-demo")
    """Folder for the result."""

    seed: int = 0
    """Seed of everything random."""

    json: bool = False
    """Print the result as JSON."""

    debug: bool = False
    """Show the traceback of an error."""

    def run(self) -> str:
        from secateur.recipes.demo import SETTINGS, run_demo

        settings = SETTINGS.but(keep_macs=self.keep_macs, seed=self.seed)
        done = run_demo(self.out, settings, lambda text: print(text, file=sys.stderr, flush=True))
        if self.json:
            return json.dumps(done.to_dict())
        print(file=sys.stderr)
        return f"{done}\n\nsaved in {self.out}{os.sep}, whose card.md says how to load it"


def parse_shape(text: str) -> tuple[int, ...]:
    """Sizes from their printed form.

    >>> parse_shape("1x3x32x32")
    (1, 3, 32, 32)
    """
    sizes = text.split("x")
    if not all(size.isdecimal() and int(size) for size in sizes):
        raise InvalidExample(f"--input must be positive sizes joined by x, as 1x3x224x224, got {text!r}")
    return tuple(map(int, sizes))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; a user's mistake is one line on stderr and exit status 2."""
    try:
        import rich  # noqa: F401
        import tyro
    except ModuleNotFoundError as error:
        message = f'the secateur command needs {error.name}; run: pip install "secateur[cli]"'
        sys.exit(_complain(MissingExtra(message)))
    # Networks named package.module:callable are looked for in the current folder too, as `python -m` does.
    sys.path.insert(0, str(Path.cwd()))
    command = tyro.extras.subcommand_cli_from_dict(
        {"analyze": Analyze, "demo": Demo},
        prog="secateur",
        description="Prune the channels of convolutional networks, exactly.",
        args=arguments,
        config=(
            tyro.conf.PositionalRequiredArgs,
            tyro.conf.PositionalMetavarFromFieldName,
            tyro.conf.FlagCreatePairsOff,
            tyro.conf.DisallowNone,
        ),
    )
    # Torch complains on import where numpy is not installed; nothing here needs it.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    try:
        text = command.run()
    except KeyboardInterrupt:
        print("secateur: interrupted", file=sys.stderr)
        sys.exit(130)
    except SecateurError as error:
        if command.debug:
            raise
        sys.exit(_complain(error))
    print(text)


def _complain(error: SecateurError) -> int:
    print(f"secateur: {error}", file=sys.stderr)
    return 2


@contextmanager
def _progress(message: str, delay: float = 2.0) -> Iterator[Callable[[str], None]]:
    """Say on stderr what is going on, once it takes longer than `delay` seconds; yields what tells the present step."""
    from threading import Timer

    from rich.console import Console

    console = Console(stderr=True)
    status = console.status(message)
    timer = Timer(delay, status.start if console.is_terminal else lambda: console.print(message))
    timer.start()
    try:
        yield lambda step: status.update(f"{message}: {step}")
    finally:
        timer.cancel()
        timer.join()
        status.stop()
