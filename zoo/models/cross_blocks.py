"""Layers of a decoder that attend to an encoded source between their mixer and their feed-forward layer."""

from collections.abc import Callable
from typing import Any

from jax.ad_checkpoint import checkpoint_name

from zoo.layers import AbstractFeedForward, AbstractMixer, AbstractNorm, Dropout, TokenInfo
from zoo.layers.abstract import run_feed_forward, run_mixer
from zoo.layers.attention.cross import CrossAttention, EncodedSource, SourceKeys
from zoo.parallel import named_by_class
from zoo.shapes import HiddenStates, ResidualStream, Tokens

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


class CrossBlock(AbstractMixerBlock):
    """x + mixer(norm(x)), then x + cross(norm(x), source), then x + ffn(norm(x)): `zoo.models.Block` with
    cross-attention (T5, Raffel et al., arXiv:1910.10683, section 2.1).

    Its state is the state of its mixer and the `SourceKeys`. Subclasses place the norms elsewhere.
    """

    mixer_norm: AbstractNorm
    mixer: AbstractMixer = named_by_class()
    cross_norm: AbstractNorm
    cross: CrossAttention = named_by_class()
    ffn_norm: AbstractNorm
    ffn: AbstractFeedForward = named_by_class()
    dropout: Dropout

    def __call__(self, hidden: Hidden, info: TokenInfo, state: Any = None) -> tuple[Hidden, Any]:
        own, keys = self._split_state(hidden, state)
        mixed, own = run_mixer(self.mixer, self._prepare("mixer", hidden), info, own)
        hidden = self._add("mixer", hidden, mixed, info)
        crossed, keys = run_mixer(self.cross, self._prepare("cross", hidden), info, keys)
        hidden = self._add("cross", hidden, crossed, info)
        fed, routing = run_feed_forward(self.ffn, self._prepare("ffn", hidden))
        hidden = self._add("ffn", hidden, checkpoint_name(fed, "ffn_output"), info, routing)
        return hidden, None if state is None else (own, keys)

    def _prepare(self, name: str, hidden: Hidden) -> HiddenStates:
        """Return the input of a sublayer: `mixer`, `cross` or `ffn`."""
        return getattr(self, f"{name}_norm")(hidden.x)

    def _add(self, name: str, hidden: Hidden, y: ResidualStream, info: TokenInfo, routing: Any = ()) -> Hidden:
        """Add the output of a sublayer to the residual stream."""
        return hidden.add_residual(self.dropout(y, info, site=_SITES[name]), routing)

    def _split_state(self, hidden: Hidden, state: Any) -> tuple[Any, SourceKeys]:
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


_SITES = {"mixer": 0, "ffn": 1, "cross": 2}
"""Sites of dropout, of which other blocks have the first two."""


class AddNormCrossBlock(CrossBlock):
    """norm(x + mixer(x)), then norm(x + cross(x, source)), then norm(x + ffn(x)): the decoder's layer of the original
    Transformer (Vaswani et al., arXiv:1706.03762, section 3.1) and of BART."""

    def _prepare(self, name: str, hidden: Hidden) -> HiddenStates:
        return hidden.x

    def _add(self, name: str, hidden: Hidden, y: ResidualStream, info: TokenInfo, routing: Any = ()) -> Hidden:
        return super()._add(name, hidden, y, info, routing).normalize(getattr(self, f"{name}_norm"))


class SandwichCrossBlock(CrossBlock):
    """x + post_norm(mixer(norm(x))), then x + post_norm(cross(norm(x), source)), then x + post_norm(ffn(norm(x))):
    `zoo.models.blocks.SandwichBlock` with cross-attention (T5Gemma, arXiv:2504.06225)."""

    mixer_post_norm: AbstractNorm
    cross_post_norm: AbstractNorm
    ffn_post_norm: AbstractNorm

    def _add(self, name: str, hidden: Hidden, y: ResidualStream, info: TokenInfo, routing: Any = ()) -> Hidden:
        return super()._add(name, hidden, getattr(self, f"{name}_post_norm")(y), info, routing)


def make_cross_block(block: Callable[..., CrossBlock], norm: Callable[[], AbstractNorm]) -> Callable[..., CrossBlock]:
    """Return a factory of a block of this class whose norm of cross-attention is made by `norm`."""
    return lambda **parts: block(cross_norm=norm(), **parts)
