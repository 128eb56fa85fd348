"""Parameters that are trained in full, with or without adapters: PEFT's `modules_to_save` and `bias` options."""

import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import jax.numpy as jnp
import numpy as np

from zoo.models.parameter_paths import (
    IndexRanges,
    ParameterPath,
    format_path,
    iterate_indices,
    list_parameter_paths,
    list_parameters,
    map_parameters,
)
from zoo.models.targets import Targets, find_linears, match_targets, matches, suggest_words
from zoo.parallel.module import is_parameter
from zoo.parallel.trainable_copy import TrainableCopy

from ..merged_layers import require_unmerged

_Model = TypeVar("Model")
BiasOption = Literal["none", "lora_only", "all"]
"""Trainable biases: none, the biases of modules that have an adapter, or all."""


def unfreeze(model: _Model, targets: Targets, *, adapter_name: str = "full") -> _Model:
    """Train parameters in full and freeze the rest of the model: PEFT's `modules_to_save` and its `bias` options.

    - `targets`: names or patterns of parameters, or of modules that contain them, or a predicate of parameter paths:
      `"head"`, `"norm"`, `"bias"`, `r"layers\\.3\\..*norm"`.
    - `adapter_name`: `set_strength(model, {adapter_name: 0})` restores the original parameters.

    Each parameter gets a trainable float32 copy. **Raises** `ValueError` for a target that matches nothing, and for a
    parameter that an adapter wraps or that is trainable already, and for a model whose adapters are merged.
    """
    require_unmerged(model)
    is_target = _match_parameters(targets, _list_parameter_names(model))
    values = {}
    for path, x in _list_parameters(model):
        applies = np.zeros([len(run) for run in path.ranges], bool)
        for index, name in _expand_names(path).items():
            applies[index] = is_target(name)
        if applies.any():
            values[path[:2]] = applies, jnp.array(x, jnp.float32)  # a copy: a step donates both
    return make_trainable(model, values, adapter_name)


def make_trainable(
    model: _Model, values: Mapping[tuple[str, IndexRanges], tuple[np.ndarray, Any]], adapter_name: str
) -> _Model:
    """Replace parameters with a `TrainableCopy`. `values` maps the name and index ranges of a parameter to the layers
    in which it is trainable, and its initial values in all of them. **Raises** `ValueError` as `unfreeze` does."""
    adapter_paths = [path.name for path in list_parameter_paths(model) if path.leaf.adapter_parameter]

    def copy_parameter(path: ParameterPath, x: Any) -> Any:
        if path[:2] not in values:
            return x
        if taken := next((name for name in adapter_paths if _is_adapting(name, path.name)), None):
            raise ValueError(f"{path.name} cannot be trained in full: {taken} is trained on top of it already")
        applies, array = values[path[:2]]
        strength = jnp.ones(applies.shape, jnp.float32)
        return TrainableCopy(x, jnp.asarray(array), jnp.asarray(applies), strength, adapter_name)

    return map_parameters(copy_parameter, model)


def train_biases_and_modules(
    model: _Model, targets: Targets, bias: BiasOption, modules_to_save: Sequence[str], adapter_name: str
) -> _Model:
    """Apply an adapter's `bias` and `modules_to_save` options: train these parameters in full, under its name.
    `targets` are paths of this library."""
    if bias not in typing.get_args(BiasOption):
        raise ValueError(f"bias is one of {', '.join(typing.get_args(BiasOption))}, not {bias!r}")
    names = _list_parameter_names(model)
    if modules_to_save:
        is_saved = _match_parameters(modules_to_save, names)
    else:
        is_saved = lambda _: False
    if bias == "lora_only":
        has_trainable_bias = match_targets(targets, find_linears(model, include_embeddings=True))
    else:
        has_trainable_bias = lambda _: bias == "all"

    def is_trainable(name: str) -> bool:
        module, _, field = name.rpartition(".")
        return is_saved(name) or ("bias" in field and has_trainable_bias(module))

    if any(map(is_trainable, names)):
        return unfreeze(model, is_trainable, adapter_name=adapter_name)
    return model


def _list_parameters(model: Any) -> list[tuple[ParameterPath, Any]]:
    """List the parameters of a model without its adapters that are trainable, or frozen beneath an adapter."""
    parameters = list_parameters(model)
    return [(path, x) for path, x in parameters if is_parameter(path.leaf, x) and not path.leaf.adapter_parameter]


def _list_parameter_names(model: Any) -> list[str]:
    """List the full paths of these parameters, one per layer."""
    return [name for path, _ in _list_parameters(model) for name in _expand_names(path).values()]


def _expand_names(path: ParameterPath) -> dict[tuple[int, ...], str]:
    """Map each index into the stacked dims to the full path of the parameter at that index."""
    return {index: format_path(path.name, indices) for index, indices in iterate_indices(path.ranges)}


def _is_adapting(adapter_path: str, parameter: str) -> bool:
    """Return True if a trainable parameter updates this one: an adapter its weight, a `TrainableCopy` its original."""
    module, _, field = parameter.rpartition(".")
    return adapter_path.startswith(f"{parameter}.") or (field == "weight" and adapter_path.startswith(f"{module}."))


def _match_parameters(targets: Targets, names: Sequence[str]) -> Callable[[str], bool]:
    """Return a predicate of parameter paths that is True if a target matches the parameter or a module that contains
    it. **Raises** `ValueError` for a target that matches nothing."""
    if callable(targets):
        if not any(map(targets, names)):
            raise ValueError(f"the function given for targets takes none of the model's {len(names)} parameters")
        return targets
    patterns = [targets] if isinstance(targets, str) else list(targets)
    if not patterns:
        raise ValueError("targets names no parameter")
    matches_prefix = lambda target, name: any(matches(target, prefix) for prefix in _list_prefixes(name))
    for target in patterns:
        if not any(matches_prefix(target, name) for name in names):
            words = {prefix.rpartition(".")[2] for name in names for prefix in _list_prefixes(name)}
            words = sorted(word for word in words if not word.isdigit())
            raise ValueError(
                f"no parameter of the model is meant by the target {target!r}. {suggest_words(target, words)}"
            )
    return lambda name: any(matches_prefix(target, name) for target in patterns)


def _list_prefixes(name: str) -> list[str]:
    """`a.b.c` -> `a.b.c`, `a.b`, `a`."""
    words = name.split(".")
    return [".".join(words[:count]) for count in range(len(words), 0, -1)]
