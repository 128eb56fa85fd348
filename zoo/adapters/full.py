"""Parameters that are learnt as a whole, beside adapters or alone: biases, norms, a head."""

import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from zoo.models.names import Numbers, Place, each, fill, places
from zoo.parallel import Learnt
from zoo.parallel.module import is_parameter

from .targets import Targets, chooser, matrices, means, near_words

Model = TypeVar("Model")
Bias = Literal["none", "lora_only", "all"]
"""Which biases are learnt: none, those of the modules that have an adapter, or all."""


def full(model: Model, targets: Targets, *, label: str = "full") -> Model:
    """The model with whole parameters learnt: what PEFT calls modules to save, and its `bias` options.

    - `targets`: names or patterns, of parameters or of modules that hold them, or a function of a parameter's name:
      `"head"`, `"norm"`, `"bias"`, `r"layers\\.3\\..*norm"`.
    - `label`: the adapter's name. Weighted with 0, the parameters are what they were.

    Each has a copy in float32 that is learnt. **Raises** `ValueError` for a target that means no parameter, and for a
    parameter that an adapter stands around, or that is learnt already.
    """
    meant = chosen_of(targets, parameter_names(model))
    values = {}
    for place, x in parameters(model):
        applies = np.zeros([len(run) for run in place.numbers], bool)
        for index, name in names_of(place).items():
            applies[index] = meant(name)
        if applies.any():
            values[place[:2]] = applies, jnp.array(x, jnp.float32)  # a copy: a step donates both
    return learning(model, values, label)


def learning(model: Model, values: Mapping[tuple[str, Numbers], tuple[np.ndarray, Any]], label: str) -> Model:
    """The model with these parameters learnt, by their names and what the stars in these run over: of each in which
    layers it is, and its numbers in all of them. **Raises** `ValueError` as `full` does."""
    named = places(model)
    tuned = [place.name for place in named if place.leaf.tuned]

    def one(place: Place, x: Any) -> Any:
        if place[:2] not in values:
            return x
        if taken := next((name for name in tuned if stands_around(name, place.name)), None):
            raise ValueError(f"{place.name} is not learnt as a whole: {taken} is learnt on top of it already")
        applies, array = values[place[:2]]
        ones = jnp.ones(applies.shape, jnp.float32)
        return Learnt(x, jnp.asarray(array), jnp.asarray(applies), ones, label)

    leaves, treedef = jax.tree.flatten(model)
    return jax.tree.unflatten(treedef, [one(place, x) for place, x in zip(named, leaves, strict=True)])


def beside(model: Model, targets: Targets, bias: Bias, modules_to_save: Sequence[str], label: str) -> Model:
    """The model with whole parameters learnt too, under the label of an adapter."""
    if bias not in typing.get_args(Bias):
        raise ValueError(f"bias is one of {', '.join(typing.get_args(Bias))}, not {bias!r}")
    names = parameter_names(model)
    saved = chosen_of(modules_to_save, names) if modules_to_save else lambda _: False
    of_targets = (lambda _: bias == "all") if bias != "lora_only" else chooser(targets, matrices(model, tables=True))

    def learnt(name: str) -> bool:
        module, _, field = name.rpartition(".")
        return saved(name) or ("bias" in field and of_targets(module))

    return full(model, learnt, label=label) if any(map(learnt, names)) else model


def parameters(model: Any) -> list[tuple[Place, Any]]:
    """What a model learns, or would without adapters."""
    named = zip(places(model), jax.tree.leaves(model), strict=True)
    return [(place, x) for place, x in named if is_parameter(place.leaf, x) and not place.leaf.tuned]


def parameter_names(model: Any) -> list[str]:
    """Their names, one for each layer."""
    return [name for place, _ in parameters(model) for name in names_of(place).values()]


def names_of(place: Place) -> dict[tuple[int, ...], str]:
    """Index into the stacked dims -> the parameter's name there."""
    return {index: fill(place.name, numbers) for index, numbers in each(place.numbers)}


def stands_around(tuned: str, parameter: str) -> bool:
    """Whether what is learnt changes this parameter: an adapter its matrix, a copy what it is a copy of."""
    module, _, field = parameter.rpartition(".")
    return tuned.startswith(f"{parameter}.") or (field == "weight" and tuned.startswith(f"{module}."))


def chosen_of(targets: Targets, names: Sequence[str]) -> Callable[[str], bool]:
    """Whether a parameter of this name is meant, by its own name or by that of something that holds it. **Raises**
    `ValueError` where one of the targets means nothing."""
    if callable(targets):
        if not any(map(targets, names)):
            raise ValueError(f"the function given for targets takes none of the model's {len(names)} parameters")
        return targets
    wanted = [targets] if isinstance(targets, str) else list(targets)
    if not wanted:
        raise ValueError("targets names no parameter")
    holds = lambda target, name: any(means(target, one) for one in with_holders(name))
    for target in wanted:
        if not any(holds(target, name) for name in names):
            words = {one.rpartition(".")[2] for name in names for one in with_holders(name)}
            words = sorted(word for word in words if not word.isdigit())
            raise ValueError(
                f"no parameter of the model is meant by the target {target!r}. {near_words(target, words)}"
            )
    return lambda name: any(holds(target, name) for target in wanted)


def with_holders(name: str) -> list[str]:
    """`a.b.c` -> `a.b.c`, `a.b`, `a`."""
    words = name.split(".")
    return [".".join(words[:count]) for count in range(len(words), 0, -1)]
