"""Gated short convolution of BaseConv: a mixer whose output depends on the last few tokens only."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from zoo.parallel import Dim
from zoo.shapes import HiddenStates, ResidualStream

from ..abstract import AbstractLinear, AbstractMixer
from ..convolution import ConvState, ShortConvolution
from ..linear import Linear
from ..token_info import TokenInfo
from .context import RecurrenceContext


class GatedConvolution(AbstractMixer):
    """y = W_out ((W_gate x + b) * conv(W_in x)), the gated short convolution of BaseConv (Arora et al., "Zoology",
    arXiv:2312.04927, section 5) with input and output projections. In front of another mixer it shifts each key to the
    position of its value. Channels are sharded over `tensor`."""

    shards_sequence = True

    gate: AbstractLinear
    into: AbstractLinear
    convolution: ShortConvolution
    out: AbstractLinear

    def __init__(self, embed: int, *, conv_width: int = 3, out_scale: float = 1.0, key: Key[Array, ""]):
        """`conv_width`: tokens that the convolution spans, the present one included."""
        gate_key, in_key, conv_key, out_key = jax.random.split(key, 4)
        embed_dim = Dim("embed")
        channel_dim = Dim("inner")
        self.gate = Linear(embed, embed, in_=embed_dim, out=channel_dim, bias=True, key=gate_key)
        self.into = Linear(embed, embed, in_=embed_dim, out=channel_dim, key=in_key)
        self.convolution = ShortConvolution(embed, conv_width, features=channel_dim, bias=True, key=conv_key)
        self.out = Linear(embed, embed, in_=channel_dim, out=embed_dim, scale=out_scale, key=out_key)

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> ConvState:
        return self.convolution.init_state(batch, dtype)

    def __call__(
        self, x: HiddenStates, info: TokenInfo, state: ConvState | None = None
    ) -> tuple[ResidualStream, ConvState | None]:
        context = RecurrenceContext.from_info(x, info, state)
        mixed, state = self.convolution(self.into(x), context, state)
        return self.out(self.gate(x) * mixed), state
