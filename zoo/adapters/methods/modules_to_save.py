"""Parameters that are learnt as a whole, beside adapters or alone: biases, norms, a head."""

import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from zoo.models.parameter_paths import IndexRanges, ParameterPath, format_path, iterate_indices, list_parameter_paths
from zoo.parallel import TrainableCopy
from zoo.parallel.module import is_parameter

from ..targets import Targets, find_linears, match_targets, matches, suggest_words

_Model = TypeVar("Model")
BiasOption = Literal["none", "lora_only", "all"]
"""Which biases are learnt: none, those of the modules that have an adapter, or all."""


def unfreeze(model: _Model, targets: Targets, *, adapter_name: str = "full") -> _Model:
    """The model with whole parameters learnt: what PEFT calls modules to save, and its `bias` options.

    - `targets`: names or patterns, of parameters or of modules that hold them, or a function of a parameter's name:
      `"head"`, `"norm"`, `"bias"`, `r"layers\\.3\\..*norm"`.
    - `label`: the adapter's name. Weighted with 0, the parameters are what they were.

    Each has a copy in float32 that is learnt. **Raises** `ValueError` for a target that means no parameter, and for a
    parameter that an adapter stands around, or that is learnt already.
    """
    meant = _match_parameters(targets, _list_parameter_names(model))
    values = {}
    for place, x in _list_parameters(model):
        applies = np.zeros([len(run) for run in place.ranges], bool)
        for index, name in _expand_names(place).items():
            applies[index] = meant(name)
        if applies.any():
            values[place[:2]] = applies, jnp.array(x, jnp.float32)  # a copy: a step donates both
    return make_trainable(model, values, adapter_name)


def make_trainable(
    model: _Model, values: Mapping[tuple[str, IndexRanges], tuple[np.ndarray, Any]], adapter_name: str
) -> _Model:
    """The model with these parameters learnt, by their names and what the stars in these run over: of each in which
    layers it is, and its numbers in all of them. **Raises** `ValueError` as `full` does."""
    named = list_parameter_paths(model)
    tuned = [place.name for place in named if place.leaf.adapter_parameter]

    def one(place: ParameterPath, x: Any) -> Any:
        if place[:2] not in values:
            return x
        if taken := next((name for name in tuned if _is_adapting(name, place.name)), None):
            raise ValueError(f"{place.name} is not learnt as a whole: {taken} is learnt on top of it already")
        applies, array = values[place[:2]]
        ones = jnp.ones(applies.shape, jnp.float32)
        return TrainableCopy(x, jnp.asarray(array), jnp.asarray(applies), ones, adapter_name)

    leaves, treedef = jax.tree.flatten(model)
    return jax.tree.unflatten(treedef, [one(place, x) for place, x in zip(named, leaves, strict=True)])


def train_biases_and_modules(
    model: _Model, targets: Targets, bias: BiasOption, modules_to_save: Sequence[str], adapter_name: str
) -> _Model:
    """The model with whole parameters learnt too, under the label of an adapter."""
    if bias not in typing.get_args(BiasOption):
        raise ValueError(f"bias is one of {', '.join(typing.get_args(BiasOption))}, not {bias!r}")
    names = _list_parameter_names(model)
    saved = _match_parameters(modules_to_save, names) if modules_to_save else lambda _: False
    of_targets = (
        (lambda _: bias == "all")
        if bias != "lora_only"
        else match_targets(targets, find_linears(model, include_embeddings=True))
    )

    def learnt(name: str) -> bool:
        module, _, field = name.rpartition(".")
        return saved(name) or ("bias" in field and of_targets(module))

    return unfreeze(model, learnt, adapter_name=adapter_name) if any(map(learnt, names)) else model


def _list_parameters(model: Any) -> list[tuple[ParameterPath, Any]]:
    """What a model learns, or would without adapters."""
    named = zip(list_parameter_paths(model), jax.tree.leaves(model), strict=True)
    return [(place, x) for place, x in named if is_parameter(place.leaf, x) and not place.leaf.adapter_parameter]


def _list_parameter_names(model: Any) -> list[str]:
    """Their names, one for each layer."""
    return [name for place, _ in _list_parameters(model) for name in _expand_names(place).values()]


def _expand_names(path: ParameterPath) -> dict[tuple[int, ...], str]:
    """Index into the stacked dims -> the parameter's name there."""
    return {index: format_path(path.name, numbers) for index, numbers in iterate_indices(path.ranges)}


def _is_adapting(adapter_path: str, parameter: str) -> bool:
    """Whether what is learnt changes this parameter: an adapter its matrix, a copy what it is a copy of."""
    module, _, field = parameter.rpartition(".")
    return adapter_path.startswith(f"{parameter}.") or (field == "weight" and adapter_path.startswith(f"{module}."))


def _match_parameters(targets: Targets, names: Sequence[str]) -> Callable[[str], bool]:
    """Whether a parameter of this name is meant, by its own name or by that of something that holds it. **Raises**
    `ValueError` where one of the targets means nothing."""
    if callable(targets):
        if not any(map(targets, names)):
            raise ValueError(f"the function given for targets takes none of the model's {len(names)} parameters")
        return targets
    wanted = [targets] if isinstance(targets, str) else list(targets)
    if not wanted:
        raise ValueError("targets names no parameter")
    holds = lambda target, name: any(matches(target, one) for one in _list_prefixes(name))
    for target in wanted:
        if not any(holds(target, name) for name in names):
            words = {one.rpartition(".")[2] for name in names for one in _list_prefixes(name)}
            words = sorted(word for word in words if not word.isdigit())
            raise ValueError(
                f"no parameter of the model is meant by the target {target!r}. {suggest_words(target, words)}"
            )
    return lambda name: any(holds(target, name) for target in wanted)


def _list_prefixes(name: str) -> list[str]:
    """`a.b.c` -> `a.b.c`, `a.b`, `a`."""
    words = name.split(".")
    return [".".join(words[:count]) for count in range(len(words), 0, -1)]
