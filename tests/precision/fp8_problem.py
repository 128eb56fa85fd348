"""Tiny models in low precision, and their losses and gradients on one device and on a mesh."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import zoo

KEY = jax.random.key(0)
TOKENS = jax.random.randint(KEY, (8, 8), 0, 32)
BATCH = {"tokens": TOKENS, "targets": jnp.roll(TOKENS, -1, 1)}
MESH = {"data": 2, "fsdp": 2, "tensor": 2}


def make_model(kind="Transformer", **options):
    sizes = {"vocab": 32, "embed": 32, "layers": 2, "heads": 4, "mlp": 64}
    return eqx.filter_jit(lambda: getattr(zoo.models, kind)(**sizes, **options, key=KEY))()


def loss_fn(model, batch, key=None):
    return zoo.cross_entropy(model, batch, key=key)


def run(model, key=None, observe=False, **sizes):
    """Return what `zoo.value_and_grad` does on a mesh of these sizes, gathered; on one device without sizes."""
    count = int(np.prod([*sizes.values(), 1]))
    mesh = zoo.make_mesh(**{"data": 1, **sizes}, devices=jax.devices()[:count])
    step = zoo.value_and_grad(loss_fn, mesh, observe=observe)
    return jax.device_get(step(zoo.place(model, mesh), zoo.place_batch(BATCH, mesh), key=key))


def largest_difference(tree, reference):
    """Return the largest difference of two trees, relative to the largest value of each array."""
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(reference), strict=True)
    return max(float(np.abs(x - y).max() / max(np.abs(y).max(), 1e-12)) for x, y in pairs)


@functools.cache
def run_float32():
    return run(make_model())
