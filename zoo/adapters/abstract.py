"""What an adapter is: a module that stands where a matrix stood, holds it, and changes what it gives."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from zoo.layers import AbstractEmbedding, AbstractLinear, Info
from zoo.parallel import Dim, settled

Matrix = Float[Array, "out in"]
Shift = Float[Array, "out"]
Weight = Float[Array, ""] | Float[Array, "batch"]


class AbstractAdapter(AbstractLinear):
    """y = W x + b, changed. The `base` is what multiplied before, be it another adapter, and is not learnt; the
    adapter's own parameters are declared `tuned()`.

    Its factors speak of the dims `in` and `out` as the base calls them, so that they lie on a mesh as its matrix does.
    The base's parameters keep their names; the adapter's stand under its `label`.
    """

    base: eqx.AbstractVar[AbstractLinear]
    weight: eqx.AbstractVar[Weight]
    """How much of the change counts: 1, or 0 where it is switched off, or anything between and beyond. One number, or
    one for each row of the batch (`by_row`)."""

    in_: eqx.AbstractVar[Dim]
    out: eqx.AbstractVar[Dim]
    label: eqx.AbstractVar[str]

    def changed(self, matrix: Matrix) -> Matrix:
        """The base's matrix, with the change: float32."""
        raise NotImplementedError(f"a {type(self).__name__} has no matrix to merge")

    def changed_shift(self, shift: Shift | None) -> Shift | None:
        """The base's bias, with the change: most leave it alone."""
        return shift

    def counted(self, x: Float[Array, "*rows _"]) -> Float[Array, "..."]:
        """How much of the change counts for each of these rows."""
        return counted(self, x)

    def alike(self, one: Float[Array, "*experts"] | Bool[Array, "*experts"]) -> Float[Array, "*experts"]:
        """How much of the change counts, one number for each of `one`."""
        return alike(self, one)

    def keyed(self, info: Info, site: int) -> "AbstractAdapter":
        return eqx.tree_at(lambda adapter: adapter.base, self, self.base.keyed(info, site))

    @property
    def out_size(self) -> int:
        return self.base.out_size

    @property
    def matrix(self) -> Matrix:
        return self.changed(self.base.matrix)

    @property
    def shift(self) -> Shift | None:
        return self.changed_shift(self.base.shift)

    def per_unit(self, x: Float[Array, "*rows units in"]) -> Float[Array, "*rows units unit"]:
        raise NotImplementedError(self.by_units)

    def per_unit_transposed(self, x: Float[Array, "*rows units unit"]) -> Float[Array, "*rows units in"]:
        raise NotImplementedError(self.by_units)

    @property
    def by_units(self) -> str:
        return (
            f"a {type(self).__name__} changes a matrix as a whole, and latent attention multiplies this one head by "
            "head while it decodes: merge the adapter, or target other modules"
        )


def dims_of(base: AbstractLinear) -> tuple[Dim, Dim]:
    """What a module that multiplies calls its dims, `in_` and `out`. **Raises** `TypeError` where it does not say."""
    in_, out = getattr(base, "in_", None), getattr(base, "out", None)
    if not isinstance(in_, Dim) or not isinstance(out, Dim):
        raise TypeError(f"a {type(base).__name__} does not say what it multiplies (`in_`, `out`): no adapter fits it")
    return in_, out


def sizes_of(base: AbstractLinear | AbstractEmbedding) -> tuple[int, int]:
    """Outputs and inputs of what lies under an adapter, or rows of a table and their length, without computing it."""
    return eqx.filter_eval_shape(lambda base: settled(base).matrix, base).shape


def counted(adapter: Any, x: Float[Array, "*rows _"]) -> Float[Array, "..."]:
    """How much of a change counts for each of these rows, with dims of size 1 for what a row has. **Raises**
    `ValueError` where it was said for other rows."""
    if adapter.weight.ndim == 0:
        return adapter.weight
    if x.ndim < 3 or len(x) != len(adapter.weight):
        raise ValueError(
            f"by_row chose the adapter {adapter.label!r} for {len(adapter.weight)} rows of a batch, and it reads "
            f"{list(x.shape)}: choose inside the loss, for the rows that it is given, and not for what the head or "
            "another adapter reads"
        )
    return adapter.weight.reshape(-1, *[1] * (x.ndim - 1))


def alike(adapter: Any, one: Float[Array, "*experts"] | Bool[Array, "*experts"]) -> Float[Array, "*experts"]:
    """The weight of an adapter, one number an expert as `one` has it. **Raises** `NotImplementedError` where rows of a
    batch differ."""
    if adapter.weight.ndim != one.ndim:
        raise NotImplementedError(
            f"the adapter {adapter.label!r} counts for some rows of a batch only (by_row): it is not merged, nor put "
            "around experts, who see rows in another order"
        )
    return adapter.weight


def on() -> Float[Array, ""]:
    """The weight of an adapter that counts in full."""
    return jnp.ones((), jnp.float32)
