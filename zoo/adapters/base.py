"""What an adapter is: a module that stands where a matrix stood, holds it, and changes what it gives."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from zoo.layers import AbstractEmbedding, AbstractLinear, TokenInfo
from zoo.parallel import Dim, materialize

Matrix = Float[Array, "out in"]
BiasVector = Float[Array, "out"]
Strength = Float[Array, ""] | Float[Array, "batch"]


class AbstractAdapter(AbstractLinear):
    """y = W x + b, changed. The `base` is what multiplied before, be it another adapter, and is not learnt; the
    adapter's own parameters are declared `tuned()`.

    Its factors speak of the dims `in` and `out` as the base calls them, so that they lie on a mesh as its matrix does.
    The base's parameters keep their names; the adapter's stand under its `label`.
    """

    base: eqx.AbstractVar[AbstractLinear]
    strength: eqx.AbstractVar[Strength]
    """How much of the change counts: 1, or 0 where it is switched off, or anything between and beyond. One number, or
    one for each row of the batch (`by_row`)."""

    in_: eqx.AbstractVar[Dim]
    out: eqx.AbstractVar[Dim]
    adapter_name: eqx.AbstractVar[str]

    def merge_weight(self, weight: Matrix) -> Matrix:
        """The base's matrix, with the change: float32."""
        raise NotImplementedError(f"a {type(self).__name__} has no matrix to merge")

    def merge_bias(self, bias: BiasVector | None) -> BiasVector | None:
        """The base's bias, with the change: most leave it alone."""
        return bias

    def strength_per_row(self, x: Float[Array, "*rows _"]) -> Float[Array, "..."]:
        """How much of the change counts for each of these rows."""
        return strength_per_row(self, x)

    def strength_per_expert(self, like: Float[Array, "*experts"] | Bool[Array, "*experts"]) -> Float[Array, "*experts"]:
        """How much of the change counts, one number for each of `one`."""
        return strength_per_expert(self, like)

    def with_dropout_keys(self, info: TokenInfo, site: int) -> "AbstractAdapter":
        return eqx.tree_at(lambda adapter: adapter.base, self, self.base.with_dropout_keys(info, site))

    @property
    def out_size(self) -> int:
        return self.base.out_size

    @property
    def dense_weight(self) -> Matrix:
        return self.merge_weight(self.base.dense_weight)

    @property
    def dense_bias(self) -> BiasVector | None:
        return self.merge_bias(self.base.dense_bias)

    def per_head(self, x: Float[Array, "*rows units in"]) -> Float[Array, "*rows units unit"]:
        raise NotImplementedError(self.per_head_error)

    def per_head_transposed(self, x: Float[Array, "*rows units unit"]) -> Float[Array, "*rows units in"]:
        raise NotImplementedError(self.per_head_error)

    @property
    def per_head_error(self) -> str:
        return (
            f"a {type(self).__name__} changes a matrix as a whole, and latent attention multiplies this one head by "
            "head while it decodes: merge the adapter, or target other modules"
        )


def get_dims(base: AbstractLinear) -> tuple[Dim, Dim]:
    """What a module that multiplies calls its dims, `in_` and `out`. **Raises** `TypeError` where it does not say."""
    in_, out = getattr(base, "in_", None), getattr(base, "out", None)
    if not isinstance(in_, Dim) or not isinstance(out, Dim):
        raise TypeError(f"a {type(base).__name__} does not say what it multiplies (`in_`, `out`): no adapter fits it")
    return in_, out


def get_linear_shape(base: AbstractLinear | AbstractEmbedding) -> tuple[int, int]:
    """Outputs and inputs of what lies under an adapter, or rows of a table and their length, without computing it."""
    return eqx.filter_eval_shape(lambda base: materialize(base).dense_weight, base).shape


def strength_per_row(adapter: Any, x: Float[Array, "*rows _"]) -> Float[Array, "..."]:
    """How much of a change counts for each of these rows, with dims of size 1 for what a row has. **Raises**
    `ValueError` where it was said for other rows."""
    if adapter.strength.ndim == 0:
        return adapter.strength
    if x.ndim < 3 or len(x) != len(adapter.strength):
        raise ValueError(
            f"by_row chose the adapter {adapter.adapter_name!r} for {len(adapter.strength)} rows of a batch, and it reads "
            f"{list(x.shape)}: choose inside the loss, for the rows that it is given, and not for what the head or "
            "another adapter reads"
        )
    return adapter.strength.reshape(-1, *[1] * (x.ndim - 1))


def strength_per_expert(
    adapter: Any, like: Float[Array, "*experts"] | Bool[Array, "*experts"]
) -> Float[Array, "*experts"]:
    """The weight of an adapter, one number an expert as `one` has it. **Raises** `NotImplementedError` where rows of a
    batch differ."""
    if adapter.strength.ndim != like.ndim:
        raise NotImplementedError(
            f"the adapter {adapter.adapter_name!r} counts for some rows of a batch only (by_row): it is not merged, nor put "
            "around experts, who see rows in another order"
        )
    return adapter.strength


def full_strength() -> Float[Array, ""]:
    """The weight of an adapter that counts in full."""
    return jnp.ones((), jnp.float32)
