"""Every recurrent mixer: recurrent mode, decoding, padding, packed sequences, causality and invalid sizes."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import zoo
from tests.layers.random_layers import activations, randomize
from zoo.layers import (
    HGRN2,
    MLSTM,
    RGLRU,
    RWKV4,
    RWKV6,
    RWKV7,
    DeltaNet,
    GatedConvolution,
    GatedDeltaNet,
    GatedDeltaProduct,
    GatedLinearAttention,
    KimiDeltaAttention,
    Lightning,
    LinearAttention,
    Mamba,
    Mamba2,
    Retention,
    RMSNorm,
    TokenInfo,
)
from zoo.ops.rotary import DynamicScaling, Rotary

KEY = jax.random.key(0)
EMBED, HEADS, SEQ, BOUNDARY = 12, 2, 7, 3


def without_heads(mixer, **options):
    """Return a factory that ignores `heads`, for a mixer without heads."""
    return lambda embed, heads, **more: mixer(embed, **options, **more)


MIXERS = {
    "linear_attention": LinearAttention,
    "linear_attention, not normalized": partial(LinearAttention, normalized=False),
    "retention": Retention,
    "lightning": partial(Lightning, depth=0.5),
    "gated_linear_attention": GatedLinearAttention,
    "hgrn2": partial(HGRN2, bound=0.25),
    "mlstm": MLSTM,
    "delta_net": partial(DeltaNet, negative_eigenvalues=True),
    "gated_delta_net": partial(GatedDeltaNet, key_dim=4, value_dim=8),
    "kimi_delta_attention": KimiDeltaAttention,
    "gated_delta_product": GatedDeltaProduct,
    "rwkv6": partial(RWKV6, rank=3, decay_rank=5),
    "rwkv7": partial(RWKV7, rank=3),
    "rg_lru": partial(RGLRU, inner=16),
    "mamba": without_heads(Mamba, state_dim=3, rank=2, norm=partial(RMSNorm, scaled=False), bias=True),
    "mamba2": partial(Mamba2, head_dim=8, groups=2, state_dim=3, bias=True),
    "mamba2, bounded": partial(
        Mamba2, head_dim=4, state_dim=5, conv_width=2, dt_limit=(0.05, 0.5), norm_before_gate=True
    ),
    "rwkv4": without_heads(RWKV4, inner=16),
    # It has no modes, and is as wide as `run_modes` needs: every token of a document influences its last one.
    "gated_convolution": lambda embed, heads, mode="recurrent", **more: GatedConvolution(
        embed, conv_width=BOUNDARY + 1, **more
    ),
}


def make_mixer(name, **options):
    return randomize(partial(MIXERS[name], EMBED, HEADS, **options))


def decode_tokens(layer, x):
    """Decode one token at a time."""

    def step(state, xs):
        x, position = xs
        y, state = layer(x[:, None], TokenInfo(jnp.broadcast_to(position, (2, 1))), state)
        return state, y[:, 0]

    state, outputs = jax.lax.scan(step, layer.init_state(2, 16), (x.swapaxes(0, 1), jnp.arange(x.shape[1])))
    return outputs.swapaxes(0, 1), state


def decode_padded_chunks(layer, x, padding):
    """Decode two chunks, each with `padding[row]` padded tokens to the left of a row."""
    state, start, outputs = layer.init_state(2, 16), 0, []
    for size in (4, SEQ - 4):
        rows, positions = [], []
        for row, pad in enumerate(padding):
            junk = jnp.full((max(padding), EMBED), 3.0)
            rows.append(jnp.concatenate([junk[:pad], x[row, start : start + size], junk[pad:]])[: size + max(padding)])
            numbers = [-1] * pad + list(range(start, start + size))
            positions.append(numbers + [-1] * (size + max(padding) - len(numbers)))
        y, state = layer(jnp.stack(rows), TokenInfo(jnp.array(positions)), state)
        outputs.append(jnp.stack([y[row, pad : pad + size] for row, pad in enumerate(padding)]))
        start += size
    return jnp.concatenate(outputs, axis=1), state


@eqx.filter_jit
def run_modes(layer, recurrent_layer, x, cotangent):
    """Run a mixer in all ways that must agree, in one program, since compiling dominates the time."""
    segments = jnp.array([[1] * BOUNDARY + [2] * (SEQ - BOUNDARY)] * 2)
    packed = TokenInfo(zoo.models.pack_positions(segments), segments)
    return {
        "forward": layer(x, TokenInfo())[0],
        "recurrent": recurrent_layer(x, TokenInfo())[0],
        "decoded": decode_tokens(layer, x),
        "padded": decode_padded_chunks(layer, x, (2, 2)),
        "packed": layer(x, packed)[0],
        "second document": layer(x[:, BOUNDARY:], TokenInfo())[0],
        "gradient": jax.grad(lambda x: (layer(x, TokenInfo())[0][:, BOUNDARY] * cotangent).sum())(x),
    }


def assert_close(actual, expected):
    scale = float(jnp.abs(expected).max())
    error = float(jnp.abs(actual - expected).max())
    assert error <= 2e-5 * max(scale, 1e-2), error / scale


@pytest.mark.parametrize("name", MIXERS)
def test_mixer_modes_agree_packed_padded_and_causal(name):
    layer, recurrent_layer = make_mixer(name), make_mixer(name, mode="recurrent")
    results = run_modes(layer, recurrent_layer, activations(2, SEQ, EMBED), activations(2, SEQ, EMBED, seed=2)[:, 0])
    expected = results["forward"]
    assert_close(results["recurrent"], expected)
    (decoded, decoded_state), (padded, padded_state) = results["decoded"], results["padded"]
    assert_close(decoded, expected)
    assert_close(padded, expected)
    for actual, other in zip(jax.tree.leaves(padded_state), jax.tree.leaves(decoded_state), strict=True):
        assert_close(actual, other)
    assert_close(results["packed"][:, :BOUNDARY], expected[:, :BOUNDARY])
    assert_close(results["packed"][:, BOUNDARY:], results["second document"])
    gradient = results["gradient"]
    assert not gradient[:, BOUNDARY + 1 :].any()
    assert (jnp.abs(gradient[:, : BOUNDARY + 1]).max(-1) > 1e-7).all()  # every earlier token has an influence


def test_mixer_state_size_does_not_depend_on_length():
    for name in MIXERS:
        layer = make_mixer(name)
        states = [eqx.filter_eval_shape(layer.init_state, 2, length) for length in (1, 10**6)]
        assert jax.tree.leaves(states[0]) == jax.tree.leaves(states[1])


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (partial(Retention, 12, 5), "embed=12 does not share out over 5 heads: give key_dim"),
        (
            partial(Retention, 12, 2, rotary=Rotary(6, scaling=DynamicScaling(2.0, 8))),
            "cannot be turned again in a state",
        ),
        (partial(DeltaNet, 12, 2, key_dim=0), "key_dim is 0"),
        (partial(DeltaNet, 12, 2, conv_width=0), "a convolution is at least 1 token wide"),
        (partial(GatedDeltaProduct, 12, 2, num_householder=0), "num_householder is 0"),
        (partial(Lightning, 12, 2, depth=1.5), "a depth is 0 for the first layer"),
        (partial(HGRN2, 12, 2, bound=1.0), "at least 0 and below 1"),
        (partial(RGLRU, 12, 5), "inner=12 features do not share out over 5 heads"),
    ],
)
def test_mixer_rejects_impossible_sizes(factory, message):
    with pytest.raises(ValueError, match=message):
        factory(key=KEY)
