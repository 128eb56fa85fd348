"""Each layer is its formula, and the same on a mesh; what it cannot do it says."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.layers import MLP, Attention, Dropout, Embedding, Info, LayerNorm, Linear, RMSNorm
from zoo.models import Block, Decoder, Stack
from zoo.ops.rotary import Linear as Interpolated
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


def test_a_norm_over_a_split_dim_raises_by_name():
    mesh = zoo.make_mesh(data=4, tensor=2, layout=Layout().with_dims(embed=("tensor",)))
    with pytest.raises(NotImplementedError, match=r"a norm over 'embed'.*splits over tensor"):
        zoo.spmd(lambda norm, x: norm(x), mesh, out="batch seq embed")(RMSNorm(8), jnp.ones((4, 2, 4)))


def test_an_id_outside_a_split_vocabulary_gives_nan_too():
    mesh = zoo.make_mesh(data=4, tensor=2)
    tokens = jnp.array([[0, 7], [8, -1], [3, 4], [5, 6]])
    table = zoo.place(Embedding(8, 4, key=KEY), mesh)
    x = zoo.spmd(lambda table, tokens: table(tokens), mesh, out="batch seq embed")(table, tokens)
    assert (jnp.isnan(x).all(-1) == jnp.array([[0, 0], [1, 1], [0, 0], [0, 0]], bool)).all()


def test_dropout_is_the_identity_without_keys_and_differs_by_site():
    drop, x = Dropout(0.5), jnp.ones((2, 8, 16))
    info = Info(keys=jax.random.split(KEY, 2))
    assert drop(x, Info(), site=0) is x
    assert set(np.unique(drop(x, info, site=0))) == {0.0, 2.0}
    assert not jnp.array_equal(drop(x, info, site=0), drop(x, info, site=1))
    assert not jnp.array_equal(drop(x, info, site=0), drop(x, info.fold(3), site=0))
    alone = drop(x[1:], Info(keys=info.keys[1:]), site=0)
    assert jnp.array_equal(drop(x, info, site=0)[1:], alone), "a matter of the row"


def test_attention_turns_part_of_each_head_and_forgets_what_leaves_its_window():
    options = {"window": 3, "soft_cap": 5.0, "scale": 0.2, "bias": True}
    attention = Attention(16, 4, kv_heads=2, head_dim=8, rotary=Rotary(4, interleaved=True), **options, key=KEY)
    x = jax.random.normal(KEY, (1, 8, 16))
    whole, none = attention(x, Info())
    assert none is None
    assert jnp.allclose(attention(x[:, 4:], Info())[0][:, 2:], whole[:, 6:], atol=1e-5), "only differences of positions"
    positions, state, parts = jnp.arange(8)[None], attention.init_state(1, 8), []
    for start, stop in ((0, 2), (2, 3), (3, 7), (7, 8)):
        part, state = attention(x[:, start:stop], Info(positions[:, start:stop]), state)
        parts.append(part)
    assert state.positions.shape == (1, 3)
    assert jnp.allclose(jnp.concatenate(parts, 1), whole, atol=1e-5), "in unequal pieces, through a ring of three"


def older(key):
    """A decoder of the other layers: LayerNorm, biases, a plain MLP, scaled positions; an untied head with a bias."""

    def kind(key):
        mixer_key, ffn_key = jax.random.split(key)
        rotary = Rotary(8, scaling=Interpolated(2.0))
        mixer = Attention(32, 4, rotary=rotary, bias=True, out_bias=True, soft_cap=10.0, key=mixer_key)
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
