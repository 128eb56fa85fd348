"""Calls of a recipe's `main` with flat flags, as the command line gives them."""

import contextlib
import dataclasses
import io
import re
import typing
from collections.abc import Callable
from typing import Any

from zoo import train

MESH_FLAGS = [
    *("fsdp", "tensor", "zero_stage", "sequence_parallel", "context", "context_attention", "expert", "pipe"),
    *("schedule", "rounds", "microbatches", "remat", "dtype", "attention", "recurrence", "grouped_matmul"),
]
RUN_FLAGS = [
    "out",
    "seed",
    "resume",
    "profile",
    "watchdog",
    "no_compile_cache",
    "deterministic",
    "checkpoint_url",
    "track",
]


def find_config(main: Callable) -> type:
    """Return the class of the configuration that `main` takes."""
    return typing.get_type_hints(main)["config"]


def call(main: Callable, **flags: Any) -> Any:
    """Call `main` with its default configuration, in which the flags are replaced, of option groups too."""
    config = find_config(main)()
    groups = {}
    for name, group in _option_groups(config).items():
        given = {field.name: flags.pop(field.name) for field in dataclasses.fields(group) if field.name in flags}
        groups[name] = dataclasses.replace(group, **given)
    return main(dataclasses.replace(config, **flags, **groups))


def flag_names(main: Callable) -> list[str]:
    """List the flags of `main` in order, fields of its option groups in place of the groups."""
    config = find_config(main)()
    groups = {name: _field_names(group) for name, group in _option_groups(config).items()}
    return [flag for name in _field_names(config) for flag in groups.get(name, [name])]


def read_help(recipe: Any) -> dict[str, str]:
    """Return what `--help` says of each flag of a recipe."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        train.run_cli(recipe.main, recipe.Config, arguments=["--help"])
    _, _, options = printed.getvalue().partition("show this help message and exit")
    text = " ".join(options.replace("\u2502", " ").split())
    found = re.finditer(r"(?<!-)--([a-z][a-z0-9-]*) (.*?)\((?:default|repeatable|optional)", text)
    return {match[1].replace("-", "_"): _drop_metavar(match[2]) for match in found}


def _drop_metavar(text: str) -> str:
    """Return the sentence behind `INT` or `{none,nf4}`."""
    words = text.split()
    while words and (words[0].isupper() or words[0][0] in "[{"):
        words.pop(0)
    return " ".join(words)


def _option_groups(config: Any) -> dict[str, Any]:
    values = {name: getattr(config, name) for name in _field_names(config)}
    return {name: value for name, value in values.items() if dataclasses.is_dataclass(value)}


def _field_names(group: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(group)]


def loaded_dtype(main: Callable, patch: Any, **flags: Any) -> str:
    """Return the dtype in which `main` loads its model, and end there."""

    def load(directory: Any, *, dtype: str, **options: Any) -> None:
        raise EOFError(dtype)

    patch.setattr("zoo.load", load)
    patch.setattr("zoo.train.configs.load", load)
    try:
        call(main, **flags)
    except EOFError as end:
        return str(end)
    raise AssertionError("no model was loaded")
