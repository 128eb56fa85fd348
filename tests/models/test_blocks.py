"""Residual wirings against their formulas."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zoo.layers import RWKV4, Dropout, LayerNorm, RWKV4ChannelMixing, TokenInfo
from zoo.models import Hidden, TwoMixerBlock


@pytest.mark.ci
def test_two_mixer_block_of_a_smaller_stream_is_as_much_smaller():
    """Norms without an epsilon undo powers of 2, to the bit."""
    mixer_key, ffn_key, data_key = jax.random.split(jax.random.key(0), 3)
    norm = partial(LayerNorm, 8, epsilon=0.0)
    parts = {"mixer": RWKV4(8, key=mixer_key), "ffn": RWKV4ChannelMixing(8, 16, key=ffn_key)}
    parts |= {"mixer_norm": norm(), "ffn_norm": norm(), "dropout": Dropout(0.0)}
    x = jax.random.normal(data_key, (2, 5, 8))
    plain, _ = TwoMixerBlock(**parts)(Hidden(x), TokenInfo())
    rescaled, _ = TwoMixerBlock(residual_multiplier=0.25, shrink=0.5, **parts)(Hidden(0.25 * x), TokenInfo())
    np.testing.assert_array_equal(rescaled.x, 0.125 * plain.x)
    assert jnp.abs(plain.x).max() > 0.1
