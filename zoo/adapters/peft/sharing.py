"""Adapters of a module that several layers share (Zamba).

Here it has one adapter, for all of its calls. PEFT wraps the module of each layer that calls it, so that its files have
an adapter for each call: they are read if these are equal, and written so.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from zoo.weights.safetensors import CheckpointError, LazyTensor

from .source import PREFIX, read_floats


def join_calls(tensors: Mapping[str, LazyTensor], callers: Mapping[str, str], path: str) -> dict[str, LazyTensor]:
    """Return the tensors of an adapter without those of later calls of a shared module. `callers` maps the module's
    name in another layer to its name in the first layer that calls it.

    **Raises** `CheckpointError` that names the modules of both layers if their tensors differ, or if one has none.
    """
    remaining = dict(tensors)
    for other, first in callers.items():
        prefixes = [f"{PREFIX}{module}." for module in (first, other)]
        found = [{name.removeprefix(prefix) for name in tensors if name.startswith(prefix)} for prefix in prefixes]
        for suffix in sorted(found[0] | found[1]):
            names = [prefix + suffix for prefix in prefixes]
            arrays = [read_floats(tensors[name], name, path) for name in names if name in tensors]
            if len(arrays) < 2 or not np.array_equal(arrays[0], arrays[1]):
                raise CheckpointError(
                    f"{path}: {first} and {other} are one module, and {suffix} is not the same in both. PEFT trains an "
                    "adapter for each layer that calls the module, and here the module has one"
                )
            del remaining[names[1]]
    return remaining


def copy_calls(tensors: Mapping[str, np.ndarray], callers: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Return the tensors of an adapter with copies of those of a shared module for each layer that calls it."""
    return {**tensors, **_copy(tensors, callers, PREFIX)}


def copy_targets(config: Mapping[str, Any], callers: Mapping[str, str]) -> dict[str, Any]:
    """Return an adapter's config that names a shared module in each layer that calls it."""
    named: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, list) and all(isinstance(name, str) for name in value):
            named[key] = [*value, *_copy(dict.fromkeys(value), callers, "")]
        elif isinstance(value, Mapping):
            named[key] = {**value, **_copy(value, callers, "")}
        else:
            named[key] = value
    return named


def _copy(values: Mapping[str, Any], callers: Mapping[str, str], prefix: str) -> dict[str, Any]:
    """Return the values of modules in a shared module, by their names in the other layers that call it."""
    copies = {}
    for other, first in callers.items():
        for name, value in values.items():
            if f"{name}.".startswith(f"{prefix}{first}."):
                copies[f"{prefix}{other}{name.removeprefix(prefix + first)}"] = value
    return copies
