"""Exponential moving average (EMA) of a model's parameters."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree


def update_ema(average: PyTree | None, model: PyTree, decay: float | int | Float[Array, ""]) -> PyTree:
    """Update the average: `decay * average + (1 - decay) * model`, in float32. `average=None` starts with a copy.

    The average holds the inexact arrays of `model` and None elsewhere: `eqx.combine(average, model)` is a model.
    Create it before the loop (`average = update_ema(None, model, decay)`) and pass it through the jitted step, which
    may donate it.
    """
    parameters = eqx.filter(model, eqx.is_inexact_array)
    if average is None:
        # Copy, because both are donated and may not share a buffer.
        return jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), parameters)
    return jax.tree.map(lambda a, x: a + (1 - decay) * (x.astype(jnp.float32) - a), average, parameters)
