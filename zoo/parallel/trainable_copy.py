"""A trainable copy of a frozen parameter: full fine-tuning of single parameters, as PEFT's `modules_to_save`."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree


class TrainableCopy(eqx.Module):
    """(1 - w) base + w array, in place of a parameter: w is `strength`, or 0 in layers where `applies` is False.

    `array` is trainable and `base` is frozen, so strength 0 restores the base model. `gather` replaces the copy by its
    value before a module is used, so layers only ever see an array.
    """

    base: Array
    array: Array
    applies: Bool[Array, "*stacked"]
    """False in layers of a stack that keep the frozen parameter."""
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
        """The interpolated parameter, in the dtype of `base`."""
        w = jnp.where(self.applies, self.strength, 0)
        w = w.reshape(*w.shape, *[1] * (self.base.ndim - w.ndim))
        return ((1 - w) * self.base + w * self.array).astype(self.base.dtype)


def is_trainable_copy(node: Any) -> bool:
    return isinstance(node, TrainableCopy)


def materialize(tree: PyTree) -> PyTree:
    """Replace every `TrainableCopy` in the tree by its value, an array."""
    return jax.tree.map(lambda x: x.value if is_trainable_copy(x) else x, tree, is_leaf=is_trainable_copy)
