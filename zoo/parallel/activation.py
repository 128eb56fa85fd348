"""Values of a forward pass with the names of their dims, and edits of them."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Shaped

from .module import Module


class Activation(Module):
    """A value of a forward pass, and the names of its dims, by which a mesh shards it.

    `jnp` functions and NumPy take it as its array.
    """

    array: Shaped[Array, "..."]

    array_dims: tuple[str, ...] = eqx.field(static=True)

    def __check_init__(self):
        if hasattr(self.array, "ndim") and self.array.ndim != len(self.array_dims):
            raise ValueError(f"the dims {self.array_dims} name {len(self.array_dims)} of {self.array.ndim} dims")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.array.shape

    @property
    def dtype(self) -> Any:
        """Dtype of the array."""
        return self.array.dtype

    def __getitem__(self, index: Any) -> Array:
        return self.array[index]

    def __jax_array__(self) -> Array:
        return self.array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(jax.device_get(self.array), dtype)


class Edit(Module):
    """An edit of a value: `x` becomes `function(x, *arrays)`.

    The arrays of an edit of all layers, `layers.*.attention`, have a leading dim of the layers that have the value.
    """

    name: str = eqx.field(static=True)
    function: Callable = eqx.field(static=True)
    arrays: tuple[Activation, ...] = ()
