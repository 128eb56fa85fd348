"""Command-line interface of a recipe: a dataclass is the configuration, the comments on its fields are the help."""

import dataclasses
import errno
import functools
import math
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

from .checkpoint import finish_saves
from .directory import check_directory
from .environment import require_deterministic_kernels
from .interrupt import Interrupt
from .options import MeshOptions, RunOptions, find_group, flatten_config
from .resume import check_resumed_mesh, find_config, has_flag, parse_resumed
from .tracking import import_trackers

_Config = TypeVar("_Config")
_Result = TypeVar("_Result")
_USER_ERRORS = (ValueError, TypeError, OSError, ImportError, NotImplementedError, FloatingPointError)


def run_cli(
    main: Callable[[_Config], _Result],
    config: type[_Config],
    presets: Mapping[str, _Config] | None = None,
    *,
    arguments: Sequence[str] | None = None,
) -> _Result:
    """Call `main` with the configuration that the command line asks for.

        @dataclass(frozen=True)
        class Config:
            steps: int = 300  # Optimizer steps.
            mesh: train.MeshOptions = train.MeshOptions()
            run: train.RunOptions = train.RunOptions(Path("runs/a"))

        train.run_cli(main, Config, {"long": Config(steps=20_000)})

    `config` is a dataclass with a default for each field. A field is a flag, its comment the help; each field of an
    option group is a flag too: `--steps`, `--fsdp`, `--out`. `--lr` is `--learning-rate`. `presets` are configurations
    by name, and the first word may name one: `transformer.py 1b --steps 100`. A resumed run takes the flags of its
    `config.json`, unless they are given. Connects the processes of a cluster, if there is one
    (`zoo.parallel.initialize`). Compiled programs are kept for the next start, except with `--no-compile-cache`. Bad
    input ends the program with one line on standard error and status 2: every error that this library, or the recipe
    itself, raises on purpose. Other errors keep their traceback. Ctrl-C outside of a run's loop ends it with one line
    and status 130. If one of several processes fails, it ends without waiting for the others. A run that SIGTERM
    stopped ends with status 143, so that a scheduler starts it again.
    """
    presets = presets or {}
    if arguments is None:
        arguments = sys.argv[1:]
    words = [_write_out(word, config) for word in arguments]
    if words and words[0] in presets:
        preset = words.pop(0)
        default = presets[preset]
    else:
        preset = None
        default = config()
    program = " ".join(filter(None, (Path(sys.argv[0]).name, preset)))
    about = sys.modules[main.__module__].__doc__ or ""
    if presets:
        about += f"\nPresets, as the first word: {', '.join(presets)}."
    try:
        parsed = _start(functools.partial(_parse_config, default, program, about.strip()), words, default, program)
        Interrupt.ended_by_sigterm = False
        result = main(parsed)
        if Interrupt.ended_by_sigterm:
            sys.exit(128 + signal.SIGTERM)
        return result
    except (Exception, KeyboardInterrupt) as error:
        _end_after(error, main, program)


def _start(parse: Callable[[Sequence[str]], _Config], words: Sequence[str], default: _Config, program: str) -> _Config:
    """Parse the command line, refuse what cannot run, and set up processes, kernels and the compile cache."""
    if has_flag(words, "epochs") and has_flag(words, "steps"):
        raise ValueError("--epochs and --steps both say how long to train: give one of them")
    try:
        config = parse(words)
    finally:  # after --help, which exits
        sys.stdout.flush()
    _require_positive(config)
    initialize()
    run = find_group(config, RunOptions)
    mesh = find_group(config, MeshOptions)
    if run is None:
        enable_compile_cache()
        return config
    if mesh is None and count_processes() > 1:
        raise ValueError(f"{program} has no mesh, so that {count_processes()} processes would do the same: start one")
    if is_first_process():
        # Now, rather than once data and model are made.
        check_directory(run.out, resume=run.resume, checkpoints=run.checkpoints)
    if run.resume is not False:
        config = parse_resumed(parse, words, run.out, flatten_config(default))
    resumed_run = find_group(config, RunOptions)
    if resumed_run is not None and is_first_process():
        import_trackers(resumed_run.track)
    if run.deterministic:
        require_deterministic_kernels()
    if not run.no_compile_cache:
        enable_compile_cache(exact_names=run.profile)
    resumed_mesh = find_group(config, MeshOptions)
    if mesh is not None and resumed_mesh is not None and resumed_mesh != mesh:
        check_resumed_mesh(mesh, resumed_mesh, find_config(run.out))
    if is_first_process():
        show(f"loading data and model; the run's folder is {run.out}")
    return config


def _end_after(error: BaseException, main: Callable[..., Any], program: str) -> NoReturn:
    """Print the error that ended the program, and end it. Re-raises an error of one process not raised on purpose."""
    is_alone = count_processes() == 1
    text = describe_backend_error(error)
    if text is None and _is_user_error(error, main):
        text = str(error)
    if isinstance(error, BrokenPipeError) and is_output_closed():
        status = 1
        discard_output()
    elif isinstance(error, KeyboardInterrupt):
        status = 128 + signal.SIGINT
        show_error(f"{program}: {str(error) or 'interrupted'}")
    elif text is not None:
        status = 2
        where = "" if is_alone else f" in {name_process()}"
        show_error(f"{program}: error{where}: {text}")
    elif is_alone:
        raise error
    else:
        status = 1
        traceback.print_exception(error)
        show_error(f"{name_process()} ends with this error. If another process failed first, its log has the cause")
    if is_alone:
        sys.exit(status)
    finish_saves()
    end_process(status)


def _write_out(word: str, config: type) -> str:
    """Return `--learning-rate` for `--lr`, if the configuration has it; else the word itself."""
    flag, equals, value = word.partition("=")
    if flag == "--lr" and any(field.name == "learning_rate" for field in dataclasses.fields(config)):
        return f"--learning-rate{equals}{value}"
    return word


def check_names(kind: str, names: Collection[str], known: Collection[str]) -> None:
    """**Raise** `ValueError` unless the flag's value `names` is one or more of the `known` names of a `kind`."""
    if not names or set(names) - set(known):
        raise ValueError(f"name one or more of the {kind} {', '.join(known)}, not {', '.join(names) or 'none'}")


def _require_positive(config: Any) -> None:
    for name in ("steps", "batch_size", "seq_len", "eval_every", "eval_rows", "num_seeds", "timed_steps"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be 1 or more, not {value}")
    epochs = getattr(config, "epochs", None)
    if epochs is not None and not 0 < epochs < math.inf:
        raise ValueError(f"--epochs {epochs}: expected a number of passes above 0")


def _parse_config(default: _Config, program: str, description: str, words: Sequence[str]) -> _Config:
    """Return `default` with the fields replaced that the words name."""
    import tyro

    # Fields of option groups are flags like any other: --fsdp, not --mesh.fsdp.
    markers = (tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes)
    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(_make_resume_spec)
    return tyro.cli(
        type(default),
        default=default,
        args=words,
        prog=program,
        description=description,
        config=markers,
        registry=registry,
    )


def _make_resume_spec(type_info: Any) -> Any:
    """Return tyro's specification of `bool | int`: the flag by itself is True, the flag with a number that number."""
    import tyro

    if type_info.type != bool | int:
        return None

    def parse(words: list[str]) -> bool | int:
        if len(words) > 1 or (words and not words[0].isdecimal()):
            raise ValueError(f"expected one step or none, got {' '.join(words)}")
        return int(words[0]) if words else True

    def describe(value: bool | int) -> list[str]:
        """Return the words of the default, for `--help`."""
        if value is True:
            return []
        return [str(value)]

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="[STEP]",
        instance_from_str=parse,
        is_instance=lambda value: isinstance(value, bool | int),
        str_from_instance=describe,
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
