"""The exponential moving average of a model's parameters."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree


def update_ema(average: PyTree | None, model: PyTree, decay: float | int | Float[Array, ""]) -> PyTree:
    """`decay * average + (1 - decay) * model`, leaf by leaf in float32; where `average` is None, `model` in float32.

    The average holds the inexact arrays of `model` and None elsewhere: `eqx.combine(average, model)` is a model. Start
    it before the loop (`average = ema(None, model, decay)`) and pass it through the jitted step, which may donate it.
    """
    parameters = eqx.filter(model, eqx.is_inexact_array)
    if average is None:
        # A copy: the average and the model are both donated, and must not be one buffer.
        return jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), parameters)
    return jax.tree.map(lambda a, x: a + (1 - decay) * (x.astype(jnp.float32) - a), average, parameters)
