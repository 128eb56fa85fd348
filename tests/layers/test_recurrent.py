"""Every recurrent mixer: one token after another, padded, packed; and nothing flows from later tokens."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.layers import (
    HGRN2,
    MLSTM,
    RGLRU,
    RWKV4,
    RWKV6,
    RWKV7,
    DeltaNet,
    GatedDeltaNet,
    GatedDeltaProduct,
    GatedLinearAttention,
    KimiDeltaAttention,
    Lightning,
    LinearAttention,
    LowRank,
    Mamba,
    Mamba2,
    Retention,
    RMSNorm,
    TokenInfo,
)
from zoo.ops.rotary import DynamicScaling, Rotary

KEY = jax.random.key(0)
EMBED, HEADS, SEQ, BORDER = 12, 2, 7, 3


def without_heads(mixer, **options):
    """Of a mixer that has none."""
    return lambda embed, heads, **more: mixer(embed, **options, **more)


MAKERS = {
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
}


def made(maker, seed=0):
    """With numpy's numbers, for which nothing is compiled: biases and scales, too, are not those of birth."""
    shapes = eqx.filter_eval_shape(partial(maker, EMBED, HEADS), key=KEY)
    draw = np.random.default_rng(seed)
    number = lambda x: jnp.asarray(draw.normal(size=x.shape) * x.shape[-1] ** -0.5, x.dtype)
    return jax.tree.map(lambda x: number(x) if isinstance(x, jax.ShapeDtypeStruct) else x, shapes)


def activations(seed=1, seq=SEQ):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(2, seq, EMBED)), jnp.float32)


def step_by_step(layer, x):
    def step(state, now):
        x, position = now
        y, state = layer(x[:, None], TokenInfo(jnp.broadcast_to(position, (2, 1))), state)
        return state, y[:, 0]

    state, outputs = jax.lax.scan(step, layer.init_state(2, 16), (x.swapaxes(0, 1), jnp.arange(x.shape[1])))
    return outputs.swapaxes(0, 1), state


def in_pieces(layer, x, padding):
    """Two pieces from an empty state, each with as much padding in front as `padding` says of its rows."""
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
def everything(layer, by_definition, x, cotangent):
    """All that is compared, compiled together: what costs here is compiling."""
    segments = jnp.array([[1] * BORDER + [2] * (SEQ - BORDER)] * 2)
    packed = TokenInfo(zoo.models.pack_positions(segments), segments)
    backward = jax.grad(lambda x: (layer(x, TokenInfo())[0][:, BORDER] * cotangent).sum())
    return {
        "whole": layer(x, TokenInfo())[0],
        "recurrent": by_definition(x, TokenInfo())[0],
        "steps": step_by_step(layer, x),
        "pieces": in_pieces(layer, x, (2, 2)),
        "packed": layer(x, packed)[0],
        "second": layer(x[:, BORDER:], TokenInfo())[0],
        "seen": backward(x),
    }


def near(a, b, scale=None):
    scale = float(jnp.abs(b).max()) if scale is None else scale
    assert float(jnp.abs(a - b).max()) <= 2e-5 * max(scale, 1e-2), float(jnp.abs(a - b).max()) / scale


@pytest.mark.parametrize("name", MAKERS)
def test_what_a_mixer_promises(name):
    layer, by_definition = made(MAKERS[name]), made(partial(MAKERS[name], mode="recurrent"))
    x = activations()
    got = everything(layer, by_definition, x, activations(2)[:, 0])
    near(got["recurrent"], got["whole"])
    (steps, state), (pieces, other) = got["steps"], got["pieces"]
    near(steps, got["whole"])
    near(pieces, got["whole"])
    for a, b in zip(jax.tree.leaves(other), jax.tree.leaves(state), strict=True):
        near(a, b)
    near(got["packed"][:, :BORDER], got["whole"][:, :BORDER])
    near(got["packed"][:, BORDER:], got["second"])
    assert not got["seen"][:, BORDER + 1 :].any()
    assert (jnp.abs(got["seen"][:, : BORDER + 1]).max(-1) > 1e-7).all()  # and everything does from those before


def test_a_state_is_as_large_after_many_tokens_as_after_one():
    for maker in MAKERS.values():
        layer = made(maker)
        sizes = [eqx.filter_eval_shape(layer.init_state, 2, length) for length in (1, 10**6)]
        assert jax.tree.leaves(sizes[0]) == jax.tree.leaves(sizes[1])


@pytest.mark.parametrize(
    ("make", "message"),
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
def test_sizes_that_cannot_be(make, message):
    with pytest.raises(ValueError, match=message):
        make(key=KEY)


def test_a_low_rank_matrix_has_a_transpose_unless_something_lies_between():
    low = LowRank(4, 3, rank=2, key=KEY)
    dense = low.up.weight @ low.down.weight
    near(low(jnp.eye(4)).T, dense)
    near(low.transposed(jnp.eye(3)), dense)
    with pytest.raises(NotImplementedError, match="has no transpose"):
        LowRank(4, 3, rank=2, activation=jnp.tanh, key=KEY).transposed(jnp.ones(3))
