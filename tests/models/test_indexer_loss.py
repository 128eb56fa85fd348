"""The loss of indexers: who learns from it, that it is the divergence, in every loop and on meshes."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zoo
from zoo import Layout
from zoo.layers import (
    BlockIndexer,
    CompressedAttention,
    GatedMLP,
    IndexedAttention,
    LatentAttention,
    LightningIndexer,
    MeanKeyIndexer,
    RMSNorm,
    SparseLatentAttention,
    TokenInfo,
)
from zoo.layers.token_info import pack_positions, token_info
from zoo.models import build_decoder, indexer_loss
from zoo.models.hf.families.glm_moe_dsa_layers import SelectionBlock
from zoo.models.indexer_loss import attend_densely
from zoo.ops.attention import AttentionMask
from zoo.ops.attention.indexer import indexer_divergence
from zoo.ops.attention.reference import attention_probabilities
from zoo.ops.rotary import Rotary, apply_rotary
from zoo.parallel import SEQUENCE

VOCAB, EMBED, ROWS, SEQ, TOP = 13, 16, 4, 12, 3


def make_model(layers=2, **options):
    attention = partial(LatentAttention, EMBED, 4, latent=8, head_dim=4, query_latent=10, rotary=Rotary(4))
    indexer = partial(LightningIndexer, EMBED, 2, query_latent=10, head_dim=8, top=TOP)
    layer = (partial(SparseLatentAttention, attention, indexer), partial(GatedMLP, EMBED, 16))
    sizes = {"vocab": VOCAB, "embed": EMBED, "norm": partial(RMSNorm, EMBED), "tied": True}
    return build_decoder(**sizes, layers=[layer] * layers, **options, key=jax.random.key(0))


def make_compressed(**options):
    """Two layers of compressed keys: all of them, and those that an indexer selects."""
    sizes = {"head_dim": 8, "query_latent": 10, "window": 2, "out_groups": 2, "out_latent": 4}
    attention = partial(CompressedAttention, EMBED, 4, rotary=Rotary(4), **sizes)
    indexer = partial(BlockIndexer, EMBED, 2, query_latent=10, head_dim=8, block=2, top=TOP - 1)
    mixers = partial(attention, block=3), partial(attention, block=2, overlap=True, indexer=indexer)
    layers = [(mixer, partial(GatedMLP, EMBED, 16)) for mixer in mixers]
    norms = {"vocab": VOCAB, "embed": EMBED, "norm": partial(RMSNorm, EMBED), "tied": True}
    return build_decoder(**norms, layers=layers, **options, key=jax.random.key(0))


def make_indexed(**options):
    """Two layers that select blocks by mean keys."""
    indexer = partial(MeanKeyIndexer, EMBED, 4, head_dim=6, block=2, top=TOP - 1)
    mixer = partial(IndexedAttention, EMBED, 4, kv_heads=2, indexer=indexer, rotary=Rotary(4))
    sizes = {"vocab": VOCAB, "embed": EMBED, "norm": partial(RMSNorm, EMBED), "tied": True}
    layers = [(mixer, partial(GatedMLP, EMBED, 16))] * 2
    return build_decoder(**sizes, layers=layers, **options, key=jax.random.key(0))


def make_batch():
    rng = np.random.default_rng(1)
    tokens, targets = (jnp.asarray(rng.integers(0, VOCAB, (ROWS, SEQ))) for _ in range(2))
    segments = jnp.array([[1] * 12, [1] * 7 + [2] * 5, [0] * 2 + [1] * 10, [1] * 4 + [2] * 4 + [0] * 4])
    return {
        "tokens": tokens,
        "targets": jnp.where(segments == 0, -1, targets),
        "segment_ids": segments,
        "positions": pack_positions(segments),
    }


def find_moved(gradients):
    """Return the names of parameters with a gradient other than 0."""
    paths = zoo.models.list_parameter_paths(gradients)
    return {path.name for path, x in zip(paths, jax.tree.leaves(gradients), strict=True) if x is not None and x.any()}


@eqx.filter_jit
def differentiate(model, batch):
    """Return the loss of indexers and its gradient, and cross-entropy with and without it, each with its gradient."""

    def mean(loss_fn):
        def loss(model):
            total, count = loss_fn(model, batch)
            return total / count

        return eqx.filter_value_and_grad(loss)(model)

    return mean(indexer_loss), mean(partial(zoo.cross_entropy, indexer=0.5)), mean(zoo.cross_entropy)


@pytest.mark.parametrize(
    ("make", "count"), [(make_model, 5), (make_compressed, 6), (make_indexed, 4)], ids=["latents", "blocks", "means"]
)
def test_only_indexers_learn_from_their_loss(make, count):
    """And only from it: with the loss of the model, each gradient is what either loss gives."""
    model, batch = make(), make_batch()
    (divergence, of_indexers), (both, of_both), (entropy, of_model) = differentiate(model, batch)
    assert divergence > 0.01
    np.testing.assert_allclose(both, entropy + 0.5 * divergence, rtol=1e-6)
    indexers = {path.name for path in zoo.models.list_parameter_paths(model) if ".indexer." in path.name}
    assert find_moved(of_indexers) == indexers and len(indexers) == count
    assert not find_moved(of_model) & indexers
    for x, y, z in zip(*map(jax.tree.leaves, (of_both, of_model, of_indexers)), strict=True):
        np.testing.assert_allclose(x, y + 0.5 * z, atol=1e-6)


def test_loss_is_the_divergence_from_the_attention():
    """Of one layer: over the keys that are selected, and over all in a layer that attends densely."""
    model, batch = make_model(layers=1), make_batch()
    segments = batch["segment_ids"]

    @eqx.filter_jit
    def measure(model):
        block = next(model.stack.iter_blocks())
        info = token_info(batch["tokens"], segment_ids=segments, positions=batch["positions"])
        x = block.mixer_norm(model.embed(batch["tokens"], info).x)
        mixer, attention = block.mixer, block.mixer.attention
        cos_sin = attention.rotary(info.positions)
        latent, features = attention.compress_queries(x), attention.project_features(x, cos_sin)
        scores = mixer.indexer.score(x, latent, mixer.indexer.project_keys(x, cos_sin), cos_sin)
        _, (_, selected) = mixer.mix(x, info)
        mask = AttentionMask(True, None, segments, segments, selected=selected)
        key, _ = attention._expand()(features)
        query = attention.expand_queries(latent, cos_sin)
        probabilities = attention_probabilities(query, key, mask, scale=attention.scale).sum(1)
        divergence = indexer_divergence(probabilities, scores, mask.materialize(SEQ, SEQ))
        total = jnp.where(segments == 0, 0, divergence).sum()
        return total, indexer_loss(model, batch), zoo.cross_entropy(model, batch)

    losses = []
    for variant in (model, attend_densely(model)):
        expected, (total, count), entropy = measure(variant)
        np.testing.assert_allclose(total, expected, rtol=1e-5)
        assert count == (segments > 0).sum()
        losses.append((total, entropy[0]))
    assert (np.abs(np.subtract(*losses)) > 0.1).all(), "both losses depend on the keys that are attended to"
    assert attend_densely(attend_densely(model), dense=False) == model


def test_steps_on_the_loss_lower_it():
    model, batch = attend_densely(make_model()), make_batch()
    optimizer = optax.adam(1e-2)
    parameters, static = eqx.partition(model, eqx.is_inexact_array)

    def step(carry, _):
        parameters, state = carry

        def loss(parameters):
            total, count = indexer_loss(eqx.combine(parameters, static), batch)
            return total / count

        value, gradients = jax.value_and_grad(loss)(parameters)
        updates, state = optimizer.update(gradients, state)
        return (optax.apply_updates(parameters, updates), state), value

    run = jax.jit(lambda carry: jax.lax.scan(step, carry, length=30))
    losses = run((parameters, optimizer.init(parameters)))[1]
    assert losses[-1] < 0.6 * losses[0]


def compare_with_one_device(model, loss_fn, mesh, make=make_model, **options):
    batch = make_batch()
    loss, gradients = zoo.value_and_grad(loss_fn, mesh, **options)(zoo.place(model, mesh), batch)

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def reference(model):
        total, count = loss_fn(model, batch)
        return total / count

    expected, expected_gradients = reference(make())
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for ours, wanted in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients), strict=True):
        assert np.abs(ours - wanted).max() <= max(2e-5 * np.abs(wanted).max(), 1e-7)


with_indexer = partial(zoo.cross_entropy, indexer=0.5)
GATHERED = Layout(context="gathered")


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("axes", "layout", "options"),
    [
        ({"data": 2, "context": 2, "tensor": 2}, GATHERED, {"remat": "full", "loop": "scan"}),
        ({"fsdp": 2, "tensor": 2}, SEQUENCE, {"loop": "plain"}),
    ],
    ids=["context and remat", "sequence parallelism"],
)
def test_loss_on_a_mesh_equals_one_device(axes, layout, options):
    devices = jax.devices()[: int(np.prod([*axes.values()]))]
    mesh = zoo.make_mesh(**{"data": 1, **axes}, layout=layout, devices=devices)
    compare_with_one_device(zoo.configure(make_model(), **options), with_indexer, mesh)


def test_loss_of_indexed_blocks_on_a_mesh_equals_one_device():
    mesh = zoo.make_mesh(data=1, fsdp=2, context=2, tensor=2, layout=GATHERED)
    model = zoo.configure(make_indexed(), loop="scan", remat="full")
    compare_with_one_device(model, with_indexer, mesh, make_indexed)


def test_loss_of_mean_keys_is_the_divergence():
    """Of one text, with attention to all keys."""
    mixer = next(attend_densely(make_indexed()).stack.iter_blocks()).mixer
    x = jax.random.normal(jax.random.key(2), (1, SEQ, EMBED))
    names = zoo.capture(lambda mixer, x: mixer(x, TokenInfo())[0], "indexer_divergence")(mixer, x)[1]
    (divergence,) = names.values()
    attention, indexer = mixer.attention, mixer.indexer
    query, key, _ = attention.project(x, TokenInfo(), None)
    probabilities = attention_probabilities(query, key, AttentionMask(True)).sum(1)[0]
    cos_sin = attention.rotary(jnp.arange(SEQ)[None])
    index_query = indexer.project_query(x, attention.rotary, cos_sin)
    blocks = indexer.average(indexer.project_key(x).reshape(1, SEQ // 2, 2, 1, -1))
    cos, sin = (angles[:, ::2] for angles in cos_sin)
    scores = indexer.score(index_query, apply_rotary(blocks, cos, sin, interleaved=False))[0]
    for t in range(SEQ):
        whole = (t + 1) // 2
        if whole == 0:
            assert divergence[0, t] == 0
            continue
        target = np.asarray(probabilities[t, : 2 * whole].reshape(whole, 2).sum(1), np.float64)
        target /= target.sum()
        found = np.asarray(jax.nn.log_softmax(scores[t, :whole]), np.float64)
        np.testing.assert_allclose(divergence[0, t], (target * (np.log(target) - found)).sum(), rtol=1e-3, atol=1e-6)


def test_loss_of_compressed_keys_on_a_mesh_equals_one_device():
    mesh = zoo.make_mesh(data=1, fsdp=2, context=2, tensor=2, layout=GATHERED)
    model = zoo.configure(make_compressed(), loop="scan", remat="full")
    compare_with_one_device(model, with_indexer, mesh, make_compressed)
    assert attend_densely(attend_densely(model), dense=False) == model
    assert [block.mixer.dense for block in attend_densely(model).stack.iter_blocks()] == [False, True]


@pytest.mark.slow
def test_loss_ahead_in_microbatches_equals_one_device():
    mesh = zoo.make_mesh(fsdp=2, devices=jax.devices()[:2])
    model = zoo.configure(make_model(), remat="full", loop="ahead")
    compare_with_one_device(model, indexer_loss, mesh, microbatches=2)


@pytest.mark.ci
def test_blocks_that_share_selections_are_measured_alike():
    models = [make_model(), make_model(block=SelectionBlock)]
    losses = [eqx.filter_jit(indexer_loss)(model, make_batch()) for model in models]
    np.testing.assert_allclose(*losses, rtol=1e-6)


@pytest.mark.ci
def test_loss_refuses_what_it_cannot_measure():
    batch = make_batch()
    plain = zoo.models.Transformer(vocab=VOCAB, embed=8, layers=1, heads=2, mlp=8, key=jax.random.key(0))
    for loss_fn in (indexer_loss, with_indexer):
        with pytest.raises(ValueError, match="no indexer to train: Decoder has no layer of SparseLatentAttention"):
            eqx.filter_eval_shape(loss_fn, plain, batch)
    with pytest.raises(ValueError, match="Decoder has no layer of SparseLatentAttention"):
        attend_densely(plain)
    with pytest.raises(ValueError, match=r"reads values of the model, and so does zoo.capture around it \(layers"):
        eqx.filter_eval_shape(zoo.capture(indexer_loss, "layers.0"), make_model(1), batch)
    mesh = zoo.make_mesh(pipe=2, devices=jax.devices()[:2])
    model = make_model(2)
    with pytest.raises(NotImplementedError, match="values do not travel through the stages of a pipeline"):
        zoo.value_and_grad(indexer_loss, mesh)(zoo.place(model, mesh), batch)
