"""Command-line interface of a recipe: the signature of `main` is the configuration, its docstring the help."""

import functools
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any


def run_cli(
    main: Callable[..., Any],
    *,
    presets: Mapping[str, Mapping[str, Any]] | None = None,
    arguments: Sequence[str] | None = None,
) -> Any:
    """Call `main` with the command line's flags: one per keyword, or per field of an option group.

    `presets` are other defaults by name; the first word may name one: `transformer.py 1b --steps 100`. Bad input ends
    the program with one line on standard error and status 2: every error that this library, or the recipe itself,
    raises on purpose. Other errors keep their traceback.
    """
    import tyro

    presets = presets or {}
    words = list(sys.argv[1:] if arguments is None else arguments)
    preset = words.pop(0) if words and words[0] in presets else None
    chosen = functools.partial(main, **presets[preset]) if preset else main
    program = " ".join(filter(None, (Path(sys.argv[0]).name, preset)))
    about = sys.modules[main.__module__].__doc__ or ""
    about += f"\nPresets, as the first word: {', '.join(presets)}." if presets else ""
    # Fields of option groups are flags like any other: --fsdp, not --mesh-options.fsdp.
    markers = (tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes)
    try:
        return tyro.cli(chosen, args=words, prog=program, description=about.strip(), config=markers)
    except (ValueError, TypeError, OSError, ImportError, NotImplementedError) as error:
        if not _is_user_error(error, main):
            raise
        print(f"{program}: error: {error}", file=sys.stderr)
        sys.exit(2)


def check_names(kind: str, names: Collection[str], known: Collection[str]) -> None:
    """**Raise** `ValueError` unless the flag's value `names` is one or more of the `known` names of a `kind`."""
    if not names or set(names) - set(known):
        raise ValueError(f"name one or more of the {kind} {', '.join(known)}, not {', '.join(names) or 'none'}")


def _is_user_error(error: Exception, main: Callable[..., Any]) -> bool:
    """Return True if the error comes from a `raise` in this library or in the file of `main`."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    library = Path(__file__).parents[1]
    ours = Path(last.filename).is_relative_to(library) or last.filename == main.__code__.co_filename
    return ours and (last.line or "").startswith("raise")
