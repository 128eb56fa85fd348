"""Calls of a recipe's `main` with flat flags, as the command line gives them."""

import dataclasses
import inspect
import typing
from collections.abc import Callable
from typing import Any

MESH_FLAGS = [
    *("fsdp", "tensor", "zero_stage", "sequence_parallel", "context", "context_attention", "expert", "pipe"),
    *("schedule", "rounds", "microbatches", "remat", "dtype", "attention", "recurrence", "grouped_matmul"),
]
RUN_FLAGS = ["out", "seed", "resume", "profile", "no_compile_cache", "deterministic", "checkpoint_url", "track"]


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


def unexplained_flags(main: Callable) -> list[str]:
    """List the fields of the configuration, except option groups, without a comment on their line or the line above."""
    lines = inspect.getsource(find_config(main)).splitlines()
    found = []
    for name in _field_names(find_config(main)):
        (number,) = (number for number, line in enumerate(lines) if line.startswith(f"    {name}: "))
        if "  # " not in lines[number] and not lines[number - 1].startswith("    # "):
            found.append(name)
    return [name for name in found if name not in _option_groups(find_config(main)())]


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
    try:
        call(main, **flags)
    except EOFError as end:
        return str(end)
    raise AssertionError("no model was loaded")
