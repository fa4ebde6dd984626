"""The commands, how they are parsed, and what is printed for an error."""

import os
import shlex
import sys
import sysconfig
import warnings
from collections.abc import Sequence
from dataclasses import field, make_dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, NoReturn, Union

from secateur.errors import DamagedCheckpoint, Interrupted, SecateurError, place_of, unknown_name
from secateur.files import is_full


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; a user's mistake is one line on stderr and exit status 2."""
    # Networks named package.module:callable are looked for in the current folder too, as `python -m` does.
    sys.path.insert(0, str(Path.cwd()))
    try:
        command = _parse(sys.argv[1:] if arguments is None else list(arguments))
    except SecateurError as error:
        sys.exit(_complain(error))
    except BrokenPipeError:
        _end_quietly()
    except KeyboardInterrupt:
        _stop("Nothing was saved")
    else:
        _run(command)


def commands() -> dict[str, Any]:
    """The commands by name."""
    from secateur.cli.analyze import Analyze
    from secateur.cli.demo import Demo
    from secateur.cli.export import Bench, Export
    from secateur.cli.look import Evaluate, Recipes, Structure
    from secateur.cli.predict import Predict
    from secateur.cli.prune import Continue, Prune, Resume
    from secateur.cli.repair import Repair
    from secateur.cli.report import Report
    from secateur.cli.reproduce import Reproduce
    from secateur.cli.train import Train

    return {
        "demo": Demo,
        "analyze": Analyze,
        "recipes": Recipes,
        "train": Train,
        "prune": Prune,
        "continue": Continue,
        "resume": Resume,
        "repair": Repair,
        "evaluate": Evaluate,
        "predict": Predict,
        "structure": Structure,
        "report": Report,
        "export": Export,
        "bench": Bench,
        "reproduce": Reproduce,
    }


def _parse(arguments: list[str]) -> Any:
    import tyro

    if os.environ.get("NO_COLOR"):
        getattr(tyro, "_experimental_options", {})["ansi_codes"] = False
    options: Any = {
        "config": (
            tyro.conf.PositionalRequiredArgs,
            tyro.conf.PositionalMetavarFromFieldName,
            tyro.conf.DisallowNone,
            tyro.conf.OmitArgPrefixes,
            tyro.conf.HelptextFromCommentsOff,
        ),
    }
    if arguments == ["--version"]:
        print(f"secateur {version('secateur')}")
        sys.exit()
    known = commands()
    if not arguments or arguments[0].startswith("-"):
        each = [
            Annotated[with_flags(kind), tyro.conf.subcommand(name, description=_first_sentence(kind))]
            for name, kind in known.items()
        ]
        any_of_them: Any = Union[tuple(each)]  # noqa: UP007  # pyright: ignore
        about = "Prune the channels of convolutional networks, exactly. `secateur COMMAND --help` has examples."
        return tyro.cli(any_of_them, prog="secateur", description=about, args=arguments or ["--help"], **options)
    name, *arguments = arguments
    if name not in known:
        raise unknown_name("command", name, list(known))
    # Of a recipe the help shows its own values; what is typed counts alike wherever the recipe stands.
    recipe = arguments[0] if {"-h", "--help"} & set(arguments) else ""
    return tyro.cli(with_flags(known[name], recipe), prog=f"secateur {name}", args=arguments, **options)


def with_flags(kind: Any, recipe: str = "") -> type:
    """The command with the flags of its settings; the help shows the defaults of the recipe."""
    import tyro

    if not hasattr(kind, "flags"):
        return kind
    made: list[Any] = []
    for name, flags in kind.flags(recipe).items():
        # In the help, the groups of settings stand beside the others.
        shown = Annotated[flags, tyro.conf.arg(name="" if name == "settings" else name)]
        made.append((name, shown, field(default_factory=flags)))
    about = {"__doc__": kind.__doc__}
    return make_dataclass(kind.__name__, made, bases=(kind,), frozen=True, kw_only=True, namespace=about)


def _first_sentence(kind: type) -> str:
    text = " ".join((kind.__doc__ or "").split())
    return text[: text.index(". ") + 1] if ". " in text else text


def _run(command: Any) -> None:
    # Torch complains on import where numpy is not installed; nothing here needs it.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    warnings.formatwarning = _format_warning
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
        _stop(_what_next(command))
    except (SecateurError, OSError) as error:
        if command.output.debug:
            raise
        sys.exit(_complain(error))


def _format_warning(message: Any, category: type[Warning], *place: Any, _usual: Any = warnings.formatwarning) -> str:
    """A warning of ours is a line for the user, with or without --quiet."""
    return f"secateur: {message}\n" if category is DamagedCheckpoint else _usual(message, category, *place)


def _what_next(command: Any) -> str:
    """What to do after an end without a checkpoint at that moment."""
    if hasattr(command, "what_next"):
        return command.what_next()
    from secateur.cli.options import BEGUN

    folder = getattr(command.output, "out", getattr(command, "folder", None))
    if folder is not None and any((folder / name).is_file() for name in BEGUN):
        return f"Resume it: secateur resume {shlex.quote(str(folder))}"
    return "Nothing was saved"


def _stop(what_next: str) -> NoReturn:
    print(f"secateur: interrupted. {what_next}", file=sys.stderr)
    sys.exit(130)


def _end_quietly() -> None:
    """The reader of the output has stopped, as `head` does."""
    sys.stderr.close()
    sys.exit(141)


def _complain(error: SecateurError | OSError) -> int:
    installed = [str(Path(__file__).parent.parent), *sysconfig.get_paths().values()]
    # A file that is missing may be one that the user's code has asked for.
    place = place_of(error, *(f"{folder}{os.sep}" for folder in installed), "<") if isinstance(error, OSError) else ""
    full = "the disk is full: " if is_full(error) else ""
    print(f"secateur: {full}{error}{place}", file=sys.stderr)
    return 2
