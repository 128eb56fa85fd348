"""What the checks run: decoders of several residual streams, and the losses by which indexers learn."""

import dataclasses
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.layers import IndexedAttention, MeanKeyIndexer, TokenInfo
from zoo.parallel.taps import Taps, active_taps
from zoo.tools.testing.properties import compute_loss, read_packed
from zoo.tools.testing.subject import DecoderSubject, find_embed_size, list_divergences, make_subject
from zoo.tools.testing.texts import Texts

FIXTURES = Path(__file__).parents[2] / "fixtures" / "models"
INDEXER = partial(MeanKeyIndexer, 16, 2, head_dim=4, block=2, top=1)


def test_every_residual_stream_gets_the_input():
    sizes = {"vocab": 11, "embed": 8, "layers": 1, "heads": 2, "mlp": 8, "streams": 2}
    subject = DecoderSubject(zoo.models.Transformer(**sizes, key=jax.random.key(0)))
    x = np.random.default_rng(0).normal(size=(1, 3, 8))
    model = subject.module
    hidden = model.embed(jnp.ones((1, 3), int), TokenInfo())
    streams = [stream + x for stream in jnp.split(hidden.x, 2, axis=-1)]
    hidden, _ = model.stack(dataclasses.replace(hidden, x=jnp.concatenate(streams, axis=-1)), TokenInfo())
    np.testing.assert_allclose(subject(jnp.asarray(x), TokenInfo())[0], model.logits(model.norm(hidden.x)), rtol=1e-5)


@pytest.mark.parametrize("folder, indexers", [("deepseek_v32", 2), ("glm_moe_dsa", 2), ("deepseek_v4", 1)])
def test_the_divergence_of_every_indexer_is_read(folder, indexers):
    """Of mixers, and of blocks that hand a selection to the next layers."""
    subject = make_subject(zoo.load(FIXTURES / folder, dtype=jnp.float32))

    def read(x):
        taps = Taps(list_divergences(subject))
        with active_taps(taps):
            subject(x, TokenInfo())
        return [value for value, _ in taps.collect().values()]

    (divergence,) = eqx.filter_eval_shape(read, jnp.zeros((2, 6, find_embed_size(subject))))
    assert divergence.shape == (indexers, 2, 6)


def test_divergences_teach_indexers_and_change_no_sum():
    subject = make_subject(IndexedAttention(16, 2, indexer=INDEXER, key=jax.random.key(0)))
    texts = Texts(4, 16)
    batch = texts.packed | {"weights": texts.draw_weights(16)}
    y, _, gradients = read_packed(subject, batch)
    expected = np.where(batch["weights"] == 0, 0, y * batch["weights"]).sum()
    np.testing.assert_allclose(eqx.filter_jit(compute_loss)(subject, batch["x"], batch)[0], expected, rtol=1e-4)
    assert all(np.any(x) for x in jax.tree.leaves(gradients.module.indexer))
