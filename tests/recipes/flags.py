"""Calls of a recipe's `main` with flat flags, as the command line gives them."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

MESH_FLAGS = [
    *("fsdp", "tensor", "zero_stage", "sequence_parallel", "context", "context_attention", "expert", "pipe"),
    *("schedule", "rounds", "microbatches", "remat", "dtype", "attention", "recurrence", "grouped_matmul"),
]
RUN_FLAGS = ["out", "seed", "resume", "profile", "no_compile_cache", "deterministic", "checkpoint_url"]


def call(main: Callable, **flags: Any) -> Any:
    """Call `main`, with flags that are fields of its option groups put into the defaults of these."""
    groups = {name: group for name, group in _option_groups(main).items() if name not in flags}
    for name, group in groups.items():
        fields = {field.name for field in dataclasses.fields(group)} & flags.keys()
        flags[name] = dataclasses.replace(group, **{field: flags.pop(field) for field in fields})
    return main(**flags)


def flag_names(main: Callable) -> list[str]:
    """List the flags of `main` in order, fields of its option groups in place of the groups."""
    groups = {name: _field_names(group) for name, group in _option_groups(main).items()}
    return [flag for name in inspect.signature(main).parameters for flag in groups.get(name, [name])]


def explained_flags(main: Callable) -> list[str]:
    """List the flags that the docstring of `main` has to explain: those of no option group."""
    return [name for name in inspect.signature(main).parameters if name not in _option_groups(main)]


def _option_groups(main: Callable) -> dict[str, Any]:
    defaults = {name: parameter.default for name, parameter in inspect.signature(main).parameters.items()}
    return {name: default for name, default in defaults.items() if dataclasses.is_dataclass(default)}


def _field_names(group: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(group)]
