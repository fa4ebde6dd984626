"""The commands, and what becomes of a mistake."""

import os
import shlex
import sys
import sysconfig
import warnings
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, Union

from secateur.errors import DamagedCheckpoint, Interrupted, SecateurError, place_of, unknown_name


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; a user's mistake is one line on stderr and exit status 2."""
    # Networks named package.module:callable are looked for in the current folder too, as `python -m` does.
    sys.path.insert(0, str(Path.cwd()))
    try:
        command = _parse(arguments)
    except SecateurError as error:
        sys.exit(_complain(error))
    except BrokenPipeError:
        _end_quietly()
    else:
        _run(command)


def _commands() -> dict[str, Any]:
    from secateur.cli.analyze import Analyze
    from secateur.cli.demo import Demo
    from secateur.cli.export import Bench, Export
    from secateur.cli.look import Evaluate, Recipes, Structure
    from secateur.cli.prune import Further, Prune, Resume
    from secateur.cli.report import Report
    from secateur.cli.reproduce import Reproduce
    from secateur.cli.train import Finetune, Scratch, Shrunk, Train

    return {
        "demo": Demo,
        "analyze": Analyze,
        "recipes": Recipes,
        "train": Train,
        "prune": Prune,
        "further": Further,
        "finetune": Finetune,
        "resume": Resume,
        "evaluate": Evaluate,
        "structure": Structure,
        "report": Report,
        "export": Export,
        "bench": Bench,
        "scratch": Scratch,
        "shrunk": Shrunk,
        "reproduce": Reproduce,
    }


def _parse(arguments: Sequence[str] | None) -> Any:
    import tyro

    if os.environ.get("NO_COLOR"):
        getattr(tyro, "_experimental_options", {})["ansi_codes"] = False
    arguments = (sys.argv[1:] if arguments is None else list(arguments)) or ["--help"]
    commands = _commands()
    options: Any = {
        "config": (
            tyro.conf.PositionalRequiredArgs,
            tyro.conf.PositionalMetavarFromFieldName,
            tyro.conf.FlagCreatePairsOff,
            tyro.conf.DisallowNone,
            tyro.conf.OmitArgPrefixes,
        ),
    }
    if arguments[0].startswith("-"):
        each = [
            Annotated[kind, tyro.conf.subcommand(name, description=_first_sentence(kind))]
            for name, kind in commands.items()
        ]
        any_of_them: Any = Union[tuple(each)]  # noqa: UP007  # pyright: ignore
        about = "Prune the channels of convolutional networks, exactly. `secateur COMMAND --help` has examples."
        return tyro.cli(any_of_them, prog="secateur", description=about, args=arguments, **options)
    name, *arguments = arguments
    if name not in commands:
        raise unknown_name("command", name, list(commands))
    options["prog"] = f"secateur {name}"
    kind, recipe = commands[name], arguments[0] if arguments else "-"
    if (command := _with_recipe(kind, recipe, arguments, options)) is not None:
        return command
    command = tyro.cli(kind, args=arguments, **options)
    # The recipe may stand behind its options.
    return _with_recipe(kind, getattr(command, "recipe", "-"), arguments, options) or command


def _first_sentence(kind: type) -> str:
    text = " ".join((kind.__doc__ or "").split())
    return text[: text.index(". ") + 1] if ". " in text else text


def _with_recipe(kind: Any, name: str, arguments: Sequence[str], options: dict[str, Any]) -> Any:
    """The command with the recipe's or job's own values as defaults, which stand in its help too; None without any."""
    import tyro

    from secateur.recipes.paper import find_recipe, is_recipe

    values = None
    if hasattr(kind, "like") and is_recipe(name):
        values = kind.like(find_recipe(name))
    elif hasattr(kind, "from_settings") and ":" in name:
        from secateur.recipes.jobs import own_settings

        settings = own_settings(name)
        values = kind.from_settings(settings) if settings is not None else None
    if values is None:
        return None
    required = (f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING)
    default = kind(**{**dict.fromkeys(required, tyro.MISSING), **values})
    return tyro.cli(kind, default=default, args=arguments, **options)


def _run(command: Any) -> None:
    # Torch complains on import where numpy is not installed; nothing here needs it.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    warnings.formatwarning = _worded
    try:
        if text := command.run():
            print(text, flush=True)
    except BrokenPipeError:
        _end_quietly()
    except Interrupted as stop:
        if os.environ.get("RANK", "0") == "0":  # of torchrun's processes, one speaks
            print(f"secateur: {stop}", file=sys.stderr)
        sys.exit(128 + stop.signal)
    except KeyboardInterrupt:
        print(f"secateur: interrupted; {_what_next(command)}", file=sys.stderr)
        sys.exit(130)
    except (SecateurError, OSError) as error:
        if command.debug:
            raise
        sys.exit(_complain(error))


def _worded(message: Any, category: type[Warning], *place: Any, _usual: Any = warnings.formatwarning) -> str:
    """A warning of ours is a line for the user, with or without --quiet."""
    return f"secateur: {message}\n" if category is DamagedCheckpoint else _usual(message, category, *place)


def _what_next(command: Any) -> str:
    """What to do after an end without a checkpoint: a run that has begun is resumed."""
    out = command.output.out if hasattr(command, "output") else None
    if out is not None and (out / "config.json").is_file():
        return f"go on with: secateur resume {shlex.quote(str(out))}"
    keeps = out is not None or type(command).__name__ in ("Resume", "Reproduce")
    return "go on with: the same command as before" if keeps else "nothing was saved"


def _end_quietly() -> None:
    """Whoever reads has had enough, as `head` does."""
    sys.stderr.close()
    sys.exit(141)


def _complain(error: SecateurError | OSError) -> int:
    installed = [str(Path(__file__).parent.parent), *sysconfig.get_paths().values()]
    # A file that is missing may be one that the user's code has asked for.
    place = place_of(error, *(f"{folder}{os.sep}" for folder in installed), "<") if isinstance(error, OSError) else ""
    print(f"secateur: {error}{place}", file=sys.stderr)
    return 2
