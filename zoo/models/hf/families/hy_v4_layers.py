"""Layer of Hy4: sparse latent attention and a feed-forward layer on residual streams that do not mix."""

import dataclasses
from typing import Any

from jax.ad_checkpoint import checkpoint_name

from zoo.layers import AbstractFeedForward, AbstractNorm, Dropout, SparseLatentAttention, TokenInfo
from zoo.layers.abstract import run_feed_forward
from zoo.models.decoder import AbstractMixerBlock, Hidden
from zoo.models.hyper_connections import IndependentHyperConnection
from zoo.parallel import named_by_class

from .glm_moe_dsa_layers import mix_selected


class StreamSelectionBlock(AbstractMixerBlock):
    """A `SelectionBlock` on residual streams, each sublayer with an `IndependentHyperConnection` (Hy4, Tencent,
    2026)."""

    extends_hidden = True

    mixer_connection: IndependentHyperConnection
    mixer_norm: AbstractNorm
    mixer: SparseLatentAttention = named_by_class()
    ffn_connection: IndependentHyperConnection
    ffn_norm: AbstractNorm
    ffn: AbstractFeedForward = named_by_class()
    dropout: Dropout

    def __call__(self, hidden: Hidden, info: TokenInfo, state: Any = None) -> tuple[Hidden, Any]:
        """**Raises** `ValueError` as `mix_selected` does."""
        read, post = self.mixer_connection.read(hidden.x)
        mixed, hidden, state = mix_selected(self.mixer, self.mixer_norm(read), hidden, info, state)
        x = self.mixer_connection.write(hidden.x, self.dropout(mixed, info, site=0), post)
        read, post = self.ffn_connection.read(x)
        fed, routing = run_feed_forward(self.ffn, self.ffn_norm(read))
        fed = checkpoint_name(fed, "ffn_output")
        x = self.ffn_connection.write(x, self.dropout(fed, info, site=1), post)
        return dataclasses.replace(hidden, x=x, decisions=hidden.decisions + routing), state
