"""Parallel residual streams and sparse gates equal their formulas; gradients are finite where an embedding is 0."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.layers.random_layers import activations, randomize, relative_error
from zoo.layers import GatedMLP, RMSNorm, TokenInfo
from zoo.models.decoder import Hidden
from zoo.models.hf.builders import set_by_layer
from zoo.models.hf.config import read_config
from zoo.models.hf.families import FAMILIES
from zoo.models.hf.families.gemma3n_text_layers import AltUp, AltUpBlock, AltUpInputs, AltUpNorm, GaussianTopK, Laurel
from zoo.ops.activations import gaussian_top_k, gelu_tanh

EMBED, STREAMS, LAYERS, WIDTH, VOCAB = 6, 3, 2, 4, 5


def make_norm():
    return RMSNorm(EMBED)


def root_mean_square(x):
    return jnp.sqrt((x**2).mean(-1, keepdims=True))


def compute_formula(altup, streams, y):
    """Return predictions, and their correction by y, stream by stream. The first stream is the active one."""
    route = lambda x: jnp.tanh(altup.router_norm(x) / EMBED @ altup.router.weight.T)
    weights = (route(streams[..., 0, :]) @ altup.prediction.weight.T).reshape(*y.shape[:2], STREAMS, STREAMS)
    predicted = []
    for i in range(STREAMS):
        mixed = sum(weights[..., i, j, None] * streams[..., j, :] for j in range(STREAMS))
        predicted.append(streams[..., i, :] + mixed)
    gains = 1 + route(y) @ altup.correction.weight.T
    corrected = [p + gains[..., i, None] * (y - predicted[0]) for i, p in enumerate(predicted)]
    return jnp.stack(predicted, 2), jnp.stack(corrected, 2)


def test_predictions_and_corrections_equal_formula():
    altup = randomize(lambda key: AltUp(EMBED, STREAMS, make_norm, key=key))
    streams, y = activations(2, 3, STREAMS, EMBED), activations(2, 3, EMBED, seed=2)
    predicted = altup.predict(streams)
    for ours, wanted in zip((predicted, altup.correct(predicted, y)), compute_formula(altup, streams, y), strict=True):
        assert relative_error(ours, wanted) < 1e-5
    with pytest.raises(ValueError, match="active=3 is none of them"):
        AltUp(EMBED, STREAMS, make_norm, active=3, key=jax.random.key(0))


def test_streams_have_the_magnitude_of_the_embedding():
    inputs = randomize(lambda key: AltUpInputs(VOCAB, EMBED, LAYERS, WIDTH, streams=STREAMS, epsilon=1e-6, key=key))
    norm = randomize(lambda key: AltUpNorm(EMBED, STREAMS, make_norm, key=key))
    tokens = jnp.asarray([[0, VOCAB, 3]])  # the second is not in the table of inputs
    x = activations(1, 3, EMBED).at[:, 2].set(0)

    @eqx.filter_jit
    def run(x):
        hidden = inputs(tokens, x)
        return hidden, norm(hidden.x), jax.grad(lambda x: (norm(inputs(tokens, x).x) ** 2).sum())(x)

    hidden, y, gradient = run(x)
    streams = hidden.x.reshape(1, 3, STREAMS, EMBED)
    np.testing.assert_array_equal(streams[:, :, 0], x)
    magnitudes = root_mean_square(streams)[..., 0]
    np.testing.assert_allclose(magnitudes, magnitudes[..., :1].repeat(STREAMS, -1), rtol=1e-5)
    for i, project in enumerate(inputs.projections):
        projected = x[:, :2] @ project.weight.T
        expected = projected / root_mean_square(projected) * magnitudes[:, :2, :1]
        assert relative_error(streams[:, :2, 1 + i], expected) < 1e-5
    # One is compiled and the other is not: they round differently since jax 0.12.
    assert relative_error(inputs.inputs(tokens * (tokens < VOCAB), x).inputs, hidden.inputs) < 1e-6
    others = [streams[:, :2, 1 + i] @ project.weight.T for i, project in enumerate(norm.projections)]
    others = [other / root_mean_square(other) * magnitudes[:, :2, :1] for other in others]
    assert relative_error(y[:, :2], norm.norm(sum([x[:, :2], *others]) / STREAMS)) < 1e-5
    assert np.isfinite(gradient).all()


def test_laurel_equals_formula():
    laurel, x = randomize(lambda key: Laurel(EMBED, 2, make_norm, key=key)), activations(1, 2, EMBED)
    assert relative_error(laurel(x), x + laurel.norm(x @ laurel.left.weight.T @ laurel.right.weight.T)) < 1e-5


def test_a_corrected_stream_is_scaled_only_if_the_config_says_so():
    """Without the scale, its values in the file change nothing, as in transformers."""
    family = FAMILIES["gemma3n_text"]
    given = {"vocab_size": 8, "vocab_size_per_layer_input": 8, "hidden_size": EMBED, "intermediate_size": 8}
    given |= {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 4}
    given |= {"hidden_size_per_layer_input": WIDTH, "num_kv_shared_layers": 0, "altup_num_inputs": 2, "laurel_rank": 2}
    scaled, plain = (
        family.build(read_config(family, given | {"altup_correct_scale": scales}), key=jax.random.key(0))
        for scales in (True, False)
    )
    stretch = lambda model: set_by_layer(model, "altup.output_scale", lambda layer: jnp.full(EMBED, 1.5))
    run = eqx.filter_jit(lambda *models: [model(jnp.arange(5)[None]) for model in models])
    expected, stretched, unscaled = run(scaled, stretch(scaled), stretch(plain))
    np.testing.assert_allclose(unscaled, expected, rtol=1e-5, atol=1e-5)
    assert jnp.abs(stretched - expected).max() > 1e-3


def test_block_refuses_hidden_states_of_other_decoders():
    block = object.__new__(AltUpBlock)
    with pytest.raises(TypeError, match="AltUpBlock reads layer inputs and shared keys, which Hidden has not"):
        block(Hidden(activations(1, 2, STREAMS * EMBED)), TokenInfo())


def test_sparse_gate_on_a_mesh_equals_formula():
    """The cutoff is that of all features, not of those on a device."""
    mlp, x = randomize(partial(GatedMLP, 8, 16, activation=GaussianTopK(0.7, gelu_tanh))), activations(2, 3, 8)
    gate, up = x @ mlp.gate.weight.T, x @ mlp.up.weight.T
    expected = (gelu_tanh(gaussian_top_k(gate, 0.7)) * up) @ mlp.down.weight.T
    mesh = zoo.make_mesh(data=2, tensor=4)
    sharded = zoo.spmd(lambda mlp, x: mlp(x)[0], mesh, out="batch seq embed")(zoo.place(mlp, mesh), x)
    assert relative_error(sharded, expected) < 1e-5


@pytest.mark.parametrize("sparsity", [0.0, 1.0])
def test_sparsity_without_a_quantile_raises(sparsity):
    with pytest.raises(ValueError, match="a sparsity is between 0 and 1"):
        GaussianTopK(sparsity, jax.nn.silu)
