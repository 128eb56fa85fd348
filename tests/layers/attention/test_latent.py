"""Latent attention: both modes equal the formula; KV cache, packed sequences, causality, and a mesh."""

import functools
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zoo
from tests.layers.random_layers import activations, randomize, relative_error
from tests.quick import mark_slow
from zoo import Layout
from zoo.layers import Attention, LatentAttention, TokenInfo
from zoo.layers.token_info import pack_positions
from zoo.ops.attention import AttentionMask, reference_attention
from zoo.ops.rotary import DynamicScaling, LongRopeScaling, Rotary, YarnScaling
from zoo.parallel import gather

KEY = jax.random.key(0)
EMBED, SEQ = 24, 7
SIZES = {
    "small": {"heads": 4, "latent": 16, "head_dim": 12, "value_dim": 10, "rotary": Rotary(8)},
    "one head, wide values": {"heads": 1, "latent": 6, "head_dim": 4, "value_dim": 9, "rotary": Rotary(2)},
    "compressed": {"heads": 2, "latent": 5, "head_dim": 8, "rotary": Rotary(6, interleaved=True), "query_latent": 9},
    "gated": {"heads": 4, "latent": 8, "head_dim": 4, "value_dim": 6, "rotary": Rotary(4), "gate": True},
    "sinks": {"heads": 2, "latent": 8, "head_dim": 4, "value_dim": 6, "rotary": Rotary(4), "gate": "channels"}
    | {"sinks": True, "query_latent": 6, "latent_scales": (2.0, 0.5)},
    "biased": {"heads": 4, "latent": 8, "head_dim": 4, "rotary": Rotary(4), "query_latent": 6, "bias": True},
}


def make_layer(name, seed=0, **options):
    return randomize(partial(LatentAttention, EMBED, **SIZES[name] | options), seed=seed)


@eqx.filter_jit
def forward(layer, x, info=None):
    """Return the outputs of all tokens at once, without a cache."""
    return layer(x, info or TokenInfo())[0]


@eqx.filter_jit
def naive_latent_attention(layer, x):
    """Compute the formulas of the docstring, one head at a time."""
    cos, sin = layer.rotary(jnp.arange(x.shape[1]))
    rotate = lambda b: layer.rotate(b[:, :, None], (cos, sin))[:, :, 0]
    query_scale, scale = layer.latent_scales
    c, r = scale * layer.latent_norm(layer.latent(x)), rotate(layer.rotary_key(x))
    query_input = x if layer.query is not None else query_scale * layer.query_norm(layer.query_down(x))
    query_dim = layer.head_dim + layer.rotary.dim
    W_query = (layer.query or layer.query_up).weight.reshape(-1, query_dim, query_input.shape[-1])
    W_key, W_value = (up.weight.reshape(len(W_query), -1, c.shape[-1]) for up in (layer.key_up, layer.value_up))
    mixed = []
    sinks = jnp.full(len(W_query), -jnp.inf) if layer.sinks is None else layer.sinks
    for W_q, W_k, W_v, sink in zip(W_query, W_key, W_value, sinks, strict=True):
        a, b = jnp.split(query_input @ W_q.T, [layer.head_dim], axis=-1)
        query = jnp.concatenate([a, rotate(b)], -1)
        key, value = jnp.concatenate([c @ W_k.T, r], -1), c @ W_v.T
        scores = query @ key.swapaxes(1, 2) * query_dim**-0.5
        mask = jnp.tril(jnp.ones(scores.shape[1:], bool))
        scores = jnp.where(mask, scores, -jnp.inf)
        scores = jnp.concatenate([scores, jnp.broadcast_to(sink, (*scores.shape[:2], 1))], -1)
        mixed.append(jax.nn.softmax(scores, axis=-1)[..., :-1] @ value)
    if layer.gate is not None:
        gates = jnp.split(jax.nn.sigmoid(x @ layer.gate.weight.T), len(mixed), axis=-1)
        mixed = [gate * head for gate, head in zip(gates, mixed, strict=True)]
    return layer.out(jnp.concatenate(mixed, -1))


@pytest.mark.one_case
@pytest.mark.parametrize("name", SIZES)
def test_latent_attention_equals_its_formula(name):
    layer, x = make_layer(name), activations(2, SEQ, EMBED)
    expected = naive_latent_attention(layer, x)
    assert relative_error(forward(layer, x), expected) < 1e-5
    if name == "small":
        assert relative_error(forward(make_layer(name, implementation=reference_attention), x), expected) < 1e-5


@pytest.mark.one_case
def test_summed_probabilities_leave_out_the_sinks():
    """A head of a token sums to less than 1, by the part of its sink."""
    layer, x = make_layer("sinks"), activations(2, SEQ, EMBED)
    angles = layer.rotary(jnp.arange(SEQ))
    arguments = layer.project_queries(x, angles), layer.project_features(x, angles), AttentionMask(causal=True)
    with_sinks = layer.sum_probabilities(*arguments).sum(-1)
    without = eqx.tree_at(lambda layer: layer.sinks, layer, jnp.full(2, -jnp.inf)).sum_probabilities(*arguments)
    np.testing.assert_allclose(without.sum(-1), 2, atol=1e-5)
    assert (with_sinks < 1.99).all() and (with_sinks > 0).all()


@eqx.filter_jit
def run_both_modes(layer, x, cotangent, segments):
    """Return outputs and gradients of expanded and of absorbed attention."""
    cos_sin = layer.rotary(jnp.arange(SEQ))
    mask = AttentionMask(causal=True, query_segments=segments, key_segments=segments)

    def run(attend, inputs):
        layer, x = inputs
        return attend(layer, layer.project_queries(x, cos_sin), layer.project_features(x, cos_sin), mask)

    def outputs_and_grads(attend):
        outputs, vjp = eqx.filter_vjp(partial(run, attend), (layer, x))
        return outputs, vjp(cotangent)

    return outputs_and_grads(LatentAttention.attend_expanded), outputs_and_grads(LatentAttention.attend_absorbed)


@pytest.mark.one_case
@pytest.mark.parametrize("name", mark_slow(SIZES, but=("small", "compressed")))
@settings(max_examples=4)
@given(seed=st.integers(0, 2**20), segmented=st.booleans())
def test_latent_attention_absorbed_equals_expanded(name, seed, segmented):
    layer, x = make_layer(name, seed), activations(2, SEQ, EMBED, seed=seed + 1)
    heads, value_dim = SIZES[name]["heads"], SIZES[name].get("value_dim", SIZES[name]["head_dim"])
    cotangent = np.random.default_rng(seed + 2).normal(size=(2, SEQ, heads, value_dim)).astype(np.float32)
    segments = np.arange(SEQ)[None].repeat(2, 0) // (4 if segmented else SEQ)
    (expanded, expanded_grads), (absorbed, absorbed_grads) = run_both_modes(layer, x, cotangent, segments)
    assert relative_error(absorbed, expanded) < 1e-5
    for a, b in zip(jax.tree.leaves(absorbed_grads), jax.tree.leaves(expanded_grads), strict=True):
        assert float(jnp.abs(a - b).max()) <= 2e-5 * max(float(jnp.abs(b).max()), 0.1)


@eqx.filter_jit
def decode(layer, state, x, positions):
    return layer(x, TokenInfo(positions), state)


@pytest.mark.one_case
@pytest.mark.parametrize("name", mark_slow(SIZES, but=("small", "compressed")))
def test_latent_attention_with_a_cache_equals_without(name):
    """One token at a time and in unequal chunks; one row is padded on the left."""
    layer, x = make_layer(name), activations(2, SEQ, EMBED)
    expected = np.array(forward(layer, x))
    expected[1, 2:] = forward(layer, x[1:, 2:])[0]
    positions = jnp.stack([jnp.arange(SEQ), jnp.arange(SEQ) - 2])
    for chunk_sizes in ([1] * SEQ, [3, 1, 1, 2]):
        state, start = layer.init_state(2, 9), 0
        for size in chunk_sizes:
            chunk = slice(start, start + size)
            y, state = decode(layer, state, x[:, chunk], jnp.maximum(positions[:, chunk], -1))
            is_real = np.asarray(positions[:, chunk]) >= 0
            assert np.abs(np.asarray(y) - expected[:, chunk])[is_real].max() < 1e-5 * np.abs(expected).max()
            start += size
        assert state.positions[1].tolist() == [*range(SEQ - 2), -1, -1, -1, -1]  # padding takes no slot


def test_latent_attention_packed_equals_separate():
    layer, x = make_layer("compressed"), activations(2, 8, EMBED)
    segments = jnp.array([[1, 1, 1, 1, 1, 2, 2, 2]] * 2)
    packed = forward(layer, x, TokenInfo(pack_positions(segments), segments))
    for document in (slice(0, 5), slice(5, 8)):
        assert relative_error(packed[:, document], forward(layer, x[:, document])) < 1e-5


def test_latent_attention_is_causal():
    layer, x = make_layer("compressed"), activations(1, SEQ, EMBED)
    jacobian = jax.jit(jax.jacobian(lambda x: layer(x, TokenInfo())[0][0].sum(-1)))(x)[:, 0]
    has_gradient = jnp.abs(jacobian).max(-1) > 0
    assert (has_gradient == jnp.tril(jnp.ones((SEQ, SEQ), bool))).all()


def loss_fn(layer, batch):
    return (gather(layer)(batch["x"], TokenInfo())[0] * batch["weights"]).sum(), jnp.float32(batch["x"].size)


def prefill_and_decode(layer, x):
    """Prefill three tokens, then decode one token at a time."""
    layer = gather(layer)
    state, outputs = layer.init_state(x.shape[0], SEQ), []
    for start, stop in ((0, 3), *((i, i + 1) for i in range(3, SEQ))):
        positions = jnp.broadcast_to(jnp.arange(start, stop), (x.shape[0], stop - start))
        y, state = layer(x[:, start:stop], TokenInfo(positions), state)
        outputs.append(y)
    return jnp.concatenate(outputs, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fsdp_dims"),
    [("small", ["embed"]), ("sinks", ["embed"]), ("biased", ["embed", "latent"])],
)
def test_latent_attention_on_a_mesh_equals_one_device(name, fsdp_dims):
    layout = Layout(parameters=dict.fromkeys(fsdp_dims, ("fsdp",)))
    mesh = zoo.make_mesh(data=2, fsdp=2, tensor=2, layout=layout)
    layer, x = make_layer(name), activations(8, SEQ, EMBED)
    batch = {"x": x, "weights": activations(8, SEQ, EMBED, seed=2)}
    placed = zoo.place(layer, mesh)
    rows, columns = placed.key_up.weight.addressable_shards[0].data.shape
    assert (2 * rows, columns * len(fsdp_dims)) == layer.key_up.weight.shape
    loss, grads = zoo.value_and_grad(loss_fn, mesh)(placed, batch)
    reference = eqx.filter_jit(eqx.filter_value_and_grad(lambda layer: loss_fn(layer, batch)[0] / x.size))
    expected_loss, expected_grads = reference(layer)
    assert abs(loss - expected_loss) < 1e-5 * abs(expected_loss)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        assert np.abs(a - b).max() <= 2e-5 * np.abs(b).max()
    decoded = zoo.spmd(prefill_and_decode, mesh, out="batch seq embed")(placed, x)
    assert relative_error(decoded, forward(layer, x)) < 1e-5


@functools.cache
def jit_decode():
    return eqx.filter_jit(
        lambda fixed, state: fixed[0](fixed[1], TokenInfo(fixed[2]), state), donate="all-except-first"
    )


def test_latent_cache_holds_a_latent_and_one_rotary_key():
    layer, length = make_layer("small", heads=8), 512
    state = layer.init_state(2, length, jnp.bfloat16)
    assert state.features.nbytes == 2 * length * (16 + 8) * 2
    kv_cache = Attention(EMBED, 8, head_dim=12, key=KEY).init_state(2, length, jnp.bfloat16)
    assert kv_cache.key.nbytes + kv_cache.value.nbytes == 2 * length * (2 * 8 * 12) * 2


def test_latent_cache_is_updated_in_place():
    layer = make_layer("small", heads=2)
    for rows in (1, 2):
        state = layer.init_state(rows, 4096)
        fixed = layer, activations(rows, 1, EMBED), jnp.zeros((rows, 1), int)
        memory = jit_decode().lower(fixed, state).compile().compiled.memory_analysis()
        cache_bytes = sum(x.nbytes for x in jax.tree.leaves(state))
        assert memory.alias_size_in_bytes >= cache_bytes
        assert memory.temp_size_in_bytes < cache_bytes / 2
    _, after = jit_decode()(fixed, state)
    assert state.features.is_deleted() and after.written.tolist() == [1, 1]


@pytest.mark.parametrize(
    "scaling",
    [
        DynamicScaling(2.0, 8),
        pytest.param(LongRopeScaling((1.0, 1.5), (2.0, 4.0), 8, 4.0), marks=pytest.mark.slow),
    ],
    ids=["dynamic", "long"],
)
def test_latent_attention_length_dependent_rope_with_a_cache(scaling):
    rotary = Rotary(4, scaling=scaling)
    layer = make_layer("biased", rotary=rotary)
    assert layer.rope_switch_length == (8 if isinstance(scaling, LongRopeScaling) else None)
    x = activations(2, 11, EMBED)
    positions = jnp.broadcast_to(jnp.arange(11), (2, 11))
    expected = forward(layer, x)
    y, state = decode(layer, layer.init_state(2, 11), x[:, :10], positions[:, :10])
    assert relative_error(y, expected[:, :10]) < 1e-5
    y, state = decode(layer, state, x[:, 10:], positions[:, 10:])
    assert relative_error(y, expected[:, 10:]) < 1e-5


def test_latent_attention_yarn_scale_is_that_of_deepseek():
    layer = make_layer("small", rotary=Rotary(8, scaling=YarnScaling(40, 4096, mscale=0.5, mscale_all_dim=0.7)))
    assert layer.scale == pytest.approx(20**-0.5 * (0.1 * 0.7 * np.log(40) + 1) ** 2)
    assert make_layer("small", rotary=Rotary(8, scaling=YarnScaling(40, 4096))).scale == 20**-0.5
    assert make_layer("small", scale=3).scale == 3.0


def test_latent_attention_rejects_invalid_arguments():
    for name in ("heads", "latent", "head_dim", "value_dim", "query_latent"):
        with pytest.raises(ValueError, match=f"{name} is 0, and a size is at least 1"):
            make_layer("small", **{name: 0})
    layer = make_layer("small")
    with pytest.raises(ValueError, match="give positions, -1 for padding"):
        layer(activations(2, SEQ, EMBED), TokenInfo(), layer.init_state(2, SEQ))
