"""LoRA+: A and B at rates of their own."""

from typing import Any

import jax
from jaxtyping import PyTree

from zoo.models.parameter_paths import list_parameter_paths
from zoo.parallel import trainable

from .compose import adapter_names


def lora_plus(model: Any) -> PyTree[str]:
    """A label for every parameter that is learnt: "B" for that of each LoRA and its kin, "rest" for all else. It is the
    function that `optax.partition` asks for: labels in the shape of a model, which can be called, it would call.

        rates = {"rest": optax.adamw(rate), "B": optax.adamw(16 * rate)}
        optimizer = optax.partition(rates, adapters.lora_plus)

    B learns faster than A in wide models: the steps of both then change what the adapter adds by as much (Hayou et al.,
    LoRA+, arXiv:2402.12354, section 4; they take a ratio of 16).

    **Raises** `ValueError` for a model in which no LoRA is learnt.
    """
    model = trainable(model)
    ends = tuple(f".{label}.up.weight" for label in adapter_names(model))
    found = ["B" if place.name.endswith(ends) else "rest" for place in list_parameter_paths(model)]
    if "B" not in found:
        raise ValueError("no LoRA is learnt in this model: its parameters have one rate")
    return jax.tree.unflatten(jax.tree.structure(model), found)
