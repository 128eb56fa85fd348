"""Layers that read one table of relative positions, which the encoder hands from layer to layer."""

from typing import Any

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from zoo.layers import AbstractFeedForward, AbstractNorm, DisentangledAttention, Dropout, TokenInfo
from zoo.layers.abstract import run_feed_forward
from zoo.parallel import named_by_class
from zoo.parallel.tokens import run_on_all_tokens

from ..decoder import AbstractBlock, Hidden


class RelativeHidden(Hidden):
    """Hidden states with the vectors of relative positions, which layers read but do not change."""

    table: Float[Array, "distances embed"] | None = None


class RelativeBlock(AbstractBlock):
    """norm(x + mixer(x, table)), then norm(x + ffn(x)): `zoo.models.AddNormBlock` with attention that reads the table
    of relative positions (DeBERTa; He et al., arXiv:2006.03654)."""

    mixer_norm: AbstractNorm
    mixer: DisentangledAttention = named_by_class()
    ffn_norm: AbstractNorm
    ffn: AbstractFeedForward = named_by_class()
    dropout: Dropout

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> Any:
        return self.mixer.init_state(batch, length, dtype)

    def __call__(self, hidden: Hidden, info: TokenInfo, state: Any = None) -> tuple[Hidden, Any]:
        """**Raises** `ValueError` for hidden states without a table: a layer on its own."""
        table = hidden.table if isinstance(hidden, RelativeHidden) else None
        if table is None:
            raise ValueError(
                "this layer reads a table of relative positions, and the hidden states have none: run the layers in "
                "their zoo.models.Encoder, on a mesh with pipe=1"
            )
        mixed, _ = run_on_all_tokens(lambda x: self.mixer.mix(x, info, table), hidden.x)
        mixed = checkpoint_name(mixed, "mixer_output")
        hidden = hidden.add_residual(self.dropout(mixed, info, site=0)).normalize(self.mixer_norm)
        fed, routing = run_feed_forward(self.ffn, hidden.x)
        fed = checkpoint_name(fed, "ffn_output")
        return hidden.add_residual(self.dropout(fed, info, site=1), routing).normalize(self.ffn_norm), state
