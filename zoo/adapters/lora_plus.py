"""LoRA+: a larger learning rate for B than for A."""

from typing import Any

import jax
from jaxtyping import PyTree

from zoo.models.parameter_paths import list_parameter_paths
from zoo.parallel.module import trainable

from .compose import adapter_names


def lora_plus(model: Any) -> PyTree[str]:
    """Label every trainable parameter for `optax.partition`: "B" for the B of LoRA and similar methods, "rest" for all
    others.

        rates = {"rest": optax.adamw(rate), "B": optax.adamw(16 * rate)}
        optimizer = optax.partition(rates, adapters.lora_plus)

    Pass the function, not its result: optax would call labels that have the structure of a model, since models are
    callable.

    In wide models B needs a larger learning rate than A for both to change the output equally fast (Hayou et al.,
    LoRA+, arXiv:2402.12354, section 4; they use a ratio of 16).

    **Raises** `ValueError` for a model without a trainable LoRA, and for one whose adapters are merged.
    """
    model = trainable(model)
    suffixes = tuple(f".{name}.up.weight" for name in adapter_names(model))
    labels = ["B" if path.name.endswith(suffixes) else "rest" for path in list_parameter_paths(model)]
    if "B" not in labels:
        raise ValueError("the model has no trainable LoRA: its parameters have one learning rate")
    return jax.tree.unflatten(jax.tree.structure(model), labels)
