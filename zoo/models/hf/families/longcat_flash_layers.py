"""Layer of LongCat-Flash: two attentions, two MLPs, and a mixture of experts across the second half."""

from typing import Any

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from zoo.layers import AbstractNorm, Dropout, LatentAttention, TokenInfo
from zoo.layers.abstract import AbstractFeedForward, run_mixer
from zoo.layers.moe.mixture import MixtureOfExperts
from zoo.models.decoder import AbstractBlock, Block, Hidden
from zoo.parallel import named_by_class
from zoo.parallel.tokens import gather_tokens, match_tokens


class ShortcutBlock(AbstractBlock):
    """Two pre-norm layers, and a mixture of experts from the middle of the first to the end of the second (ScMoE,
    LongCat-Flash, arXiv:2509.01322, section 2.2):

        h = x + mixer(norm(x)),    n = norm(h)
        y = second(h + ffn(n)) + mixture(n)

    Nothing in `second` depends on the mixture, whose tokens may travel meanwhile. The state holds the states of both
    mixers.
    """

    mixer_norm: AbstractNorm
    mixer: LatentAttention = named_by_class()
    ffn_norm: AbstractNorm
    ffn: AbstractFeedForward = named_by_class()
    mixture: MixtureOfExperts
    second: Block
    dropout: Dropout

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> tuple[Any, Any]:
        return self.mixer.init_state(batch, length, dtype), self.second.init_state(batch, length, dtype)

    def __call__(self, hidden: Hidden, info: TokenInfo, state: Any = None) -> tuple[Hidden, Any]:
        cache, second_cache = (None, None) if state is None else state
        mixed, cache = run_mixer(self.mixer, self.mixer_norm(hidden.x), info, cache)
        hidden = hidden.add_residual(self.dropout(mixed, info, site=2))  # the second layer has sites 0 and 1
        normed = gather_tokens(self.ffn_norm(hidden.x))  # once: the gradient of each gather is a reduce-scatter
        shortcut, routing = self.mixture(normed)
        shortcut = match_tokens(checkpoint_name(shortcut, "ffn_output"), hidden.x)
        fed, _ = self.ffn(normed)
        fed = match_tokens(checkpoint_name(fed, "ffn_output"), hidden.x)
        hidden = hidden.add_residual(self.dropout(fed, info, site=3))
        hidden, second_cache = self.second(hidden, info, second_cache)
        hidden = hidden.add_residual(self.dropout(shortcut, info, site=4), routing)
        return hidden, None if state is None else (cache, second_cache)
