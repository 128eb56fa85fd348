"""Recurrences that begin with the projections of attention."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.layers import Attention, GatedAttention, LayerNorm, RMSNorm, TokenInfo
from zoo.layers.recurrent.common import l2_normalize
from zoo.layers.recurrent.from_attention import copy_to_gated_delta_net, copy_to_mamba2
from zoo.ops.rotary import Rotary
from zoo.parallel import Dim

EMBED, HEADS, KV_HEADS, HEAD_DIM = 12, 4, 2, 3
KEY = jax.random.key(0)
PARTS = {
    copy_to_gated_delta_net: (
        "corrector.projections.query",
        "corrector.projections.key",
        "corrector.projections.value",
    ),
    copy_to_mamba2: ("C", "B", "x"),
}


def make_attention(qk_norm=RMSNorm, **options):
    """Attention with grouped keys, biases and a QK norm, all of them at random."""
    norm = partial(qk_norm, HEAD_DIM, features=Dim("head_dim"))
    sizes = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
    attention = Attention(EMBED, **sizes, qk_norm=norm, bias=True, out_bias=True, **options, key=KEY)
    leaves, treedef = jax.tree.flatten(attention)
    keys = jax.random.split(KEY, len(leaves))
    return treedef.unflatten([jax.random.normal(key, x.shape) for key, x in zip(keys, leaves, strict=True)])


@pytest.mark.one_case
@pytest.mark.parametrize("copy", PARTS)
def test_copies_project_as_attention_does(copy):
    """Each head has the query, key and value of its head and group; up to their lengths, which a QK norm sets."""
    attention = make_attention(rotary=None)
    mixer = copy(attention, key=KEY)
    x = jax.random.normal(KEY, (2, 5, EMBED))

    @eqx.filter_jit
    def run(attention, mixer):
        projected = attention.project(x, TokenInfo(), None)
        _, found = zoo.capture(mixer, *PARTS[copy])(x, TokenInfo())
        return projected, [found[name].reshape(2, 5, HEADS, HEAD_DIM) for name in PARTS[copy]]

    (query, key, value), found = run(attention, mixer)
    repeat = lambda x: jnp.repeat(x, HEADS // KV_HEADS, axis=2)
    for expected, actual in zip((query, repeat(key)), found[:2], strict=True):
        np.testing.assert_allclose(l2_normalize(actual), l2_normalize(expected), atol=1e-5)
    np.testing.assert_allclose(found[2], repeat(value), rtol=1e-5, atol=1e-5)
    out = mixer.readout.out if hasattr(mixer, "readout") else mixer.out
    assert eqx.tree_equal(out, attention.out)


def test_copies_drop_what_belongs_to_the_softmax():
    """RoPE, a window, sinks and a soft cap change nothing."""
    plain = make_attention(rotary=None)
    options = {"rotary": Rotary(HEAD_DIM - 1), "window": 2, "soft_cap": 3.0}
    other = Attention(EMBED, HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, **options, sinks=True, key=KEY)
    names = ("query", "key", "value", "out", "query_norm", "key_norm")
    parts = lambda attention: [getattr(attention, name) for name in names]
    other = eqx.tree_at(parts, other, parts(plain), is_leaf=lambda x: x is None)
    assert eqx.tree_equal(copy_to_gated_delta_net(plain, key=KEY), copy_to_gated_delta_net(other, key=KEY))


def test_a_copy_reads_only_the_present_token_at_first():
    """Through its convolutions, which leave queries, keys and values as they are."""
    mixer = copy_to_gated_delta_net(make_attention(), key=KEY)
    for convolution in mixer.projections.convolutions:
        assert (convolution.weight[:, -1] == 1).all() and (convolution.weight[:, :-1] == 0).all()


def test_what_cannot_be_copied_is_refused():
    with pytest.raises(TypeError, match="GatedAttention"):
        copy_to_mamba2(GatedAttention(EMBED, HEADS, key=KEY), key=KEY)
    with pytest.raises(NotImplementedError, match="the QK norm is a LayerNorm"):
        copy_to_gated_delta_net(make_attention(LayerNorm), key=KEY)
