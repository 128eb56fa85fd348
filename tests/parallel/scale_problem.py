"""A model of one sharded weight and its loss, for tests of gradients and closures."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import zoo
from zoo.parallel import Module

KEY = jax.random.key(0)


class Scale(Module):
    weight: Float[Array, "embed"]

    def __call__(self, x):
        return x * zoo.parallel.gather(self).weight


def loss_fn(model, batch, key=None):
    y = model(batch["x"])
    return (y * batch["weights"][:, None]).sum(), batch["weights"].sum()


def make_problem(rows=8, **sizes):
    mesh = zoo.make_mesh(**sizes)
    x = jax.random.normal(KEY, (rows, 16))
    return mesh, zoo.place(Scale(jnp.arange(16.0)), mesh), {"x": x, "weights": jnp.arange(rows) / 4}
