"""Layers that share a selection of keys: scans and meshes equal the plain loop, caches equal none, and refusals."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.layers.random_layers import randomize
from zoo.layers import GatedMLP, LatentAttention, LightningIndexer, RMSNorm, SparseLatentAttention, TokenInfo
from zoo.models.hf.families.glm_moe_dsa_layers import SelectionBlock
from zoo.ops.rotary import Rotary

VOCAB, EMBED, SEQ = 32, 16, 8
ATTENTION = partial(LatentAttention, EMBED, 2, latent=8, head_dim=4, query_latent=6, rotary=Rotary(2))
INDEXER = partial(LightningIndexer, EMBED, 4, query_latent=6, head_dim=4, top=3)
FULL, SHARED = (partial(SparseLatentAttention, ATTENTION, indexer) for indexer in (INDEXER, None))
KINDS = {"F": FULL, "S": SHARED}


def make_model(types, loop="plain"):
    mlp, norm = partial(GatedMLP, EMBED, 12), partial(RMSNorm, EMBED)
    layers = [(KINDS[kind], mlp) for kind in types]
    options = {"layers": layers, "norm": norm, "tied": True, "block": SelectionBlock, "loop": loop}
    return randomize(partial(zoo.models.build_decoder, vocab=VOCAB, embed=EMBED, **options))


def make_batch(rows):
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (rows, SEQ)))
    return {"tokens": tokens, "targets": jnp.roll(tokens, -1, 1), "weights": jnp.ones(tokens.shape)}


@pytest.mark.slow
def test_shared_selections_scan_on_a_mesh_as_in_a_plain_loop():
    """The second scan begins with layers that take what the first has selected."""
    model, batch = make_model("FFSSS"), make_batch(4)
    run = lambda model, mesh: jax.device_get(zoo.value_and_grad(zoo.cross_entropy, mesh)(zoo.place(model, mesh), batch))
    expected_loss, expected = run(model, zoo.make_mesh(devices=jax.devices()[:1]))
    loss, gradients = run(zoo.configure(model, loop="scan"), zoo.make_mesh(data=2, fsdp=2, tensor=2))
    assert abs(loss - expected_loss) < 1e-6 * expected_loss
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        assert np.abs(a - b).max() <= 3e-5 * np.abs(b).max()


def test_shared_layers_attend_to_what_is_handed_on():
    """A layer without an indexer depends on the indexer of the layer before, in one scan over the pattern of both."""
    tokens, model = make_batch(2)["tokens"], make_model("FSFS", loop="scan")
    run = eqx.filter_jit(lambda model, tokens: model.hidden(tokens, TokenInfo())[0].x)
    (first, second) = model.stack.segments[0].blocks
    assert first.mixer.indexer is not None and second.mixer.indexer is None
    silent = lambda block: block.mixer.attention.out.weight  # so that its indexer acts through the second layer alone
    model = eqx.tree_at(lambda model: silent(model.stack.segments[0].blocks[0]), model, replace_fn=jnp.zeros_like)
    key = lambda model: model.stack.segments[0].blocks[0].mixer.indexer.key.weight
    assert np.abs(run(eqx.tree_at(key, model, replace_fn=jnp.negative), tokens) - run(model, tokens)).max() > 1e-2


@pytest.mark.slow
def test_shared_selections_decode_from_caches():
    tokens, model = make_batch(2)["tokens"], make_model("FSFS", loop="scan")
    logits = eqx.filter_jit(lambda model, tokens: model(tokens))
    for _ in range(4):
        tokens = jnp.concatenate([tokens, logits(model, tokens)[:, -1:].argmax(-1)], 1)
    assert (zoo.generate(model, tokens[:, :SEQ], max_new_tokens=4, length=SEQ + 4) == tokens[:, SEQ:]).all()


@pytest.mark.one_case
@pytest.mark.parametrize("types, axes", [("SF", {}), ("FFSS", {"pipe": 2})])
def test_shared_layers_refuse_to_run_without_a_selection(types, axes):
    mesh = zoo.make_mesh(**axes, devices=jax.devices()[: axes.get("pipe", 1)])
    with pytest.raises(ValueError, match="no layer before it has selected keys: run the layers in their model"):
        zoo.value_and_grad(zoo.cross_entropy, mesh)(zoo.place(make_model(types, "scan"), mesh), make_batch(2))
