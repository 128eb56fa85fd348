"""The `zoo` command: what there is, what a checkpoint holds, and what it does.

A command is a function in a file of its own: its signature is its options, its docstring the help. `COMMANDS` lists
them all; nothing else knows their names.
"""

import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Union

import tyro

import zoo

from .convert import convert
from .evaluate import evaluate
from .families import families
from .fork import fork
from .generate import generate
from .info import info
from .parity import parity
from .presets import presets

COMMANDS: dict[str, Callable[..., None]] = {
    command.__name__: command for command in (families, presets, info, convert, generate, evaluate, parity, fork)
}
DESCRIPTION = "Checkpoints of language models, in JAX. `zoo COMMAND --help` explains a command and its options."
TYRO_OPTIONS = (tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone, tyro.conf.PositionalMetavarFromFieldName)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command that the arguments name: those of the process, unless given.

    Bad input ends the program with one line on standard error and status 2: every error that this library raises on
    purpose, and what the system says of files. Any other error keeps its traceback. Ctrl-C ends it with status 130.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words == ["--version"]:
        print(zoo.__version__)
        return
    name = words[0] if words and words[0] in COMMANDS else ""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a model may write what the terminal has no letter for
        sys.stdout.reconfigure(errors="replace")
    try:
        tyro.cli(build_subcommands(name), args=words, prog="zoo", description=DESCRIPTION, config=TYRO_OPTIONS)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print(file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        # Who reads has closed, as `head` does. What is still buffered goes nowhere, or Python complains at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1)
    except (OSError, ValueError, TypeError, ImportError, NotImplementedError) as error:
        if not (isinstance(error, OSError) or is_raised_by_zoo(error)):
            raise
        print(f"zoo {name}".strip() + f": error: {error}", file=sys.stderr)
        sys.exit(2)


def build_subcommands(selected: str) -> Any:
    """All commands as a type that tyro chooses from, each told in one line but the chosen one, which is told whole."""

    def entry(name: str) -> Any:
        whole = COMMANDS[name].__doc__ or ""
        about = whole.partition("\n\n    Args:")[0] if name == selected else whole.partition("\n")[0]
        return Annotated[
            Any, tyro.conf.subcommand(name, constructor=COMMANDS[name], description=unwrap_paragraphs(about))
        ]

    return Union[tuple(map(entry, COMMANDS))]  # noqa: UP007 (`|` joins two types, and these are in a tuple)


def unwrap_paragraphs(text: str) -> str:
    """Paragraphs with one line each, for the terminal to fold."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def is_raised_by_zoo(error: Exception) -> bool:
    """Whether the error comes from a `raise` in this library."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return Path(last.filename).is_relative_to(Path(__file__).parents[1]) and (last.line or "").startswith("raise")
