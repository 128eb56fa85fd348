"""Sparse latent attention: the indexer's formula, dense attention to what it selects, caches, packed rows, meshes."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.layers.random_layers import activations, randomize, relative_error
from zoo import Layout
from zoo.layers import LatentAttention, LightningIndexer, SparseLatentAttention, TokenInfo
from zoo.layers.token_info import pack_positions
from zoo.ops.rotary import Rotary
from zoo.parallel import all_gather, gather, shard

EMBED, SEQ, TOP = 24, 8, 3
ATTENTION = {"heads": 4, "latent": 16, "head_dim": 6, "value_dim": 5, "query_latent": 10}
INDEXER = {"heads": 4, "query_latent": 10, "head_dim": 8, "top": TOP}
SEGMENTS = jnp.array([[1, 1, 1, 1, 1, 2, 2, 2]] * 4)
INFO = TokenInfo(pack_positions(SEGMENTS), SEGMENTS)

SLOW = partial(pytest.param, marks=pytest.mark.slow)


def make_layer(*, has_indexer=True, **options):
    attention = partial(LatentAttention, EMBED, rotary=Rotary(4, interleaved=True), **ATTENTION)
    indexer = partial(LightningIndexer, EMBED, **INDEXER | options) if has_indexer else None
    return randomize(partial(SparseLatentAttention, attention, indexer))


@eqx.filter_jit
def forward(layer, x, info=None):
    """Return the output of all tokens at once, and what they select."""
    y, (_, selected) = layer.mix(x, info or TokenInfo())
    return y, selected


@eqx.filter_jit
def forward_dense(layer, x):
    return layer.attention(x, TokenInfo())[0]


def select_naively(layer, x):
    """Compute the docstring's scores for each query and head, and select the highest."""
    indexer, angles = layer.indexer, layer.attention.rotary(jnp.arange(x.shape[1]))
    project = lambda layer, x: (layer.attention.compress_queries(x), layer.indexer.project_keys(x, angles))
    latent, keys = (np.asarray(projected) for projected in eqx.filter_jit(project)(layer, x))
    cos, sin = (np.asarray(angle) for angle in angles)
    selected = np.zeros((len(x), x.shape[1], x.shape[1]), bool)
    for row, t in np.ndindex(selected.shape[:2]):
        scores = np.zeros(t + 1)
        for h, W_query in enumerate(np.asarray(indexer.query_up.weight).reshape(-1, 8, 10)):
            q = W_query @ latent[row, t]
            q = np.roll(q, -4) if indexer.rotates_last else q
            a, b = q[:2], q[2:4]
            q = np.concatenate([a * cos[t] - b * sin[t], b * cos[t] + a * sin[t], q[4:]])
            q = np.roll(q, 4) if indexer.rotates_last else q
            weight = np.asarray(indexer.head_weights.weight)[h] @ np.asarray(x[row, t])
            scores += weight * np.maximum(keys[row, : t + 1] @ q, 0) * (8 * 4) ** -0.5
        selected[row, t, np.argsort(-scores)[:TOP]] = True
    return selected


@pytest.mark.parametrize("rotates_last", [False, True])
def test_indexer_selects_the_keys_of_highest_scores(rotates_last):
    layer, x = make_layer(rotates_last=rotates_last), activations(2, SEQ, EMBED)
    y, selected = forward(layer, x)
    causal = np.tril(np.ones((SEQ, SEQ), bool))
    assert np.array_equal(selected & causal, select_naively(layer, x) & causal)
    assert ((selected & causal).sum(-1) == np.minimum(np.arange(SEQ) + 1, TOP)).all()
    assert relative_error(y, forward_dense(layer, x)) > 0.1
    for options in ({"interleaved": True}, {"rotates_last": not rotates_last}):
        assert not np.array_equal(forward(make_layer(**options), x)[1], selected)


def test_indexer_rotates_the_last_features_of_keys_as_the_first():
    layer, other = make_layer(rotates_last=True).indexer, make_layer().indexer
    roll = lambda x: jnp.roll(x, -4, axis=0)
    parts = lambda indexer: (indexer.key.weight, indexer.key_norm.weight, indexer.key_norm.bias)
    other = eqx.tree_at(parts, other, [roll(x) for x in parts(layer)])
    x, angles = activations(2, SEQ, EMBED), Rotary(4)(jnp.arange(SEQ))
    keys, wanted = (indexer.project_keys(x, angles) for indexer in (layer, other))
    np.testing.assert_allclose(jnp.roll(keys, -4, axis=-1), wanted, atol=1e-6)


def test_sparse_attention_is_dense_where_all_keys_are_selected():
    layer, x = make_layer(top=SEQ), activations(2, SEQ, EMBED)
    y, selected = forward(layer, x)
    assert selected is None and relative_error(y, forward_dense(layer, x)) < 1e-6


def loss_fn(layer, batch):
    """Return a loss of two layers, of which the second has no indexer and takes the selection of the first."""
    x, weights, *info = batch
    first, second = gather(layer)
    y, (_, selected) = first.mix(x, TokenInfo(*info))
    y = y + second.mix(y, TokenInfo(*info), None, selected)[0]
    return (y * weights).sum(), jnp.float32(x.size)


def make_batch(rows):
    activity = (activations(rows, SEQ, EMBED, seed=seed) for seed in (1, 2))
    return (*activity, INFO.positions[:rows], SEGMENTS[:rows])


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"data": 2, "fsdp": 2, "tensor": 2}, {"context": 2}], ids=str)
def test_sparse_attention_on_a_mesh_equals_one_device(axes):
    mesh = zoo.make_mesh(**axes, layout=Layout(context="gathered"), devices=jax.devices()[: np.prod([*axes.values()])])
    layers, batch = (make_layer(), make_layer(has_indexer=False)), make_batch(4)
    loss, grads = zoo.value_and_grad(loss_fn, mesh)(zoo.place(layers, mesh), batch)
    reference = eqx.filter_jit(eqx.filter_value_and_grad(lambda layers: loss_fn(layers, batch)[0] / batch[0].size))
    expected_loss, expected_grads = reference(layers)
    assert abs(loss - expected_loss) < 1e-5 * abs(expected_loss)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        assert np.abs(a - b).max() <= 2e-5 * np.abs(b).max()
    assert all((x == 0).all() for x in jax.tree.leaves(grads[0].indexer))
    assert any((x != 0).any() for x in jax.tree.leaves(grads[0].attention.query_down))


def test_packed_rows_select_within_their_segment():
    layer, x = make_layer(), activations(4, SEQ, EMBED)
    packed, _ = forward(layer, x, INFO)
    for document in (slice(0, 5), slice(5, 8)):
        assert relative_error(packed[:, document], forward(layer, x[:, document])[0]) < 1e-5


def decode_in_pieces(layer, x):
    """Prefill six tokens, of which the first is padding in odd rows, then decode one token at a time."""
    layer, x = gather(layer), all_gather(x, "seq", axis=1)
    positions = jnp.arange(SEQ) - jnp.arange(x.shape[0])[:, None] % 2
    state, outputs = layer.init_state(x.shape[0], SEQ), []
    pieces = [(shard(x[:, :6], "seq", axis=1), shard(positions[:, :6], "seq", axis=1))]
    pieces += [(x[:, i : i + 1], positions[:, i : i + 1]) for i in range(6, SEQ)]
    for piece, places in pieces:
        y, state = layer(piece, TokenInfo(places), state)
        outputs.append(all_gather(y, "seq", axis=1))
    return shard(jnp.concatenate(outputs, 1), "seq", axis=1)


@pytest.mark.parametrize("axes", [SLOW(None), SLOW({"tensor": 2}), {"context": 2}], ids=str)
def test_sparse_attention_with_a_cache_equals_without(axes):
    layer, x = make_layer(), activations(2, SEQ, EMBED)
    if axes is None:
        decoded = eqx.filter_jit(decode_in_pieces)(layer, x)
    else:
        mesh = zoo.make_mesh(**axes, devices=jax.devices()[:2])
        decoded = zoo.spmd(decode_in_pieces, mesh, out="batch seq embed")(zoo.place(layer, mesh), x)
    assert relative_error(decoded[:1], forward(layer, x[:1])[0]) < 1e-5
    assert relative_error(decoded[1:, 1:], forward(layer, x[1:, 1:])[0]) < 1e-5
    assert layer.init_state(2, SEQ).index_keys.features.shape == (2, SEQ, 8)
    assert make_layer(has_indexer=False).init_state(2, SEQ).index_keys is None


@pytest.mark.ci
def test_sparse_attention_refuses_what_it_cannot_compute():
    mesh = zoo.make_mesh(context=2, devices=jax.devices()[:2])
    with pytest.raises(
        ValueError, match="'ring' cannot compute this, because tokens select keys from more .* gathered"
    ):
        zoo.value_and_grad(loss_fn, mesh)(zoo.place((make_layer(),) * 2, mesh), make_batch(2))
    layer, x = make_layer(), activations(2, SEQ, EMBED)
    with pytest.raises(ValueError, match="'blockwise' cannot compute this, because queries select their keys"):
        zoo.set_implementations(layer, attention="blockwise").mix(x, TokenInfo())
    with pytest.raises(ValueError, match="run it in a SelectionBlock"):
        make_layer(has_indexer=False)(x, TokenInfo())
    with pytest.raises(ValueError, match="top is 0: expected at least 1"):
        make_layer(top=0)
