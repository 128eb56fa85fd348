"""Attention and Mamba-2 side by side equal their sum, and a gated MLP with multipliers its formula."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.layers.random_layers import activations, randomize, relative_error
from zoo.layers import Attention, GatedMLP, Mamba2, TokenInfo
from zoo.models.hf.families.falcon_h1_layers import MultipliedMLP, SideBySide

EMBED, SEQ = 8, 6


def make(key):
    attention = partial(Attention, EMBED, 2, bias=True)
    recurrent = partial(Mamba2, EMBED, 2, head_dim=4, state_dim=3)
    multipliers = {"attention_multipliers": (1.5, 0.5), "recurrent_multipliers": (0.25, 3.0)}
    return SideBySide(attention, recurrent, **multipliers, key=key)


@pytest.mark.one_case("slow")
@pytest.mark.parametrize("cached", [False, True])
def test_side_by_side_is_the_sum_of_two_mixers(cached):
    layer, x = randomize(make), activations(2, SEQ, EMBED)
    info = TokenInfo(positions=jnp.broadcast_to(jnp.arange(SEQ), (2, SEQ)) if cached else None)
    cache, recurrent = layer.init_state(2, SEQ) if cached else (None, None)
    attended, cache = layer.attention(1.5 * x, info, cache)
    scanned, recurrent = layer.recurrent(0.25 * x, info, recurrent)
    ours, state = layer(x, info, layer.init_state(2, SEQ) if cached else None)
    assert relative_error(ours, 0.5 * attended + 3 * scanned) < 1e-6
    if cached:
        pairs = zip(jax.tree.leaves(state), jax.tree.leaves((cache, recurrent)), strict=True)
        assert all(np.allclose(a, b) for a, b in pairs)
    else:
        assert state is None


def test_multiplied_mlp_equals_its_formula():
    make_mlp = lambda key: MultipliedMLP(EMBED, 10, multipliers=(0.5, 3.0), bias=True, key=key)
    layer, x = randomize(make_mlp), activations(2, SEQ, EMBED)
    expected = 3 * layer.down(jax.nn.silu(0.5 * layer.gate(x)) * layer.up(x))
    assert relative_error(layer(x)[0], expected) < 1e-6
    plain = MultipliedMLP(EMBED, 10, key=jax.random.key(0))
    same = GatedMLP(EMBED, 10, key=jax.random.key(0))
    np.testing.assert_array_equal(plain(x)[0], same(x)[0])
