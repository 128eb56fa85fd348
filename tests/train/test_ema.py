"""Exponential moving average: its formula, its precision, and donation together with the model."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from zoo.train import update_ema


class Model(eqx.Module):
    weight: jax.Array
    half: jax.Array
    count: jax.Array
    activation: object = eqx.field(static=True)


def make(scale: float) -> Model:
    return Model(jnp.arange(6.0) * scale, jnp.full(4, scale, jnp.bfloat16), jnp.array(3), jax.nn.gelu)


def test_ema_formula_in_float32():
    decay, models = 0.9, [make(scale) for scale in (1.0, 2.0, -1.0)]
    average = update_ema(None, models[0], decay)
    assert average.half.dtype == jnp.float32 and average.count is None
    wanted = np.asarray(models[0].weight, np.float64)
    for model in models[1:]:
        average = update_ema(average, model, decay)
        wanted = decay * wanted + (1 - decay) * np.asarray(model.weight, np.float64)
    np.testing.assert_allclose(average.weight, wanted, rtol=1e-6)
    assert eqx.combine(average, models[0]).count == 3


def test_ema_keeps_small_steps_of_bfloat16_models():
    average = update_ema(None, make(1.0), 0.999)
    for _ in range(100):
        average = update_ema(average, make(1.0078125), 0.999)
    np.testing.assert_allclose(average.half, 1 + 0.0078125 * (1 - 0.999**100), rtol=1e-5)


def test_ema_is_donated_with_the_model_and_compiled_once():
    traced = []

    @eqx.filter_jit(donate="all")
    def step(model, average):
        traced.append(None)
        model = jax.tree.map(lambda x: x + 1, model)
        return model, update_ema(average, model, 0.5)

    model = eqx.nn.Linear(3, 3, key=jr.key(0))
    average = update_ema(None, model, 0.5)
    for _ in range(3):
        model, average = step(model, average)
    assert len(traced) == 1
    np.testing.assert_allclose(np.asarray(model.weight - average.weight), 0.5 + 0.25 + 0.125, rtol=1e-5)
