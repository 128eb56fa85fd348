"""Layers of RWKV besides its time mixing: channel mixing, and the layer of both."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from zoo.layers import AbstractLinear, AbstractMixer, AbstractNorm, Dropout, Linear, TokenInfo
from zoo.layers.abstract import run_mixer
from zoo.layers.convolution import ConvState, init_token_shift, token_shift
from zoo.layers.recurrent.context import RecurrenceContext
from zoo.layers.recurrent.rwkv4 import mix_with_previous
from zoo.layers.recurrent.token_shift import TokenShift
from zoo.models.decoder import AbstractBlock, Hidden
from zoo.ops.activations import relu_squared
from zoo.parallel import Dim, named_by_class
from zoo.parallel.tokens import match_tokens
from zoo.shapes import HiddenStates, ResidualStream


class RWKV4ChannelMixing(AbstractMixer):
    """RWKV-4 channel mixing (arXiv:2305.13048, section 3.1): sigmoid(W_r mix_r(x)) * W_v relu(W_k mix_k(x))², with the
    token shift of `zoo.layers.RWKV4`. It replaces the feed-forward layer; its state is one token."""

    shards_sequence = True

    receptance: AbstractLinear
    key: AbstractLinear
    value: AbstractLinear
    receptance_mix: Float[Array, "embed"]
    key_mix: Float[Array, "embed"]

    def __init__(self, embed: int, mlp: int, *, out_scale: float = 1.0, key: Key[Array, ""]):
        """`mlp`: hidden size. Mixing weights are initialized as in `zoo.layers.RWKV4`."""
        keys = jax.random.split(key, 3)
        embed_dim = Dim("embed")
        mlp_dim = Dim("mlp")
        self.receptance = Linear(embed, embed, in_=embed_dim, out=Dim("features"), key=keys[0])
        self.key = Linear(embed, mlp, in_=embed_dim, out=mlp_dim, key=keys[1])
        self.value = Linear(mlp, embed, in_=mlp_dim, out=embed_dim, scale=out_scale, key=keys[2])
        self.receptance_mix, self.key_mix = (jnp.linspace(0, 1, embed, dtype=jnp.float32) for _ in range(2))

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> ConvState:
        return init_token_shift(batch, self.key_mix.shape[0], dtype)

    def __call__(
        self, x: HiddenStates, info: TokenInfo, state: ConvState | None = None
    ) -> tuple[ResidualStream, ConvState | None]:
        previous, shift_state = token_shift(x, RecurrenceContext.from_info(x, info, state), state)
        value = self.value(relu_squared(self.key(mix_with_previous(self.key_mix, x, previous))))
        mixed = match_tokens(mix_with_previous(self.receptance_mix, x, previous), value)
        return jax.nn.sigmoid(self.receptance(mixed)) * value, shift_state


class RWKVChannelMixing(AbstractMixer):
    """Channel mixing of RWKV-7, W_v relu(W_k x_k)² (arXiv:2503.14456, section 4.3), and with a receptance of RWKV-6,
    sigmoid(W_r x_r) * W_v relu(W_k x_k)² (arXiv:2404.05892, section 4.1), of x after a token shift."""

    shards_sequence = True

    key: AbstractLinear
    key_shift: TokenShift
    value: AbstractLinear
    receptance: AbstractLinear | None
    receptance_shift: TokenShift | None

    def __init__(self, embed: int, mlp: int, *, receptance: bool = False, out_scale: float = 1.0, key: Key[Array, ""]):
        """`mlp`: hidden size."""
        keys = jax.random.split(key, 3)
        embed_dim = Dim("embed")
        mlp_dim = Dim("mlp")
        self.key = Linear(embed, mlp, in_=embed_dim, out=mlp_dim, key=keys[0])
        self.key_shift = TokenShift(embed)
        self.value = Linear(mlp, embed, in_=mlp_dim, out=embed_dim, scale=out_scale, key=keys[1])
        self.receptance = None
        self.receptance_shift = None
        if receptance:
            self.receptance = Linear(embed, embed, in_=embed_dim, out=Dim("features"), key=keys[2])
            self.receptance_shift = TokenShift(embed)

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> ConvState:
        return init_token_shift(batch, self.key_shift.weight.shape[0], dtype)

    def __call__(
        self, x: HiddenStates, info: TokenInfo, state: ConvState | None = None
    ) -> tuple[ResidualStream, ConvState | None]:
        previous, state = token_shift(x, RecurrenceContext.from_info(x, info, state), state)
        delta = previous - x
        y = self.value(relu_squared(self.key(self.key_shift(x, delta))))
        if self.receptance is not None and self.receptance_shift is not None:
            y = jax.nn.sigmoid(self.receptance(match_tokens(self.receptance_shift(x, delta), y))) * y
        return y, state


class TwoMixerBlock(AbstractBlock):
    """x + mixer(norm(x)), then x + ffn(norm(x)) where `ffn` is a mixer too: the layer of RWKV, whose channel mixing
    shifts tokens (arXiv:2305.13048, figure 2). Its state is a pair, one of each. The first layer of RWKV-6 begins with
    a norm of x.

    Outputs are multiplied by `residual_multiplier`, and the sum by `shrink`: powers of 2 keep the stream of RWKV-4
    small in float16 (`rescale_every` of transformers), which the norms undo but for their epsilon.
    """

    mixer_norm: AbstractNorm
    mixer: AbstractMixer = named_by_class()
    ffn_norm: AbstractNorm
    ffn: AbstractMixer = named_by_class()
    dropout: Dropout
    pre_norm: AbstractNorm | None = None

    residual_multiplier: float = eqx.field(static=True, default=1.0)
    shrink: float = eqx.field(static=True, default=1.0)

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> tuple[Any, Any]:
        return self.mixer.init_state(batch, length, dtype), self.ffn.init_state(batch, length, dtype)

    def __call__(self, hidden: Hidden, info: TokenInfo, state: Any = None) -> tuple[Hidden, Any]:
        if self.pre_norm is not None:
            hidden = hidden.normalize(self.pre_norm)
        mixer_state, ffn_state = (None, None) if state is None else state
        mixed, mixer_state = run_mixer(self.mixer, self.mixer_norm(hidden.x), info, mixer_state)
        hidden = hidden.add_residual(self._scale(self.residual_multiplier, self.dropout(mixed, info, site=0)))
        fed, ffn_state = run_mixer(self.ffn, self.ffn_norm(hidden.x), info, ffn_state)
        hidden = hidden.add_residual(self._scale(self.residual_multiplier, self.dropout(fed, info, site=1)))
        hidden = dataclasses.replace(hidden, x=self._scale(self.shrink, hidden.x))
        return hidden, None if state is None else (mixer_state, ffn_state)

    @staticmethod
    def _scale(multiplier: float, x: ResidualStream) -> ResidualStream:
        return x if multiplier == 1 else multiplier * x
