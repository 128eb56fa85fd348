"""Each layer is its formula, and the same on a mesh; what it cannot do it says."""

import dataclasses
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.layers import MLP, Attention, ClampedGatedMLP, Dropout, Embedding, LayerNorm, Linear, RMSNorm, TokenInfo
from zoo.models import Block, Decoder, Stack
from zoo.ops.rotary import LinearScaling as Interpolated
from zoo.ops.rotary import Rotary
from zoo.parallel import Dim, Layout

KEY = jax.random.key(0)


def test_linear_multiplies_and_its_transpose_turns_back():
    linear = Linear(3, 5, bias=True, key=KEY)
    linear = eqx.tree_at(lambda x: x.bias, linear, jnp.arange(5.0))
    x, y = jax.random.normal(KEY, (2, 4, 3)), jax.random.normal(KEY, (2, 4, 5))
    assert jnp.allclose(linear(x), x @ linear.weight.T + jnp.arange(5.0), atol=1e-6)
    assert jnp.allclose(linear.transposed(y), y @ linear.weight, atol=1e-6)
    assert linear.out_size == 5


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_initial_weights_keep_the_variance_that_they_promise(scale):
    weight = Linear(400, 300, scale=scale, key=KEY).weight * 400**0.5 / scale
    assert abs(float(weight.std()) - 1) < 0.01
    assert float(jnp.abs(weight).max()) < 2 / 0.8796
    assert abs(float(Embedding(400, 300, scale=0.5, key=KEY).weight.std()) - 0.5) < 0.005


def test_norms_start_as_the_plain_ones_and_keep_float32_scales():
    x = 3 + 2 * jax.random.normal(KEY, (2, 3, 8))
    for norm in (RMSNorm(8), RMSNorm(8, offset=1.0)):
        assert jnp.allclose((norm(x) ** 2).mean(-1), 1, atol=1e-4)
    assert jnp.allclose(LayerNorm(8)(x).mean(-1), 0, atol=1e-5) and jnp.allclose(LayerNorm(8)(x).std(-1), 1, atol=1e-4)
    assert LayerNorm(8, bias=False).bias is None
    assert zoo.cast(LayerNorm(8), jnp.bfloat16).weight.dtype == jnp.float32
    assert RMSNorm(8)(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_a_norm_over_a_split_dim_is_that_of_all_of_it(kind):
    mesh = zoo.make_mesh(data=4, tensor=2, layout=Layout().with_dims(embed=("tensor",)))
    linear, norm = Linear(3, 8, out=Dim("embed"), key=KEY), kind(8)
    norm = eqx.tree_at(lambda norm: norm.weight, norm, jnp.arange(1.0, 9.0))
    x = jax.random.normal(KEY, (4, 2, 3))
    split = zoo.spmd(lambda norm, linear, x: norm(linear(x)), mesh, out="batch seq embed")(norm, linear, x)
    assert jnp.allclose(split, norm(linear(x)), atol=1e-5)


def test_attention_norms_all_heads_together_and_then_clips():
    options = {"kv_heads": 2, "norm_over_heads": partial(RMSNorm, epsilon=1e-3), "clip": 0.7}
    attention = Attention(16, 4, **options, key=KEY)
    scales = jnp.linspace(0.5, 2, 16), jnp.linspace(2, 0.5, 8)
    attention = eqx.tree_at(lambda a: (a.query_norm.weight, a.key_norm.weight), attention, scales)
    x = 2 * jax.random.normal(KEY, (2, 5, 16))

    def normed(x, scale):
        return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-3) * scale

    query, key, value = (x @ linear.weight.T for linear in (attention.query, attention.key, attention.value))
    query, key = normed(query, scales[0]), normed(key, scales[1])
    query, key, value = (jnp.clip(y, -0.7, 0.7).reshape(2, 5, -1, 4) for y in (query, key, value))
    key, value = jnp.repeat(key, 2, axis=2), jnp.repeat(value, 2, axis=2)
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / 2
    scores = jnp.where(jnp.tril(jnp.ones((5, 5), bool)), scores, -jnp.inf)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value).reshape(2, 5, 16)
    assert (jnp.abs(x @ attention.value.weight.T) > 0.7).any()
    assert jnp.allclose(attention(x, TokenInfo())[0], mixed @ attention.out.weight.T, atol=1e-5)
    for wrong, told in (({"clip": 0}, "more than 0"), ({"qk_norm": partial(RMSNorm, 4)}, "have one norm")):
        with pytest.raises(ValueError, match=told):
            Attention(16, 4, **options | wrong, key=KEY)


def whole_normed(key):
    """A decoder whose queries and keys have one norm over all heads each; residuals and logits are multiplied."""

    def kind(key):
        mixer_key, ffn_key = jax.random.split(key)
        norms = {"norm_over_heads": RMSNorm, "clip": 1.3, "rotary": Rotary(8)}  # no value lies within rounding of the clip
        mixer = Attention(32, 4, kv_heads=2, **norms, key=mixer_key)
        return Block(RMSNorm(32), mixer, RMSNorm(32), MLP(32, 64, key=ffn_key), Dropout(0.0), residual_multiplier=0.5)

    embedding_key, stack_key, scale_key = jax.random.split(key, 3)
    stack = Stack([kind] * 2, key=stack_key)
    model = Decoder(Embedding(48, 32, key=embedding_key), stack, RMSNorm(32), None, Dropout(0.0), logits_multiplier=3.0)
    mixer = lambda model: model.stack.segments[0].blocks[0].mixer
    scales = lambda model: (mixer(model).query_norm.weight, mixer(model).key_norm.weight)
    return eqx.tree_at(scales, model, [x + jax.random.uniform(scale_key, x.shape) for x in scales(model)])


def test_norms_over_split_heads_on_a_mesh_equal_one_device():
    """Values and gradients; at tensor 4 the two kv_heads lie whole, and their norm with them."""
    tokens = jax.random.randint(KEY, (8, 7), 0, 48)
    batch, results = {"tokens": tokens, "targets": jnp.roll(tokens, -1, axis=1)}, []
    for sizes, devices in (({}, 1), ({"data": 2, "fsdp": 2, "tensor": 2}, 8), ({"data": 2, "tensor": 4}, 8)):
        mesh = zoo.make_mesh(**sizes, devices=jax.devices()[:devices])
        loss_and_grads = zoo.value_and_grad(zoo.cross_entropy, mesh)(zoo.init(whole_normed, KEY, mesh), batch)
        results.append(jax.device_get(loss_and_grads))
        scale = loss_and_grads[1].stack.segments[0].blocks[0].mixer.query_norm.weight
        assert scale.addressable_shards[0].data.shape == (2, 32 // sizes.get("tensor", 1))
    alone, *others = results
    for other in others:
        for a, b in zip(*map(jax.tree.leaves, (alone, other)), strict=True):
            assert np.abs(a - b).max() <= 2e-5 * np.abs(a).max()


def test_multipliers_of_residuals_and_logits():
    model = whole_normed(KEY)
    tokens, block = jnp.arange(6)[None], next(model.stack.one_by_one())
    stream = model.embed(tokens, TokenInfo())
    plain = dataclasses.replace(block, residual_multiplier=1.0)
    mixed, _ = block.mixer(block.mixer_norm(stream.x), TokenInfo())
    half = stream.x + 0.5 * mixed
    assert jnp.allclose(block(stream, TokenInfo())[0].x, half + 0.5 * block.ffn(block.ffn_norm(half))[0], atol=1e-6)
    assert not jnp.allclose(block(stream, TokenInfo())[0].x, plain(stream, TokenInfo())[0].x, atol=1e-2)
    once = dataclasses.replace(model, logits_multiplier=1.0)
    assert jnp.allclose(model(tokens), 3 * once(tokens), atol=1e-5)


def test_an_id_outside_a_split_vocabulary_gives_nan_too():
    mesh = zoo.make_mesh(data=4, tensor=2)
    tokens = jnp.array([[0, 7], [8, -1], [3, 4], [5, 6]])
    table = zoo.place(Embedding(8, 4, key=KEY), mesh)
    x = zoo.spmd(lambda table, tokens: table(tokens), mesh, out="batch seq embed")(table, tokens)
    assert (jnp.isnan(x).all(-1) == jnp.array([[0, 0], [1, 1], [0, 0], [0, 0]], bool)).all()


def test_dropout_is_the_identity_without_keys_and_differs_by_site():
    drop, x = Dropout(0.5), jnp.ones((2, 8, 16))
    info = TokenInfo(keys=jax.random.split(KEY, 2))
    assert drop(x, TokenInfo(), site=0) is x
    assert set(np.unique(drop(x, info, site=0))) == {0.0, 2.0}
    assert not jnp.array_equal(drop(x, info, site=0), drop(x, info, site=1))
    assert not jnp.array_equal(drop(x, info, site=0), drop(x, info.fold_keys(3), site=0))
    alone = drop(x[1:], TokenInfo(keys=info.keys[1:]), site=0)
    assert jnp.array_equal(drop(x, info, site=0)[1:], alone), "a matter of the row"


def test_attention_turns_part_of_each_head_and_forgets_what_leaves_its_window():
    options = {"window": 3, "soft_cap": 5.0, "scale": 0.2, "bias": True, "sinks": True}
    attention = Attention(16, 4, kv_heads=2, head_dim=8, rotary=Rotary(4, interleaved=True), **options, key=KEY)
    attention = eqx.tree_at(lambda attention: attention.sinks, attention, jnp.array([-1.0, 0.0, 0.5, 2.0]))
    x = jax.random.normal(KEY, (1, 8, 16))
    whole, none = attention(x, TokenInfo())
    assert none is None
    assert jnp.allclose(attention(x[:, 4:], TokenInfo())[0][:, 2:], whole[:, 6:], atol=1e-5), (
        "only differences of positions"
    )
    positions, state, parts = jnp.arange(8)[None], attention.init_state(1, 8), []
    for start, stop in ((0, 2), (2, 3), (3, 7), (7, 8)):
        part, state = attention(x[:, start:stop], TokenInfo(positions[:, start:stop]), state)
        parts.append(part)
    assert state.positions.shape == (1, 3)
    assert jnp.allclose(jnp.concatenate(parts, 1), whole, atol=1e-5), "in unequal pieces, through a ring of three"


def test_a_sink_takes_its_share_of_the_softmax_and_keeps_float32():
    """Queries of zero find every key alike, values are all one: what a head gives is what its sink leaves of it."""
    attention = Attention(8, 2, sinks=True, key=KEY)
    assert (attention.sinks == 0).all()
    parts = lambda a: (a.query.weight, a.value.weight, a.out.weight, a.sinks)
    sinks = jnp.log(jnp.array([1.0, 3.0]))
    attention = eqx.tree_at(parts, attention, (jnp.zeros((8, 8)), jnp.eye(8), jnp.eye(8), sinks))
    given, _ = attention(jnp.ones((1, 3, 8)), TokenInfo())
    seen = jnp.arange(1.0, 4)
    assert jnp.allclose(given[0, :, :4], (seen / (seen + 1))[:, None])
    assert jnp.allclose(given[0, :, 4:], (seen / (seen + 3))[:, None])
    assert zoo.cast(attention, jnp.bfloat16).sinks.dtype == jnp.float32


def test_the_clamped_gated_mlp_is_its_formula():
    layer, x = ClampedGatedMLP(8, 6, alpha=1.5, limit=0.5, key=KEY), jax.random.normal(KEY, (2, 3, 8))
    layer = eqx.tree_at(lambda layer: layer.gate.bias, layer, jnp.linspace(-0.5, 0.5, 6))
    gate, up = jnp.minimum(layer.gate(x), 0.5), jnp.clip(layer.up(x), -0.5, 0.5)
    assert jnp.allclose(layer(x)[0], layer.down((up + 1) * gate * jax.nn.sigmoid(1.5 * gate)), atol=1e-6)
    with pytest.raises(ValueError, match="a limit above 0, not to 0"):
        ClampedGatedMLP(8, 6, limit=0, key=KEY)


def older(key):
    """A decoder of the other layers: LayerNorm, biases, a plain MLP, scaled positions, sinks; an untied head with a
    bias."""

    def kind(key):
        mixer_key, ffn_key = jax.random.split(key)
        rotary = Rotary(8, scaling=Interpolated(2.0))
        mixer = Attention(32, 4, rotary=rotary, bias=True, out_bias=True, soft_cap=10.0, sinks=True, key=mixer_key)
        mixer = eqx.tree_at(lambda mixer: mixer.sinks, mixer, jax.random.normal(key, 4))
        return Block(LayerNorm(32), mixer, LayerNorm(32), MLP(32, 64, key=ffn_key), Dropout(0.0))

    embedding_key, stack_key, head_key = jax.random.split(key, 3)
    head = Linear(32, 48, in_=Dim("embed"), out=Dim("vocab"), bias=True, key=head_key)
    stack = Stack([kind] * 2, key=stack_key)
    return Decoder(Embedding(48, 32, key=embedding_key), stack, LayerNorm(32), head, Dropout(0.0), soft_cap=20.0)


def test_biases_and_plain_layers_on_a_mesh_equal_one_device():
    tokens = jax.random.randint(KEY, (8, 7), 0, 48)
    batch = {"tokens": tokens, "targets": tokens}
    results = []
    for sizes, devices in (({}, 1), ({"data": 2, "fsdp": 2, "tensor": 2}, 8)):
        mesh = zoo.make_mesh(**sizes, devices=jax.devices()[:devices])
        model = zoo.init(older, KEY, mesh)
        logits = zoo.spmd(lambda model, tokens: model(tokens), mesh, out="batch seq vocab")(model, tokens)
        loss_and_grads = zoo.value_and_grad(lambda m, b: zoo.cross_entropy(m, b), mesh)(model, batch)
        bare = eqx.filter_jit(lambda model, tokens: model(tokens))(model, tokens)
        assert np.allclose(bare, logits, atol=1e-5), "without spmd XLA divides the work"
        results.append(jax.device_get((logits, loss_and_grads)))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        assert np.abs(a - b).max() <= 2e-5 * np.abs(a).max()
