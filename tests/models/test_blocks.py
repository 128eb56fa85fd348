"""Residual wirings against their formulas."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zoo.layers import RWKV4, AbstractFeedForward, AbstractMixer, Dropout, LayerNorm, RWKV4ChannelMixing, TokenInfo
from zoo.layers.norm import IdentityNorm
from zoo.models import AddNormBlock, Block, Hidden, LayerScaleBlock, ParallelBlock, TwoMixerBlock
from zoo.models.blocks import PostNormBlock, SandwichBlock
from zoo.models.hf.families.jetmoe_layers import RoutedMixerBlock


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


class Ones(AbstractMixer):
    """A mixer, with a router that decides nothing, that adds 1 to the residual stream."""

    def __call__(self, x, info, state=None):
        return jnp.ones_like(x), None

    def mix(self, x, info, state=None):
        return jnp.ones_like(x), (None, ())

    def init_state(self, batch, length, dtype=jnp.float32):
        return None


class Tens(AbstractFeedForward):
    def __call__(self, x):
        return jnp.full_like(x, 10), ()


class TensMixer(Ones):
    def __call__(self, x, info, state=None):
        return jnp.full_like(x, 10), None


NORMS = {"mixer_norm": IdentityNorm(), "ffn_norm": IdentityNorm()}
POST_NORMS = {"mixer_post_norm": IdentityNorm(), "ffn_post_norm": IdentityNorm()}
SCALES = {"mixer_scale": jnp.ones(16), "ffn_scale": jnp.ones(16)}


@pytest.mark.parametrize(
    "make",
    [
        partial(Block, ffn=Tens()),
        partial(PostNormBlock, ffn=Tens()),
        partial(AddNormBlock, ffn=Tens()),
        partial(SandwichBlock, ffn=Tens(), **POST_NORMS),
        partial(LayerScaleBlock, ffn=Tens(), **SCALES),
        partial(ParallelBlock, ffn=Tens()),
        partial(RoutedMixerBlock, ffn=Tens()),
        partial(TwoMixerBlock, ffn=TensMixer()),
    ],
    ids=lambda make: make.func.__name__,
)
def test_the_two_dropouts_of_a_block_have_masks_of_their_own(make):
    """The mixer adds 0 or 2, the feed-forward layer 0 or 20. A block that used one mask would add both or neither."""
    block = make(mixer=Ones(), dropout=Dropout(0.5), **NORMS)
    info = TokenInfo(keys=jax.random.split(jax.random.key(0), 2))
    added = np.asarray(block(Hidden(jnp.zeros((2, 8, 16))), info)[0].x)
    assert set(np.unique(added)) == {0, 2, 20, 22}
    for value in (0, 2, 20, 22):
        assert 0.15 < (added == value).mean() < 0.35
