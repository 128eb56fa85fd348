"""Updates of bfloat16 parameters: rounded stochastically they learn, rounded to nearest they stall."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxtyping import Array, Float

import zoo
from zoo import train
from zoo.parallel import Module, full_precision

KEY = jax.random.key(0)


class Pair(Module):
    weight: Float[Array, "out in"]
    scale: Float[Array, "out"] = full_precision()


def test_small_updates_arrive_with_stochastic_rounding_alone():
    """600 steps of a quadratic whose updates are a thousandth of the parameters: float32 reaches the target, bfloat16
    with stochastic rounding comes within its spacing, and rounded to nearest it stays where it was."""
    target, start = jnp.full(256, 1.25), jnp.ones(256)

    @jax.jit
    def train_on(params, keys):
        def step(params, key):
            update = 1e-3 * jnp.sign(target - params.astype(jnp.float32))
            rounded = train.apply_updates(params, update, key=key)
            return (rounded if keys is not None else optax.apply_updates(params, update)), None

        return jax.lax.scan(step, params, jax.random.split(KEY, 600))[0].astype(jnp.float32)

    exact = train_on(start, None)
    stochastic = train_on(start.astype(jnp.bfloat16), KEY)
    nearest = jax.jit(
        lambda w: jax.lax.scan(lambda w, _: (train.apply_updates(w, jnp.full(256, 1e-3)), None), w, length=600)[0]
    )
    assert np.abs(exact - target).max() < 2e-3
    assert np.abs(stochastic.mean() - 1.25) < 2e-3 and np.abs(stochastic - target).max() < 0.05
    assert (nearest(start.astype(jnp.bfloat16)) == 1).all()


def test_dtypes_and_untouched_leaves_stay():
    model = Pair(jnp.ones((4, 8), jnp.bfloat16), jnp.ones(4))
    updates = Pair(jnp.full((4, 8), 2.0**-10, jnp.float32), jnp.full(4, 2.0**-10, jnp.float32))
    new = train.apply_updates(model, updates, key=KEY)
    assert (new.weight.dtype, new.scale.dtype) == (jnp.bfloat16, jnp.float32)
    assert (new.scale == 1 + 2.0**-10).all()
    assert set(np.unique(new.weight.astype(jnp.float32))) <= {1.0, 1 + 2.0**-7}
    nearest = train.apply_updates(
        model, eqx.tree_at(lambda pair: pair.weight, updates, jnp.full((4, 8), 2.0**-7 * 0.7))
    )
    assert nearest.weight.dtype == jnp.bfloat16 and (nearest.weight == 1 + 2.0**-7).all()
    assert (nearest.scale == new.scale).all()
    assert eqx.apply_updates(model, updates).weight.dtype == jnp.float32, "as the docstring says"
    same = train.apply_updates(model, eqx.tree_at(lambda pair: pair.weight, updates, None), key=KEY)
    assert same.weight is model.weight
    with pytest.raises(ValueError, match="weight is float16: keep parameters in float32"):
        train.apply_updates(
            eqx.tree_at(lambda pair: pair.weight, model, jnp.ones((4, 8), jnp.float16)), updates, key=KEY
        )


@pytest.mark.slow
def test_rounding_is_bitwise_the_same_on_any_mesh():
    make = lambda key: zoo.cast(
        zoo.models.Transformer(vocab=16, embed=16, layers=2, heads=2, mlp=16, key=key), "bfloat16"
    )
    results = []
    for sizes in ({}, {"data": 2, "fsdp": 2, "tensor": 2}):
        mesh = zoo.make_mesh(**sizes, devices=jax.devices()[: 8 if sizes else 1])
        model = zoo.init(make, KEY, mesh)
        updates = jax.tree.map(lambda x: jnp.full(x.shape, 1e-3, jnp.float32), zoo.trainable(model))
        apply = jax.jit(
            lambda model, updates, key, mesh=mesh: zoo.place(train.apply_updates(model, updates, key=key), mesh)
        )
        arrays, static = eqx.partition(model, eqx.is_array)
        del static
        results.append(jax.device_get(apply(arrays, zoo.place(updates, mesh.optimizer), KEY)))
    assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b), *results))
