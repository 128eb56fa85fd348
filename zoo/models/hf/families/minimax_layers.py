"""Residual wiring of MiniMax-01."""

import dataclasses
from typing import Any

import equinox as eqx
import jax.numpy as jnp

from zoo.layers import AbstractFeedForward, AbstractMixer, AbstractNorm, Dropout, TokenInfo
from zoo.layers.abstract import run_feed_forward, run_mixer
from zoo.models.decoder import AbstractBlock, Hidden
from zoo.parallel import named_by_class


class NormedResidualBlock(AbstractBlock):
    """alpha n + beta mixer(n) with n = norm(x), then the same with ffn: the residual is what the norm returns, not what
    it reads (MiniMax-01, arXiv:2501.08313)."""

    mixer_norm: AbstractNorm
    mixer: AbstractMixer = named_by_class()
    ffn_norm: AbstractNorm
    ffn: AbstractFeedForward = named_by_class()
    dropout: Dropout

    mixer_factors: tuple[float, float] = eqx.field(static=True, default=(1.0, 1.0))
    """alpha and beta of the mixer."""
    ffn_factors: tuple[float, float] = eqx.field(static=True, default=(1.0, 1.0))
    """alpha and beta of the feed-forward layer."""

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> Any:
        return self.mixer.init_state(batch, length, dtype)

    def __call__(self, hidden: Hidden, info: TokenInfo, state: Any = None) -> tuple[Hidden, Any]:
        hidden = hidden.normalize(self.mixer_norm)
        mixed, state = run_mixer(self.mixer, hidden.x, info, state)
        hidden = _scale_and_add(hidden, self.mixer_factors, self.dropout(mixed, info, site=0)).normalize(self.ffn_norm)
        fed, routing = run_feed_forward(self.ffn, hidden.x)
        hidden = dataclasses.replace(hidden, decisions=hidden.decisions + routing)
        return _scale_and_add(hidden, self.ffn_factors, self.dropout(fed, info, site=1)), state


def _scale_and_add(hidden: Hidden, factors: tuple[float, float], added: Any) -> Hidden:
    """Return alpha x + beta added."""
    alpha, beta = factors
    return dataclasses.replace(hidden, x=alpha * hidden.x + beta * added)
