"""Layers of a decoder that attend to an encoded source between their mixer and their feed-forward layer."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
from jax.ad_checkpoint import checkpoint_name

from zoo.layers import AbstractFeedForward, AbstractMixer, AbstractNorm, Dropout, TokenInfo
from zoo.layers.abstract import run_feed_forward, run_mixer
from zoo.layers.attention.cross import CrossAttention, EncodedSource, SourceKeys
from zoo.parallel import named_by_class
from zoo.shapes import ResidualStream, Tokens

from .decoder import AbstractLayerInputs, AbstractMixerBlock, Hidden


class SourceHidden(Hidden):
    """Hidden states with the source that layers attend to."""

    constant_fields = ("source",)

    source: EncodedSource | None = None


class SourceInputs(AbstractLayerInputs):
    """Hand a source on to every layer."""

    source: EncodedSource

    def __call__(self, tokens: Tokens, x: ResidualStream) -> SourceHidden:
        return SourceHidden(x, source=self.source)


class AbstractCrossBlock(AbstractMixerBlock):
    """One layer with cross-attention. Its state is the state of its mixer and the `SourceKeys`."""

    cross: eqx.AbstractVar[CrossAttention]

    def split_state(self, hidden: Hidden, state: Any) -> tuple[Any, SourceKeys]:
        """Return the state of the mixer, and keys and values of the source: from the state, or computed here.

        **Raises** `ValueError` for hidden states without a source, as from a decoder of its own.
        """
        if state is not None:
            return state
        source = hidden.source if isinstance(hidden, SourceHidden) else None
        if source is None:
            raise ValueError(
                f"{type(self).__name__} attends to a source, and was given none: call the zoo.models.EncoderDecoder, "
                "or the decoder that its read(source) returns"
            )
        return None, self.cross.read(source)


class CrossBlock(AbstractCrossBlock):
    """x + mixer(norm(x)), then x + cross(norm(x), source), then x + ffn(norm(x)): `zoo.models.Block` with
    cross-attention (T5, Raffel et al., arXiv:1910.10683, section 2.1)."""

    mixer_norm: AbstractNorm
    mixer: AbstractMixer = named_by_class()
    cross_norm: AbstractNorm
    cross: CrossAttention = named_by_class()
    ffn_norm: AbstractNorm
    ffn: AbstractFeedForward = named_by_class()
    dropout: Dropout

    def __call__(self, hidden: Hidden, info: TokenInfo, state: Any = None) -> tuple[Hidden, Any]:
        own, keys = self.split_state(hidden, state)
        mixed, own = run_mixer(self.mixer, self.mixer_norm(hidden.x), info, own)
        hidden = hidden.add_residual(self.dropout(mixed, info, site=0))
        crossed, keys = run_mixer(self.cross, self.cross_norm(hidden.x), info, keys)
        hidden = hidden.add_residual(self.dropout(crossed, info, site=2))
        fed, routing = run_feed_forward(self.ffn, self.ffn_norm(hidden.x))
        fed = checkpoint_name(fed, "ffn_output")
        hidden = hidden.add_residual(self.dropout(fed, info, site=1), routing)
        return hidden, None if state is None else (own, keys)


class AddNormCrossBlock(AbstractCrossBlock):
    """norm(x + mixer(x)), then norm(x + cross(x, source)), then norm(x + ffn(x)): the decoder's layer of the original
    Transformer (Vaswani et al., arXiv:1706.03762, section 3.1) and of BART."""

    mixer_norm: AbstractNorm
    mixer: AbstractMixer = named_by_class()
    cross_norm: AbstractNorm
    cross: CrossAttention = named_by_class()
    ffn_norm: AbstractNorm
    ffn: AbstractFeedForward = named_by_class()
    dropout: Dropout

    def __call__(self, hidden: Hidden, info: TokenInfo, state: Any = None) -> tuple[Hidden, Any]:
        own, keys = self.split_state(hidden, state)
        mixed, own = run_mixer(self.mixer, hidden.x, info, own)
        hidden = hidden.add_residual(self.dropout(mixed, info, site=0)).normalize(self.mixer_norm)
        crossed, keys = run_mixer(self.cross, hidden.x, info, keys)
        hidden = hidden.add_residual(self.dropout(crossed, info, site=2)).normalize(self.cross_norm)
        fed, routing = run_feed_forward(self.ffn, hidden.x)
        fed = checkpoint_name(fed, "ffn_output")
        hidden = hidden.add_residual(self.dropout(fed, info, site=1), routing).normalize(self.ffn_norm)
        return hidden, None if state is None else (own, keys)


class SandwichCrossBlock(AbstractCrossBlock):
    """x + post_norm(mixer(norm(x))), then x + post_norm(cross(norm(x), source)), then x + post_norm(ffn(norm(x))):
    `zoo.models.blocks.SandwichBlock` with cross-attention (T5Gemma, arXiv:2504.06225)."""

    mixer_norm: AbstractNorm
    mixer: AbstractMixer = named_by_class()
    mixer_post_norm: AbstractNorm
    cross_norm: AbstractNorm
    cross: CrossAttention = named_by_class()
    cross_post_norm: AbstractNorm
    ffn_norm: AbstractNorm
    ffn: AbstractFeedForward = named_by_class()
    ffn_post_norm: AbstractNorm
    dropout: Dropout

    def __call__(self, hidden: Hidden, info: TokenInfo, state: Any = None) -> tuple[Hidden, Any]:
        own, keys = self.split_state(hidden, state)
        mixed, own = run_mixer(self.mixer, self.mixer_norm(hidden.x), info, own)
        hidden = hidden.add_residual(self.dropout(self.mixer_post_norm(mixed), info, site=0))
        crossed, keys = run_mixer(self.cross, self.cross_norm(hidden.x), info, keys)
        hidden = hidden.add_residual(self.dropout(self.cross_post_norm(crossed), info, site=2))
        fed, routing = run_feed_forward(self.ffn, self.ffn_norm(hidden.x))
        hidden = hidden.add_residual(self.dropout(self.ffn_post_norm(fed), info, site=1), routing)
        return hidden, None if state is None else (own, keys)


def make_cross_block(
    block: Callable[..., AbstractCrossBlock], norm: Callable[[], AbstractNorm]
) -> Callable[..., AbstractCrossBlock]:
    """Return a factory of a block of this class whose norm of cross-attention is made by `norm`."""
    return lambda **parts: block(cross_norm=norm(), **parts)
