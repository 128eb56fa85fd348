"""Residual wirings other than the pre-norm `zoo.models.decoder.Block`."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from zoo.layers import (
    AbstractFeedForward,
    AbstractMixer,
    AbstractNorm,
    Dropout,
    IdentityNorm,
    TokenInfo,
)
from zoo.layers.abstract import mix_tokens, run_feed_forward, run_mixer
from zoo.parallel import buffer, named_by_class
from zoo.parallel.fields import NAMED_BY_CLASS, TRAINABLE
from zoo.parallel.tokens import gather_tokens, match_tokens
from zoo.shapes import ResidualStream

from .decoder import AbstractBlock, AbstractMixerBlock, Block, Hidden

_UNREAD = {NAMED_BY_CLASS: True, TRAINABLE: False}


class MixerBlock(AbstractMixerBlock):
    """x + mixer(norm(x)), without a feed-forward layer: the layer of Mamba, whose mixer expands the channels itself
    (arXiv:2312.00752, section 3.4)."""

    mixer_norm: AbstractNorm
    mixer: AbstractMixer = named_by_class()
    dropout: Dropout

    residual_multiplier: float = eqx.field(static=True, default=1.0)

    def __call__(self, hidden: Hidden, info: TokenInfo, state: Any = None) -> tuple[Hidden, Any]:
        mixed, state = run_mixer(self.mixer, self.mixer_norm(hidden.x), info, state)
        mixed = self.dropout(mixed, info, site=0)
        return hidden.add_residual(mixed if self.residual_multiplier == 1 else self.residual_multiplier * mixed), state


class FeedForwardBlock(AbstractBlock):
    """x + ffn(norm(x)), without a mixer: a layer of its own in Nemotron-H (arXiv:2504.03624, section 2.1). It has no
    state. The norm is called as in the layers around it, `mixer_norm`: files have one name for both."""

    mixer_norm: AbstractNorm
    ffn: AbstractFeedForward = named_by_class()
    dropout: Dropout

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> tuple[()]:
        return ()

    def __call__(self, hidden: Hidden, info: TokenInfo, state: Any = None) -> tuple[Hidden, Any]:
        fed, routing = run_feed_forward(self.ffn, self.mixer_norm(hidden.x))
        fed = checkpoint_name(fed, "ffn_output")
        return hidden.add_residual(self.dropout(fed, info, site=1), routing), state


class UnreadBlock(AbstractMixerBlock):
    """A layer that a checkpoint has and nothing reads: hidden states pass it unchanged. Models of texts with images may
    read an earlier layer of their tower than the last (LLaVA, arXiv:2304.08485, section 4.1).

    Its arrays are buffers: neither trained nor counted, and saved as they were loaded.
    """

    mixer_norm: AbstractNorm = buffer()
    mixer: AbstractMixer = eqx.field(metadata=_UNREAD)
    ffn_norm: AbstractNorm = buffer()
    ffn: AbstractFeedForward = eqx.field(metadata=_UNREAD)
    dropout: Dropout

    def __call__(self, hidden: Hidden, info: TokenInfo, state: Any = None) -> tuple[Hidden, Any]:
        return hidden, state


class PostNormBlock(AbstractMixerBlock):
    """x + norm(mixer(x)), then x + norm(ffn(x)): the norms follow the sublayers, within the residual branch (OLMo 2,
    arXiv:2501.00656, section 3.1; Swin V2, arXiv:2111.09883, section 3.2)."""

    mixer_norm: AbstractNorm
    mixer: AbstractMixer = named_by_class()
    ffn_norm: AbstractNorm
    ffn: AbstractFeedForward = named_by_class()
    dropout: Dropout

    def __call__(self, hidden: Hidden, info: TokenInfo, state: Any = None) -> tuple[Hidden, Any]:
        mixed, state = run_mixer(self.mixer, hidden.x, info, state)
        hidden = hidden.add_residual(self.dropout(self.mixer_norm(mixed), info, site=0))
        fed, routing = run_feed_forward(self.ffn, hidden.x)
        return hidden.add_residual(self.dropout(self.ffn_norm(fed), info, site=1), routing), state


class AddNormBlock(AbstractMixerBlock):
    """norm(x + mixer(x)), then norm(x + ffn(x)): the norms follow the residual sums, as in the original Transformer
    (Vaswani et al., arXiv:1706.03762, section 3.1) and BERT."""

    mixer_norm: AbstractNorm
    mixer: AbstractMixer = named_by_class()
    ffn_norm: AbstractNorm
    ffn: AbstractFeedForward = named_by_class()
    dropout: Dropout

    def __call__(self, hidden: Hidden, info: TokenInfo, state: Any = None) -> tuple[Hidden, Any]:
        mixed, state = run_mixer(self.mixer, hidden.x, info, state)
        hidden = hidden.add_residual(self.dropout(mixed, info, site=0)).normalize(self.mixer_norm)
        fed, routing = run_feed_forward(self.ffn, hidden.x)
        return hidden.add_residual(self.dropout(fed, info, site=1), routing).normalize(self.ffn_norm), state


class SandwichBlock(AbstractMixerBlock):
    """x + post_norm(mixer(norm(x))), then x + post_norm(ffn(norm(x))): norms before and after each sublayer (Gemma 2,
    arXiv:2408.00118, section 2; Ding et al., arXiv:2105.13290, section 2.4). Both outputs are multiplied by
    `residual_multiplier`."""

    mixer_norm: AbstractNorm
    mixer: AbstractMixer = named_by_class()
    mixer_post_norm: AbstractNorm
    ffn_norm: AbstractNorm
    ffn: AbstractFeedForward = named_by_class()
    ffn_post_norm: AbstractNorm
    dropout: Dropout

    residual_multiplier: float = eqx.field(static=True, default=1.0)

    def __call__(self, hidden: Hidden, info: TokenInfo, state: Any = None) -> tuple[Hidden, Any]:
        mixed, state = run_mixer(self.mixer, self.mixer_norm(hidden.x), info, state)
        mixed = self.dropout(self.mixer_post_norm(mixed), info, site=0)
        hidden = hidden.add_residual(self._scale_residual(mixed))
        fed, routing = run_feed_forward(self.ffn, self.ffn_norm(hidden.x))
        fed = self.dropout(self.ffn_post_norm(fed), info, site=1)
        return hidden.add_residual(self._scale_residual(fed), routing), state

    def _scale_residual(self, x: ResidualStream) -> ResidualStream:
        if self.residual_multiplier == 1:
            return x
        return self.residual_multiplier * x


class LayerScaleBlock(AbstractMixerBlock):
    """x + mixer_scale * mixer(norm(x)), then x + ffn_scale * ffn(norm(x)): a pre-norm layer with one learned scale per
    feature of each residual branch (LayerScale, Touvron et al., arXiv:2103.17239, section 2)."""

    mixer_norm: AbstractNorm
    mixer: AbstractMixer = named_by_class()
    mixer_scale: Float[Array, "embed"]
    ffn_norm: AbstractNorm
    ffn: AbstractFeedForward = named_by_class()
    ffn_scale: Float[Array, "embed"]
    dropout: Dropout

    def __call__(self, hidden: Hidden, info: TokenInfo, state: Any = None) -> tuple[Hidden, Any]:
        mixed, state = run_mixer(self.mixer, self.mixer_norm(hidden.x), info, state)
        hidden = hidden.add_residual(self.mixer_scale * self.dropout(mixed, info, site=0))
        fed, routing = run_feed_forward(self.ffn, self.ffn_norm(hidden.x))
        fed = checkpoint_name(fed, "ffn_output")
        return hidden.add_residual(self.ffn_scale * self.dropout(fed, info, site=1), routing), state


class ParallelBlock(AbstractMixerBlock):
    """x + mixer(norm(x)) + ffn(norm'(x)): parallel attention and feed-forward (GPT-J; GPT-NeoX, arXiv:2204.06745,
    section 2.1). Without an `ffn_norm` both sublayers read the same norm (PaLM, arXiv:2204.02311, section 2)."""

    mixer_norm: AbstractNorm
    mixer: AbstractMixer = named_by_class()
    ffn_norm: AbstractNorm | None
    ffn: AbstractFeedForward = named_by_class()
    dropout: Dropout

    def __call__(self, hidden: Hidden, info: TokenInfo, state: Any = None) -> tuple[Hidden, Any]:
        normed = gather_tokens(self.mixer_norm(hidden.x))  # once: the gradient of each gather is a reduce-scatter
        mixed, state = mix_tokens(self.mixer, normed, info, state)
        fed, routing = self.ffn(normed if self.ffn_norm is None else gather_tokens(self.ffn_norm(hidden.x)))
        mixed = match_tokens(checkpoint_name(mixed, "mixer_output"), hidden.x)
        fed = checkpoint_name(match_tokens(fed, hidden.x), "ffn_output")
        return hidden.add_residual(self.dropout(mixed, info, site=0) + self.dropout(fed, info, site=1), routing), state


def make_unnormalized_block(mixer_norm: AbstractNorm, **parts: Any) -> Block:
    """Make a `Block` whose mixer reads the residual stream as it is, for the first layer after a normalized
    embedding."""
    return Block(mixer_norm=IdentityNorm(), **parts)
