"""Layers that share a selection of keys: some have an indexer, and the layers after them reuse its selection."""

from typing import Any

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool

from zoo.layers import AbstractFeedForward, AbstractNorm, Dropout, SparseLatentAttention, TokenInfo
from zoo.layers.abstract import run_feed_forward
from zoo.models.decoder import AbstractBlock, Hidden
from zoo.parallel import named_by_class
from zoo.parallel.tokens import run_on_all_tokens
from zoo.shapes import ResidualStream


class SelectionHidden(Hidden):
    """Hidden states with the selection of keys of the layer before."""

    selected: Bool[Array, "batch query_seq key_seq"] | None = None
    """Keys that each query attends to, of the sequence or of a KV cache; None if these are all."""


def mix_selected(
    mixer: SparseLatentAttention, x: ResidualStream, hidden: Hidden, info: TokenInfo, state: Any
) -> tuple[ResidualStream, SelectionHidden, Any]:
    """Attend to the keys that the layer itself selects, or else the layer before it: return the output, the hidden
    states with the selection, and the updated state.

    **Raises** `ValueError` for a layer without an indexer after one that has selected no keys: the first layer of a
    model or of a stage of a pipeline, or a layer on its own.
    """
    before = hidden.selected if isinstance(hidden, SelectionHidden) else None
    if mixer.indexer is None and not isinstance(hidden, SelectionHidden):
        raise ValueError(
            "this layer has no indexer, and no layer before it has selected keys: run the layers in their model, on a "
            "mesh with pipe=1, and let the first have an indexer"
        )
    mix = lambda x: mixer.mix(x, info, state, before)
    mixed, (state, selected) = run_on_all_tokens(mix, x)
    hidden = SelectionHidden(hidden.x, hidden.routing, hidden.decisions, selected)
    return checkpoint_name(mixed, "mixer_output"), hidden, state


class SelectionBlock(AbstractBlock):
    """The pre-norm layer `zoo.models.Block`, whose sparse attention takes the selection of keys of the layer before it,
    unless it has an indexer (Bai et al., arXiv:2603.12201; GLM-5, arXiv:2602.15763)."""

    extends_hidden = True

    mixer_norm: AbstractNorm
    mixer: SparseLatentAttention = named_by_class()
    ffn_norm: AbstractNorm
    ffn: AbstractFeedForward = named_by_class()
    dropout: Dropout

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> Any:
        return self.mixer.init_state(batch, length, dtype)

    def __call__(self, hidden: Hidden, info: TokenInfo, state: Any = None) -> tuple[Hidden, Any]:
        """**Raises** `ValueError` as `mix_selected` does."""
        mixed, hidden, state = mix_selected(self.mixer, self.mixer_norm(hidden.x), hidden, info, state)
        hidden = hidden.add_residual(self.dropout(mixed, info, site=0))
        fed, routing = run_feed_forward(self.ffn, self.ffn_norm(hidden.x))
        fed = checkpoint_name(fed, "ffn_output")
        return hidden.add_residual(self.dropout(fed, info, site=1), routing), state
