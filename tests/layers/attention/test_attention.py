"""Attention: QK norm, clip, RoPE, sliding window, sinks, KV cache, and a mesh."""

import dataclasses
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.layers import MLP, Attention, Dropout, Embedding, LayerNorm, Linear, RMSNorm, TokenInfo
from zoo.models import Block, Decoder, Stack
from zoo.ops.rotary import LinearScaling, Rotary
from zoo.parallel import Dim, vary

KEY = jax.random.key(0)


@pytest.mark.ci
def test_attention_norm_over_heads_and_clip_equal_formula():
    options = {"kv_heads": 2, "norm_over_heads": partial(RMSNorm, epsilon=1e-3), "clip": 0.7}
    attention = Attention(16, 4, **options, key=KEY)
    scales = jnp.linspace(0.5, 2, 16), jnp.linspace(2, 0.5, 8)
    attention = eqx.tree_at(lambda a: (a.query_norm.weight, a.key_norm.weight), attention, scales)
    x = 2 * jax.random.normal(KEY, (2, 5, 16))

    def rms_norm(x, scale):
        return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-3) * scale

    query, key, value = (x @ linear.weight.T for linear in (attention.query, attention.key, attention.value))
    query, key = rms_norm(query, scales[0]), rms_norm(key, scales[1])
    query, key, value = (jnp.clip(y, -0.7, 0.7).reshape(2, 5, -1, 4) for y in (query, key, value))
    key, value = jnp.repeat(key, 2, axis=2), jnp.repeat(value, 2, axis=2)
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / 2
    scores = jnp.where(jnp.tril(jnp.ones((5, 5), bool)), scores, -jnp.inf)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value).reshape(2, 5, 16)
    assert (jnp.abs(x @ attention.value.weight.T) > 0.7).any()
    assert jnp.allclose(attention(x, TokenInfo())[0], mixed @ attention.out.weight.T, atol=1e-5)
    for invalid, message in (({"clip": 0}, "more than 0"), ({"qk_norm": partial(RMSNorm, 4)}, "have one norm")):
        with pytest.raises(ValueError, match=message):
            Attention(16, 4, **options | invalid, key=KEY)


@pytest.mark.slow
def test_attention_window_and_partial_rotary_through_a_cache():
    options = {"window": 3, "soft_cap": 5.0, "scale": 0.2, "bias": True, "sinks": True}
    attention = Attention(16, 4, kv_heads=2, head_dim=8, rotary=Rotary(4, interleaved=True), **options, key=KEY)
    attention = eqx.tree_at(lambda attention: attention.sinks, attention, jnp.array([-1.0, 0.0, 0.5, 2.0]))
    x = jax.random.normal(KEY, (1, 8, 16))
    expected, state = attention(x, TokenInfo())
    assert state is None
    assert jnp.allclose(attention(x[:, 4:], TokenInfo())[0][:, 2:], expected[:, 6:], atol=1e-5), (
        "RoPE depends on relative positions only"
    )
    positions, state, outputs = jnp.arange(8)[None], attention.init_state(1, 8), []
    for start, stop in ((0, 2), (2, 3), (3, 7), (7, 8)):
        output, state = attention(x[:, start:stop], TokenInfo(positions[:, start:stop]), state)
        outputs.append(output)
    assert state.positions.shape == (1, 3)
    assert jnp.allclose(jnp.concatenate(outputs, 1), expected, atol=1e-5), "unequal chunks, a ring buffer of 3 slots"


@pytest.mark.ci
def test_attention_sink_joins_the_softmax_and_keeps_float32():
    """With zero queries and values of 1, the output of a head is 1 minus the probability of its sink."""
    attention = Attention(8, 2, sinks=True, key=KEY)
    assert (attention.sinks == 0).all()
    parameters = lambda a: (a.query.weight, a.value.weight, a.out.weight, a.sinks)
    sinks = jnp.log(jnp.array([1.0, 3.0]))
    attention = eqx.tree_at(parameters, attention, (jnp.zeros((8, 8)), jnp.eye(8), jnp.eye(8), sinks))
    y, _ = attention(jnp.ones((1, 3, 8)), TokenInfo())
    num_keys = jnp.arange(1.0, 4)
    assert jnp.allclose(y[0, :, :4], (num_keys / (num_keys + 1))[:, None])
    assert jnp.allclose(y[0, :, 4:], (num_keys / (num_keys + 3))[:, None])
    assert zoo.cast(attention, jnp.bfloat16).sinks.dtype == jnp.float32


@pytest.mark.ci
def test_block_causal_attention_of_documents_equals_separate():
    """A block begins at position 0 of its document, and its own tokens attend to all of it, in all implementations."""
    make = lambda name: Attention(16, 4, kv_heads=2, rotary=Rotary(4), window=4, block=3, implementation=name, key=KEY)
    x = jax.random.normal(KEY, (1, 12, 16))
    ids, positions = jnp.array([[1] * 5 + [2] * 7]), jnp.array([[*range(5), *range(7)]])
    ours = [eqx.filter_jit(make(name))(x, TokenInfo(positions, ids))[0] for name in ("grouped", "blockwise")]
    call = eqx.filter_jit(lambda layer, x: layer(x, TokenInfo())[0])
    separate = jnp.concatenate([call(make("reference"), part) for part in (x[:, :5], x[:, 5:])], axis=1)
    assert all(jnp.allclose(y, separate, atol=1e-5) for y in ours)
    gradient = eqx.filter_jit(jax.grad(lambda x: call(make("grouped"), x)[0, 3].sum()))(x)
    attended = (jnp.abs(gradient[0]) > 0).any(1)
    np.testing.assert_array_equal(jnp.flatnonzero(attended), [2, 3, 4, 5])


def test_block_causal_attention_refuses_a_cache():
    attention = Attention(16, 4, block=3, key=KEY)
    state = eqx.filter_eval_shape(attention.init_state, 1, 8)
    token = jnp.zeros((1, 1, 16)), TokenInfo(jnp.zeros((1, 1), int))
    with pytest.raises(NotImplementedError, match="with block=3 a token attends to the later ones of its block"):
        eqx.filter_eval_shape(attention, *token, state)
    causal = Attention(16, 4, block=1, key=KEY)
    assert eqx.filter_eval_shape(causal, *token, state)[0].shape == (1, 1, 16)
    with pytest.raises(ValueError, match="a window of 2 is shorter than a block of 3"):
        Attention(16, 4, window=2, block=3, key=KEY)


def make_decoder_with_norm_over_heads(key):
    """Return a decoder with QK norm over all heads, and with multipliers of residuals and logits."""

    def make_block(key):
        mixer_key, ffn_key = jax.random.split(key)
        # With this clip no value is within rounding of it.
        options = {"norm_over_heads": RMSNorm, "clip": 1.3, "rotary": Rotary(8)}
        mixer = Attention(32, 4, kv_heads=2, **options, key=mixer_key)
        return Block(RMSNorm(32), mixer, RMSNorm(32), MLP(32, 64, key=ffn_key), Dropout(0.0), residual_multiplier=0.5)

    embedding_key, stack_key, scale_key = jax.random.split(key, 3)
    stack = Stack([make_block] * 2, key=stack_key)
    model = Decoder(Embedding(48, 32, key=embedding_key), stack, RMSNorm(32), None, Dropout(0.0), logits_multiplier=3.0)
    mixer = lambda model: model.stack.segments[0].blocks[0].mixer
    scales = lambda model: (mixer(model).query_norm.weight, mixer(model).key_norm.weight)
    return eqx.tree_at(scales, model, [x + jax.random.uniform(scale_key, x.shape) for x in scales(model)])


@pytest.mark.slow
def test_attention_norm_over_sharded_heads_equals_one_device():
    """Values and gradients; with tensor=4 the two KV heads and their norm are replicated."""
    tokens = jax.random.randint(KEY, (8, 7), 0, 48)
    batch, results = {"tokens": tokens, "targets": jnp.roll(tokens, -1, axis=1)}, []
    for sizes, devices in (({}, 1), ({"data": 2, "fsdp": 2, "tensor": 2}, 8), ({"data": 2, "tensor": 4}, 8)):
        mesh = zoo.make_mesh(**sizes, devices=jax.devices()[:devices])
        loss_and_grads = zoo.value_and_grad(zoo.cross_entropy, mesh)(
            zoo.init(make_decoder_with_norm_over_heads, KEY, mesh), batch
        )
        results.append(jax.device_get(loss_and_grads))
        scale = loss_and_grads[1].stack.segments[0].blocks[0].mixer.query_norm.weight
        assert scale.addressable_shards[0].data.shape == (2, 32 // sizes.get("tensor", 1))
    expected, *sharded = results
    for result in sharded:
        for a, b in zip(*map(jax.tree.leaves, (expected, result)), strict=True):
            assert np.abs(a - b).max() <= 2e-5 * np.abs(a).max()


def test_attention_selects_kv_heads_by_their_number():
    """Input that varies over `tensor`, as tokens gathered over it do, says nothing of the replicated KV heads."""
    attention = Attention(32, 8, kv_heads=2, key=KEY)
    x, mesh = jax.random.normal(KEY, (2, 5, 32)), zoo.make_mesh(data=1, tensor=8)
    run = lambda attention, x: attention(vary(x, ("tensor",)), TokenInfo())[0]
    y = zoo.spmd(run, mesh, out="batch seq embed")(zoo.place(attention, mesh), x)
    expected = eqx.filter_jit(lambda attention, x: attention(x, TokenInfo())[0])(attention, x)
    assert np.allclose(y, expected, atol=1e-5)


@pytest.mark.slow
def test_decoder_multipliers_of_residuals_and_logits():
    model = make_decoder_with_norm_over_heads(KEY)
    tokens, block = jnp.arange(6)[None], next(model.stack.iter_blocks())
    hidden = model.embed(tokens, TokenInfo())
    mixed, _ = block.mixer(block.mixer_norm(hidden.x), TokenInfo())
    x = hidden.x + 0.5 * mixed
    y = block(hidden, TokenInfo())[0].x
    assert jnp.allclose(y, x + 0.5 * block.ffn(block.ffn_norm(x))[0], atol=1e-6)
    unscaled_block = dataclasses.replace(block, residual_multiplier=1.0)
    assert not jnp.allclose(y, unscaled_block(hidden, TokenInfo())[0].x, atol=1e-2)
    unscaled_logits = dataclasses.replace(model, logits_multiplier=1.0)(tokens)
    assert jnp.allclose(model(tokens), 3 * unscaled_logits, atol=1e-5)


def make_decoder_with_biases(key):
    """Return a decoder with LayerNorm, biases, an MLP, scaled RoPE, sinks and an untied head with a bias."""

    def make_block(key):
        mixer_key, ffn_key = jax.random.split(key)
        rotary = Rotary(8, scaling=LinearScaling(2.0))
        mixer = Attention(32, 4, rotary=rotary, bias=True, out_bias=True, soft_cap=10.0, sinks=True, key=mixer_key)
        mixer = eqx.tree_at(lambda mixer: mixer.sinks, mixer, jax.random.normal(key, 4))
        return Block(LayerNorm(32), mixer, LayerNorm(32), MLP(32, 64, key=ffn_key), Dropout(0.0))

    embedding_key, stack_key, head_key = jax.random.split(key, 3)
    head = Linear(32, 48, in_=Dim("embed"), out=Dim("vocab"), bias=True, key=head_key)
    stack = Stack([make_block] * 2, key=stack_key)
    return Decoder(Embedding(48, 32, key=embedding_key), stack, LayerNorm(32), head, Dropout(0.0), soft_cap=20.0)


@pytest.mark.slow
def test_decoder_with_biases_and_sinks_on_a_mesh():
    tokens = jax.random.randint(KEY, (8, 7), 0, 48)
    batch = {"tokens": tokens, "targets": tokens}
    results = []
    for sizes, devices in (({}, 1), ({"data": 2, "fsdp": 2, "tensor": 2}, 8)):
        mesh = zoo.make_mesh(**sizes, devices=jax.devices()[:devices])
        model = zoo.init(make_decoder_with_biases, KEY, mesh)
        logits = zoo.spmd(lambda model, tokens: model(tokens), mesh, out="batch seq vocab")(model, tokens)
        loss_and_grads = zoo.value_and_grad(lambda m, b: zoo.cross_entropy(m, b), mesh)(model, batch)
        automatic = eqx.filter_jit(lambda model, tokens: model(tokens))(model, tokens)
        assert np.allclose(automatic, logits, atol=1e-5), "partitioned by XLA, without spmd"
        results.append(jax.device_get((logits, loss_and_grads)))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        assert np.abs(a - b).max() <= 2e-5 * np.abs(a).max()
