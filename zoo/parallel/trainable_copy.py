"""A parameter that is learnt as a whole, beside the numbers that it started with."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree


class TrainableCopy(eqx.Module):
    """(1 - w) base + w array, in the place of an array: w is `weight`, or 0 where it does not apply.

    `array` is learnt and `base` is not, so that the parameter can be switched off, and the model is what it was. Where
    modules are used, `gather` has put the sum in its place: nobody else has to know.
    """

    base: Array
    array: Array
    applies: Bool[Array, "*stacked"]
    """False in a layer in which the parameter stays, where it is stacked with others."""
    strength: Float[Array, "*stacked"]

    adapter_name: str = eqx.field(static=True)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    @property
    def ndim(self) -> int:
        return self.base.ndim

    @property
    def dtype(self) -> Any:
        return self.base.dtype

    @property
    def value(self) -> Array:
        """In the dtype of the base."""
        w = jnp.where(self.applies, self.strength, 0)
        w = w.reshape(*w.shape, *[1] * (self.base.ndim - w.ndim))
        return ((1 - w) * self.base + w * self.array).astype(self.base.dtype)


def is_trainable_copy(node: Any) -> bool:
    return isinstance(node, TrainableCopy)


def materialize(tree: PyTree) -> PyTree:
    """The tree with a plain array in place of every `Learnt`."""
    return jax.tree.map(lambda x: x.value if is_trainable_copy(x) else x, tree, is_leaf=is_trainable_copy)
