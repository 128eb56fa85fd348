"""Residual wirings against their formulas."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zoo.layers import AbstractFeedForward, AbstractMixer, Dropout, TokenInfo
from zoo.layers.norm import IdentityNorm
from zoo.models import Block, Hidden
from zoo.models.blocks import (
    AddNormBlock,
    FeedForwardBlock,
    LayerScaleBlock,
    ParallelBlock,
    PostNormBlock,
    SandwichBlock,
)
from zoo.models.hf.families.jetmoe_layers import RoutedMixerBlock
from zoo.models.hf.families.minimax_layers import NormedResidualBlock
from zoo.models.hf.families.rwkv_layers import TwoMixerBlock


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
        partial(NormedResidualBlock, ffn=Tens()),
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


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_feed_forward_block_adds_its_output_and_has_no_state(rate):
    block = FeedForwardBlock(mixer_norm=IdentityNorm(), ffn=Tens(), dropout=Dropout(rate))
    info = TokenInfo(keys=jax.random.split(jax.random.key(0), 2))
    state = block.init_state(2, 8)
    assert state == () and block(Hidden(jnp.zeros((2, 8, 16))), info)[1] is None
    hidden, new_state = block(Hidden(jnp.ones((2, 8, 16))), info, state)
    assert new_state == () and set(np.unique(hidden.x)) == ({1, 21} if rate else {11})
