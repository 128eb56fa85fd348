"""Command-line interface of a recipe: the signature of `main` is the configuration, its docstring the help."""

import errno
import functools
import inspect
import signal
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from zoo._backend import describe_backend_error
from zoo._compile_cache import enable_compile_cache
from zoo._processes import count_processes, end_process, initialize, is_first_process, name_process
from zoo._terminal import discard_output, is_output_closed, show, show_error

from .directory import check_directory
from .environment import require_deterministic_kernels
from .interrupt import Interrupt
from .options import MeshOptions, RunOptions, flatten_config
from .resume import check_resumed_mesh, find_config, parse_resumed

_Group = TypeVar("_Group")
_USER_ERRORS = (ValueError, TypeError, OSError, ImportError, NotImplementedError, FloatingPointError)


def run_cli(
    main: Callable[..., Any],
    *,
    presets: Mapping[str, Mapping[str, Any]] | None = None,
    arguments: Sequence[str] | None = None,
) -> Any:
    """Call `main` with the command line's flags: one per keyword, or per field of an option group.

    `presets` are other defaults by name; the first word may name one: `transformer.py 1b --steps 100`. A resumed run
    takes the flags of its `config.json`, unless they are given. Connects the processes of a cluster, if there is one
    (`zoo.parallel.initialize`). Compiled programs are kept for the next start, except with `--no-compile-cache`. Bad
    input ends the program with one line on standard error and status 2: every error that this library, or the recipe
    itself, raises on purpose. Other errors keep their traceback. Ctrl-C outside of a run's loop ends the program with
    one line and status 130. If one of several processes fails, it ends without waiting for the others. A run that
    SIGTERM stopped ends with status 143, so that a scheduler starts it again.
    """
    presets = presets or {}
    words = list(sys.argv[1:] if arguments is None else arguments)
    preset = words.pop(0) if words and words[0] in presets else None
    program = " ".join(filter(None, (Path(sys.argv[0]).name, preset)))
    about = sys.modules[main.__module__].__doc__ or ""
    about += f"\nPresets, as the first word: {', '.join(presets)}." if presets else ""
    signature = _replace_defaults(main, presets[preset] if preset else {})
    parse = functools.partial(_parse_flags, main, signature, program, about.strip())
    try:
        try:
            flags = parse(words)
        finally:  # after --help, which exits
            sys.stdout.flush()
        options = _find_group(flags, RunOptions)
        mesh = _find_group(flags, MeshOptions)
        _require_positive(flags)
        initialize()
        if options is not None and mesh is None and count_processes() > 1:
            raise ValueError(
                f"{program} has no mesh, so that {count_processes()} processes would do the same: start one"
            )
        is_first = is_first_process()
        if options is not None and is_first:
            # Now, rather than once data and model are made.
            check_directory(options.out, resume=options.resume, checkpoints=options.checkpoints)
        if options is not None and options.resume is not False:
            defaults = {name: parameter.default for name, parameter in signature.parameters.items()}
            flags = parse_resumed(parse, words, options.out, flatten_config(defaults))
        if options is not None and options.deterministic:
            require_deterministic_kernels()
        if options is None or not options.no_compile_cache:
            enable_compile_cache(exact_names=options is not None and options.profile)
        resumed_mesh = _find_group(flags, MeshOptions)
        if options is not None and mesh is not None and resumed_mesh is not None and resumed_mesh != mesh:
            check_resumed_mesh(mesh, resumed_mesh, find_config(options.out))
        if options is not None and is_first:
            show(f"loading data and model; the run's folder is {options.out}")
        Interrupt.ended_by_sigterm = False
        result = main(**flags)
        if Interrupt.ended_by_sigterm:
            sys.exit(128 + signal.SIGTERM)
        return result
    except (Exception, KeyboardInterrupt) as error:
        _end_after(error, main, program)


def _end_after(error: BaseException, main: Callable[..., Any], program: str) -> NoReturn:
    """Print the error that ended the program, and end it. Re-raises an error of one process not raised on purpose."""
    is_alone = count_processes() == 1
    text = describe_backend_error(error) or (str(error) if _is_user_error(error, main) else None)
    if isinstance(error, BrokenPipeError) and is_output_closed():
        status = 1
        discard_output()
    elif isinstance(error, KeyboardInterrupt):
        status = 128 + signal.SIGINT
        show_error(f"{program}: {str(error) or 'interrupted'}")
    elif text is not None:
        status = 2
        show_error(f"{program}: error{'' if is_alone else f' in {name_process()}'}: {text}")
    elif is_alone:
        raise error
    else:
        status = 1
        traceback.print_exception(error)
        show_error(f"{name_process()} ends with this error. If another process failed first, its log has the cause")
    if is_alone:
        sys.exit(status)
    end_process(status)


def _find_group(flags: Mapping[str, Any], kind: type[_Group]) -> _Group | None:
    """Return the first option group of a class among the flags."""
    return next((value for value in flags.values() if isinstance(value, kind)), None)


def check_names(kind: str, names: Collection[str], known: Collection[str]) -> None:
    """**Raise** `ValueError` unless the flag's value `names` is one or more of the `known` names of a `kind`."""
    if not names or set(names) - set(known):
        raise ValueError(f"name one or more of the {kind} {', '.join(known)}, not {', '.join(names) or 'none'}")


def _require_positive(flags: Mapping[str, Any]) -> None:
    for name in ("steps", "batch_size", "seq_len", "eval_every"):
        value = flags.get(name)
        if isinstance(value, int) and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be 1 or more, not {value}")


def _replace_defaults(main: Callable[..., Any], defaults: Mapping[str, Any]) -> inspect.Signature:
    signature = inspect.signature(main)
    parameters = [x.replace(default=defaults.get(name, x.default)) for name, x in signature.parameters.items()]
    return signature.replace(parameters=parameters)


def _parse_flags(
    main: Callable[..., Any], signature: inspect.Signature, program: str, description: str, words: Sequence[str]
) -> dict[str, Any]:
    """Return the arguments of `main` that the words specify, without calling it."""
    import tyro

    @functools.wraps(main)
    def collect(**flags: Any) -> dict[str, Any]:
        return flags

    collect.__signature__ = signature  # type: ignore[attr-defined]  # tyro reads defaults from it
    # Fields of option groups are flags like any other: --fsdp, not --mesh-options.fsdp.
    markers = (tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes)
    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(_make_resume_spec)
    return tyro.cli(collect, args=words, prog=program, description=description, config=markers, registry=registry)


def _make_resume_spec(type_info: Any) -> Any:
    """Return tyro's specification of `bool | int`: the flag by itself is True, the flag with a number that number."""
    import tyro

    if type_info.type != bool | int:
        return None

    def parse(words: list[str]) -> bool | int:
        if len(words) > 1 or (words and not words[0].isdecimal()):
            raise ValueError(f"one step or none was expected, not {' '.join(words)}")
        return int(words[0]) if words else True

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="[STEP]",
        instance_from_str=parse,
        is_instance=lambda value: isinstance(value, bool | int),
        str_from_instance=lambda value: [] if value is True else [str(value)],  # of the default, for --help
    )


def _is_user_error(error: BaseException, main: Callable[..., Any]) -> bool:
    """Return True for a full disk, and for an error from a `raise` in this library or in the file of `main`."""
    if not isinstance(error, _USER_ERRORS):
        return False
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    last = traceback.extract_tb(error.__traceback__)[-1]
    library = Path(__file__).parents[1]
    ours = Path(last.filename).is_relative_to(library) or last.filename == main.__code__.co_filename
    return ours and (last.line or "").startswith("raise")
