"""Activation that sets all but the largest features of a gate to zero."""

import dataclasses
from collections.abc import Callable
from functools import partial

from jaxtyping import Array, Float

from zoo.ops.activations import gaussian_top_k

from .norm import sharded_mean


@dataclasses.dataclass(frozen=True)
class GaussianTopK:
    """The `activation` of `zoo.ops.activations.gaussian_top_k`, so that about the fraction `sparsity` of a gate's
    features is 0 (Spark Transformer, arXiv:2506.06644; Gemma 3n, 2025).

        mlp = GatedMLP(embed, mlp, activation=GaussianTopK(0.95, jax.nn.silu), key=key)

    It reads all features of a token. Where they are sharded, their mean and variance are all-reduced over "mlp".

    **Raises** `ValueError` for a sparsity that is not between 0 and 1.
    """

    sparsity: float
    activation: Callable

    def __post_init__(self):
        if not 0 < self.sparsity < 1:
            raise ValueError(
                f"a sparsity is between 0 and 1, not {self.sparsity}: without one, use only the activation"
            )

    def __call__(self, x: Float[Array, "*rows mlp"]) -> Float[Array, "*rows mlp"]:
        return self.activation(gaussian_top_k(x, self.sparsity, mean=partial(sharded_mean, "mlp")))
