"""The commands, and what becomes of a mistake."""

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from secateur.errors import Interrupted, MissingExtra, SecateurError


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; a user's mistake is one line on stderr and exit status 2."""
    try:
        import rich  # noqa: F401
        import tyro  # noqa: F401
    except ModuleNotFoundError as error:
        message = f'the secateur command needs {error.name}; run: pip install "secateur[cli]"'
        sys.exit(_complain(MissingExtra(message)))
    # Networks named package.module:callable are looked for in the current folder too, as `python -m` does.
    sys.path.insert(0, str(Path.cwd()))
    try:
        command = _parse(arguments)
    except SecateurError as error:
        sys.exit(_complain(error))
    _run(command)


def _parse(arguments: Sequence[str] | None) -> Any:
    import tyro

    from secateur.cli.analyze import Analyze
    from secateur.cli.demo import Demo
    from secateur.cli.prune import Prune, Resume

    return tyro.extras.subcommand_cli_from_dict(
        {"analyze": Analyze, "prune": Prune, "resume": Resume, "demo": Demo},
        prog="secateur",
        description="Prune the channels of convolutional networks, exactly.",
        args=arguments,
        config=(
            tyro.conf.PositionalRequiredArgs,
            tyro.conf.PositionalMetavarFromFieldName,
            tyro.conf.FlagCreatePairsOff,
            tyro.conf.DisallowNone,
            tyro.conf.OmitArgPrefixes,
        ),
    )


def _run(command: Any) -> None:
    # Torch complains on import where numpy is not installed; nothing here needs it.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    try:
        if text := command.run():
            print(text, flush=True)
    except BrokenPipeError:
        # Whoever reads has had enough, as `head` does.
        sys.stderr.close()
        sys.exit(141)
    except Interrupted as stop:
        print(f"secateur: {stop}", file=sys.stderr)
        sys.exit(128 + stop.signal)
    except KeyboardInterrupt:
        print("secateur: interrupted", file=sys.stderr)
        sys.exit(130)
    except SecateurError as error:
        if command.debug:
            raise
        sys.exit(_complain(error))


def _complain(error: SecateurError) -> int:
    print(f"secateur: {error}", file=sys.stderr)
    return 2
