"""Short convolution of LFM2, gated before and after."""

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


class DoubleGatedConvolution(AbstractMixer):
    """y = W_out (W_C x * conv(W_B x * W_in x)): a short convolution whose inputs and outputs are gated, without an
    activation (LFM2, Liquid AI, arXiv:2511.23404, section 2). Channels are sharded over `tensor`."""

    shards_sequence = True

    input_gate: AbstractLinear
    output_gate: AbstractLinear
    into: AbstractLinear
    convolution: ShortConvolution
    out: AbstractLinear

    def __init__(
        self, embed: int, *, conv_width: int = 3, bias: bool = False, out_scale: float = 1.0, key: Key[Array, ""]
    ):
        """- `conv_width`: tokens that the convolution spans, the present one included.
        - `bias`: of all projections and of the convolution.
        """
        input_key, output_key, in_key, conv_key, out_key = jax.random.split(key, 5)
        embed_dim = Dim("embed")
        channel_dim = Dim("inner")
        self.input_gate, self.output_gate, self.into = (
            Linear(embed, embed, in_=embed_dim, out=channel_dim, bias=bias, key=linear_key)
            for linear_key in (input_key, output_key, in_key)
        )
        self.convolution = ShortConvolution(embed, conv_width, features=channel_dim, bias=bias, key=conv_key)
        self.out = Linear(embed, embed, in_=channel_dim, out=embed_dim, bias=bias, scale=out_scale, key=out_key)

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> ConvState:
        return self.convolution.init_state(batch, dtype)

    def __call__(
        self, x: HiddenStates, info: TokenInfo, state: ConvState | None = None
    ) -> tuple[ResidualStream, ConvState | None]:
        context = RecurrenceContext.from_info(x, info, state)
        gated = context.mask_padding(self.input_gate(x) * self.into(x))  # with biases, padding would enter the state
        mixed, state = self.convolution(gated, context, state)
        return self.out(self.output_gate(x) * mixed), state
