"""The chunked cross-entropy, and that of a sharded vocabulary, equal the reference: values and gradients."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zoo
from zoo.models.loss import chunked_cross_entropy, token_losses
from zoo.ops.cross_entropy import cross_entropy
from zoo.parallel import Dim

KEY = jax.random.key(0)


@given(
    chunk=st.sampled_from([1, 4, 7, 64]),
    z_loss=st.sampled_from([0.0, 1e-2]),
    seed=st.integers(0, 9),
    bias=st.booleans(),
)
def test_chunked_cross_entropy_equals_reference(chunk, z_loss, seed, bias):
    head_key, x_key, target_key, weight_key = jax.random.split(jax.random.key(seed), 4)
    head = zoo.layers.Linear(8, 11, bias=bias, key=head_key)
    x = jax.random.normal(x_key, (13, 8)) * 3
    targets = jax.random.randint(target_key, (13,), 0, 11)
    weights = jax.random.uniform(weight_key, (13,)) * (jnp.arange(13) % 3 > 0)

    def reference(args):
        head, x, weights = args
        return (cross_entropy(head(x), targets, z_loss=z_loss) * weights).sum()

    def in_chunks(args):
        head, x, weights = args
        return 0.5 * chunked_cross_entropy(head, x, targets, weights, z_loss, chunk)

    expected, expected_grads = eqx.filter_value_and_grad(reference)((head, x, weights))
    loss, grads = eqx.filter_value_and_grad(in_chunks)((head, x, weights))
    assert jnp.allclose(2 * loss, expected, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        assert jnp.allclose(2 * a, b, rtol=1e-4, atol=1e-5)
    assert jnp.allclose(chunked_cross_entropy(head, x, targets, weights, z_loss, chunk), expected, rtol=1e-5), (
        "without a gradient"
    )


def test_chunked_cross_entropy_never_holds_all_logits():
    head = zoo.layers.Linear(16, 512, key=KEY)
    x, targets, weights = jnp.ones((256, 16)), jnp.zeros(256, int), jnp.ones(256)

    def loss(head, x):
        return chunked_cross_entropy(head, x, targets, weights, 0.0, 32)

    step = eqx.filter_jit(eqx.filter_grad(loss)).lower(head, x).compile()
    assert step.compiled.memory_analysis().temp_size_in_bytes < 256 * 512 * 4 / 2


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_cross_entropy_of_a_sharded_vocabulary(z_loss):
    mesh = zoo.make_mesh(data=2, tensor=4)
    logits = jax.random.normal(KEY, (4, 6, 16)) * 5
    head = zoo.place(zoo.layers.Linear(16, 16, in_=Dim("embed"), out=Dim("vocab"), key=KEY), mesh)
    targets = jax.random.randint(KEY, (4, 6), 0, 16)
    sharded = zoo.spmd(lambda h, x, t: token_losses(h(x), t, z_loss=z_loss), mesh, out="batch seq")(
        head, logits, targets
    )
    assert jnp.allclose(sharded, cross_entropy(head(logits), targets, z_loss=z_loss), rtol=1e-5, atol=1e-5)


def test_cross_entropy_weights_default_to_one():
    model = zoo.models.Transformer(vocab=16, embed=8, layers=1, heads=2, mlp=8, key=KEY)
    tokens = jax.random.randint(KEY, (2, 5), 0, 16)
    batch = {"tokens": tokens, "targets": tokens}
    total, count = zoo.cross_entropy(model, batch)
    assert count == 10
    assert jnp.allclose(total, cross_entropy(model(tokens), tokens).sum(), rtol=1e-5)
    none = zoo.cross_entropy(model, batch | {"weights": jnp.zeros((2, 5))})
    assert none == (0, 0)
