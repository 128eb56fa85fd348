"""Health of a training step: how far it moves the parameters."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from zoo.models.parameter_paths import list_parameter_paths


def measure_updates(params: PyTree, updates: PyTree) -> dict[str, Float[Array, ""]]:
    """Return the ratio of the norms of updates and parameters, for each group of parameters, as metrics to log:
    `update_ratio_attention`, `update_ratio_gated_mlp`, `update_ratio_embedding`, and so on.

        updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(model))
        metrics |= train.measure_updates(zoo.trainable(model), updates)

    A group is a kind of sublayer, in all layers together. Ratios near 1e-3 are usual for Adam (Karpathy, "makemore",
    part 3, 2022); much larger ones precede divergence, much smaller ones mean that a group stands still.
    """
    sums: dict[str, list[Array]] = {}
    for tree in (updates, params):
        squares: dict[str, list[Array]] = {}
        for path, x in _list_arrays(tree):
            squares.setdefault(_find_group(path), []).append(jnp.square(x.astype(jnp.float32)).sum())
        for group, values in squares.items():
            sums.setdefault(group, []).append(jnp.sqrt(jnp.stack(values).sum()))
    return {f"update_ratio_{group}": update / parameter for group, (update, parameter) in sums.items()}


def _list_arrays(tree: PyTree) -> list[tuple[str, Array]]:
    names = (path.name for path in list_parameter_paths(tree))
    return list(zip(names, jax.tree.leaves(tree), strict=True))


def _find_group(name: str) -> str:
    """Return the sublayer that a parameter path names: `attention` of `layers.*.attention.query.weight`."""
    words = [word for word in name.removeprefix("layers.").split(".") if word != "*"]
    return words[0]
