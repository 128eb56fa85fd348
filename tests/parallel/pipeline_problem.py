"""Two small models of four repeats, a packed batch and a loss, for tests of pipelines."""

import functools
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import zoo
from zoo.layers import Attention, GatedDeltaNet, GatedMLP, MixtureOfExperts, SoftmaxRouter
from zoo.layers.token_info import pack_positions
from zoo.models.loss import cross_entropy_and_routing
from zoo.ops.rotary import Rotary

ROWS, SEQ, VOCAB = 16, 16, 96
MODEL_KEY, DATA_KEY, DROPOUT_KEY = jax.random.split(jax.random.key(0), 3)


def make_transformer(key, layers=4, embed=32):
    """Tied, with dropout."""
    sizes = {"vocab": VOCAB, "embed": embed, "layers": layers, "heads": 4, "kv_heads": 2, "mlp": 64}
    return zoo.models.Transformer(**sizes, tied=True, dropout=0.2, loop="scan", key=key)


def make_hybrid(key):
    """A delta rule and attention by turns, the second with a mixture of experts."""
    pattern = [partial(GatedDeltaNet, heads=4), partial(Attention, heads=4, rotary=Rotary(4))]
    sizes = {"vocab": VOCAB, "embed": 16, "layers": 4}
    return zoo.models.Hybrid(**sizes, pattern=pattern, ffns=[None, make_mixture], key=key)


def make_mixtures(key):
    """Mixtures of experts, of which the first layer has another mixer than the four that repeat."""
    pattern = [partial(Attention, heads=2), *[partial(Attention, heads=4, rotary=Rotary(4))] * 4]
    sizes = {"vocab": VOCAB, "embed": 16, "layers": 5}
    return zoo.models.Hybrid(**sizes, pattern=pattern, ffns=[make_mixture], key=key)


def make_mixture(embed, *, out_scale, key):
    router, expert = partial(SoftmaxRouter, embed, 4, 2), partial(GatedMLP, embed, 16, out_scale=out_scale)
    return MixtureOfExperts(router, expert, 4, key=key)


def make_batch(make):
    """Two documents in each row, of other lengths in every row. With padding, and other weights in every row, for a
    model without routers: their losses are means over the tokens of a micro-batch."""
    text_key, length_key = jax.random.split(DATA_KEY)
    text = jax.random.randint(text_key, (ROWS, SEQ + 1), 0, VOCAB)
    index, lengths = jnp.arange(SEQ), jax.random.randint(length_key, (ROWS, 1), 2, SEQ + 1)
    segment_ids, weights = jnp.where(index < lengths // 2, 1, 2), jnp.ones((ROWS, SEQ))
    if make is make_transformer:
        segment_ids = segment_ids * (index < lengths)
        weights = (index < lengths) * jnp.linspace(0.1, 1, ROWS)[:, None]
    batch = {"tokens": text[:, :-1], "targets": text[:, 1:], "weights": weights}
    return batch | {"segment_ids": segment_ids, "positions": pack_positions(segment_ids)}


def loss_fn(model, batch, key=None):
    """With auxiliary losses of the routers, by rows, where there are routers; their loads in `aux`."""
    has_routers = any(isinstance(x, MixtureOfExperts) for x in jax.tree.leaves(model, is_leaf=is_mixture))
    options = {"balance": 0.1, "router_z": 0.01, "over": "row"} if has_routers else {}
    sums, routing = cross_entropy_and_routing(model, batch, key=key, z_loss=1e-3, chunk=10, **options)
    return sums, [zoo.models.tokens_per_expert(layer) for layer in routing]


def is_mixture(x):
    return isinstance(x, MixtureOfExperts)


@functools.cache
def make_model(make):
    """With large embeddings, so that norms do not magnify the rounding of gradients."""
    model = eqx.filter_jit(make)(MODEL_KEY)
    return eqx.tree_at(lambda model: model.embedding.weight, model, replace_fn=lambda weight: 10 * weight)


def compute(make, mesh, *, dropout=False, loss=loss_fn, **options):
    """Return loss and aux, and the gradients, on the host."""
    run = zoo.value_and_grad(loss, mesh, has_aux=True, **options)
    args = zoo.place(make_model(make), mesh), zoo.place_batch(make_batch(make), mesh)
    return jax.device_get(run(*args, key=DROPOUT_KEY if dropout else None))


@functools.cache
def compute_on_one_device(make, *, dropout=False, loss=loss_fn):
    return compute(make, zoo.make_mesh(devices=jax.devices()[:1]), dropout=dropout, loss=loss)


def assert_equal_to_one_device(make, mesh, *, dropout=False, loss=loss_fn, **options):
    """Loss to 1e-5, loads exactly, each gradient to 2e-5 of its largest number."""
    (value, loads), gradients = compute(make, mesh, dropout=dropout, loss=loss, **options)
    (expected_value, expected_loads), expected = compute_on_one_device(make, dropout=dropout, loss=loss)
    assert abs(value - expected_value) < 1e-5 * abs(expected_value)
    assert all(np.array_equal(*pair) for pair in zip(loads, expected_loads, strict=True))
    for a, b in zip(*map(jax.tree.leaves, (zoo.parallel.rounds.merge_rounds(gradients), expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * np.abs(b).max())
