"""What an adapter is: a module that stands where a matrix stood, holds it, and changes what it gives."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from zoo.layers import AbstractLinear
from zoo.parallel import Dim

Matrix = Float[Array, "out in"]
Shift = Float[Array, "out"]


class AbstractAdapter(AbstractLinear):
    """y = W x + b, changed. The `base` is what multiplied before, be it another adapter, and is not learnt; the
    adapter's own parameters are declared `tuned()`.

    Its factors speak of the dims `in` and `out` as the base calls them, so that they lie on a mesh as its matrix does.
    The base's parameters keep their names; the adapter's stand under its `label`.
    """

    base: eqx.AbstractVar[AbstractLinear]
    weight: eqx.AbstractVar[Float[Array, ""]]
    """How much of the change counts: 1, or 0 where it is switched off, or anything between and beyond."""

    in_: eqx.AbstractVar[Dim]
    out: eqx.AbstractVar[Dim]
    label: eqx.AbstractVar[str]

    def changed(self, matrix: Matrix) -> Matrix:
        """The base's matrix, with the change: float32."""
        raise NotImplementedError(f"a {type(self).__name__} has no matrix to merge")

    def changed_shift(self, shift: Shift | None) -> Shift | None:
        """The base's bias, with the change: most leave it alone."""
        return shift

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


def sizes_of(base: AbstractLinear) -> tuple[int, int]:
    """Outputs and inputs of what lies under an adapter, without computing its matrix."""
    return eqx.filter_eval_shape(lambda base: base.matrix, base).shape


def on() -> Float[Array, ""]:
    """The weight of an adapter that counts in full."""
    return jnp.ones((), jnp.float32)
