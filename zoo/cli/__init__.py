"""The `zoo` command line: inspect, convert, run and evaluate checkpoints.

Each command is a function in its own file: its signature is the options, its docstring the help. `COMMANDS` is the only
list of them.
"""

import inspect
import io
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Union

import tyro

import zoo
from zoo._backend import describe_backend_error
from zoo._terminal import discard_output, is_output_closed, show, show_error
from zoo.tools.commands.draw import draw
from zoo.tools.commands.evaluate import evaluate
from zoo.tools.commands.export import export
from zoo.tools.commands.parity import parity
from zoo.tools.commands.plan import plan

from .chat import chat
from .convert import convert
from .data import data
from .families import families
from .fork import fork
from .generate import generate
from .info import info
from .presets import presets

COMMANDS: dict[str, Callable[..., None]] = {
    command.__name__: command
    for command in (
        families,
        presets,
        info,
        draw,
        plan,
        convert,
        export,
        generate,
        chat,
        evaluate,
        parity,
        data,
        fork,
    )
}
DESCRIPTION = (
    "Inspect, convert, run and evaluate language model checkpoints in JAX. `zoo COMMAND --help` shows the options of a "
    "command, `zoo --version` the version."
)
TYRO_OPTIONS = (tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone, tyro.conf.PositionalMetavarFromFieldName)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command. `arguments` defaults to the arguments of the process.

    Bad input exits with status 2 and one line on standard error: any error that this library raises deliberately, and
    any error of the file system. Other errors keep their traceback. Ctrl-C prints one line and exits with status 130.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    arguments = list(arguments)
    if arguments == ["--version"]:
        show(zoo.__version__)
        return
    name = arguments[0] if arguments and arguments[0] in COMMANDS else ""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a model may generate characters that the terminal cannot encode
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            tyro.cli(build_subcommands(name), args=arguments, prog="zoo", description=DESCRIPTION, config=TYRO_OPTIONS)
        finally:  # after --help too, which exits
            sys.stdout.flush()
    except KeyboardInterrupt:
        show_error(f"zoo {name}".strip() + ": interrupted")
        sys.exit(130)
    except Exception as error:
        if isinstance(error, BrokenPipeError) and is_output_closed():
            discard_output()
            sys.exit(1)
        line = describe_backend_error(error)
        if line is None and is_user_error(error):
            line = str(error)
        if line is None:
            raise
        show_error(f"zoo {name}".strip() + f": error: {line}")
        sys.exit(2)


def build_subcommands(selected: str) -> Any:
    """Return the union of all commands for tyro. The selected one has its full description, the others one line."""

    def entry(name: str) -> Any:
        docstring = inspect.getdoc(COMMANDS[name]) or ""
        end = "\n\nArgs:" if name == selected else "\n"
        about = docstring.partition(end)[0]
        return Annotated[
            Any, tyro.conf.subcommand(name, constructor=COMMANDS[name], description=unwrap_paragraphs(about))
        ]

    return Union[tuple(map(entry, COMMANDS))]  # noqa: UP007 (`|` joins two types; these are in a tuple)


def unwrap_paragraphs(text: str) -> str:
    """Join the lines of each paragraph, for the terminal to wrap."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def is_user_error(error: Exception) -> bool:
    """Return True for an error of the file system, and for one from a `raise` statement in this library."""
    if isinstance(error, OSError):
        return True
    last = traceback.extract_tb(error.__traceback__)[-1]
    is_ours = Path(last.filename).is_relative_to(Path(__file__).parents[1]) and (last.line or "").startswith("raise")
    return is_ours and isinstance(error, ValueError | TypeError | ImportError | NotImplementedError)
