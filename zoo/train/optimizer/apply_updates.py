"""Apply an optimizer's updates to parameters, and round bfloat16 ones stochastically or to nearest."""

import zlib
from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Key, PyTree

from zoo.ops.stochastic_rounding import stochastic_round
from zoo.parallel.module import Leaf, map_leaves

_Model = TypeVar("_Model")


def apply_updates(model: _Model, updates: PyTree, *, key: Key[Array, ""] | None = None) -> _Model:
    """Add updates to parameters in float32, and round the sums to the dtypes of the parameters: to bfloat16
    stochastically (`zoo.ops.stochastic_rounding`), or to nearest without a `key`.

        model = zoo.cast(zoo.models.Transformer(...), "bfloat16")     # no float32 master weights
        updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(model))
        model = zoo.place(train.apply_updates(model, updates, key=jax.random.fold_in(key, step)), mesh)

    A bfloat16 has 8 significant bits: rounded to nearest, an update below 1/512 of its parameter is lost. Rounded
    stochastically it arrives on average (Zamirai et al., arXiv:2010.06192, section 3). Updates should be float32, as
    `zoo.train.adamw` returns them: optax keeps updates in the dtype of the parameters. With float32 updates,
    `eqx.apply_updates` turns bfloat16 parameters into float32 ones.

    The random bits of a parameter depend only on `key`, its path and the index in the global array, so it is rounded
    the same on any mesh. **Raises** `ValueError` for float16 parameters, which have too many significant bits: keep
    such parameters in float32, with a loss scale.
    """
    parameters, rest = eqx.partition(model, jax.tree.map(lambda u: u is not None, updates, is_leaf=lambda u: u is None))

    def add(leaf: Leaf, parameter: Array, update: Array) -> Array:
        if parameter.dtype == jnp.float16:
            raise ValueError(f"{leaf.name} is float16: keep parameters in float32, and cast them inside the loss")
        total = parameter.astype(jnp.promote_types(parameter.dtype, jnp.float32)) + update
        if parameter.dtype != jnp.bfloat16 or key is None:
            return total.astype(parameter.dtype)
        bits = jax.random.bits(fold_in_path(key, leaf), parameter.shape, jnp.uint32)
        return stochastic_round(total, bits, jnp.bfloat16)

    return eqx.combine(map_leaves(add, parameters, updates), rest)


def fold_in_path(key: Key[Array, ""], leaf: Leaf) -> Key[Array, ""]:
    """Return a key for one array of a tree, by its path."""
    return jax.random.fold_in(key, zlib.crc32(leaf.name.encode()))
