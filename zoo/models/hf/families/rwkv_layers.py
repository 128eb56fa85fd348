"""Layers of RWKV besides its time mixing: channel mixing, and the layer of both."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Key

from zoo.layers import RWKV7, AbstractLinear, AbstractMixer, AbstractNorm, Dropout, Linear, TokenInfo
from zoo.layers.abstract import run_mixer
from zoo.layers.convolution import ConvState, init_token_shift, token_shift
from zoo.layers.recurrent.context import RecurrenceContext
from zoo.layers.recurrent.rwkv4 import mix_with_previous
from zoo.models.decoder import AbstractBlock, AbstractLayerInputs, Hidden
from zoo.ops.activations import relu_squared
from zoo.parallel import Dim, named_by_class
from zoo.parallel.tokens import match_tokens, run_on_all_tokens
from zoo.shapes import HiddenStates, ResidualStream, Tokens, Values


class RWKVChannelMixing(AbstractMixer):
    """RWKV's channel mixing (arXiv:2305.13048, section 3.1): sigmoid(W_r mix_r(x)) * W_v relu(W_k mix_k(x))², with the
    token shift of `zoo.layers.RWKV4`. It replaces the feed-forward layer; its state is one token.

    In RWKV-6 a mixing weight multiplies the token before (arXiv:2404.05892, section 4.1), and RWKV-7 has no sigmoid
    (arXiv:2503.14456, section 4).
    """

    shards_sequence = True

    receptance: AbstractLinear | None
    key: AbstractLinear
    value: AbstractLinear
    receptance_mix: Float[Array, "embed"] | None
    key_mix: Float[Array, "embed"]

    weighs_previous: bool = eqx.field(static=True)

    def __init__(
        self,
        embed: int,
        mlp: int,
        *,
        receptance: bool = True,
        weighs_previous: bool = False,
        out_scale: float = 1.0,
        key: Key[Array, ""],
    ):
        """- `mlp`: hidden size. Mixing weights are initialized as in `zoo.layers.RWKV4`.
        - `receptance`: multiply by the sigmoid. `weighs_previous`: a mixing weight multiplies the token before.
        """
        keys = jax.random.split(key, 3)
        embed_dim = Dim("embed")
        mlp_dim = Dim("mlp")
        self.receptance = None
        self.receptance_mix = None
        self.key = Linear(embed, mlp, in_=embed_dim, out=mlp_dim, key=keys[1])
        self.value = Linear(mlp, embed, in_=mlp_dim, out=embed_dim, scale=out_scale, key=keys[2])
        self.key_mix = jnp.linspace(0, 1, embed, dtype=jnp.float32)
        if receptance:
            self.receptance = Linear(embed, embed, in_=embed_dim, out=Dim("features"), key=keys[0])
            self.receptance_mix = self.key_mix + 0
        self.weighs_previous = weighs_previous

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> ConvState:
        return init_token_shift(batch, self.key_mix.shape[0], dtype)

    def __call__(
        self, x: HiddenStates, info: TokenInfo, state: ConvState | None = None
    ) -> tuple[ResidualStream, ConvState | None]:
        previous, shift_state = token_shift(x, RecurrenceContext.from_info(x, info, state), state)
        if self.weighs_previous:
            x, previous = previous, x
        value = self.value(relu_squared(self.key(mix_with_previous(self.key_mix, x, previous))))
        if self.receptance is None or self.receptance_mix is None:
            return value, shift_state
        mixed = match_tokens(mix_with_previous(self.receptance_mix, x, previous), value)
        return jax.nn.sigmoid(self.receptance(mixed)) * value, shift_state


class FirstValueHidden(Hidden):
    """Hidden states with the values of the first layer, which RWKV-7 reads in all others."""

    constant_fields = ("first_value",)

    first_value: Values | None = None


class FirstValueInputs(AbstractLayerInputs):
    """Make room for the values of the first layer, which has a segment of its own."""

    def __call__(self, tokens: Tokens, x: ResidualStream) -> FirstValueHidden:
        return FirstValueHidden(x)


class TwoMixerBlock(AbstractBlock):
    """x + mixer(norm(x)), then x + ffn(norm(x)) where `ffn` is a mixer too: the layer of RWKV, whose channel mixing
    shifts tokens (arXiv:2305.13048, figure 2). Its state is a pair, one of each. The first layer of RWKV-6 and RWKV-7
    may begin with a norm of x.

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
        normed = self.mixer_norm(hidden.x)
        if isinstance(self.mixer, RWKV7) and isinstance(hidden, FirstValueHidden):
            value = hidden.first_value
            mixed, (mixer_state, value) = run_on_all_tokens(self.mixer.mix, normed, info, mixer_state, value)
            mixed = checkpoint_name(mixed, "mixer_output")
            hidden = dataclasses.replace(hidden, first_value=value)
        else:
            mixed, mixer_state = run_mixer(self.mixer, normed, info, mixer_state)
        hidden = hidden.add_residual(self._scale(self.residual_multiplier, self.dropout(mixed, info, site=0)))
        fed, ffn_state = run_mixer(self.ffn, self.ffn_norm(hidden.x), info, ffn_state)
        hidden = hidden.add_residual(self._scale(self.residual_multiplier, self.dropout(fed, info, site=1)))
        hidden = dataclasses.replace(hidden, x=self._scale(self.shrink, hidden.x))
        return hidden, None if state is None else (mixer_state, ffn_state)

    @staticmethod
    def _scale(multiplier: float, x: ResidualStream) -> ResidualStream:
        return x if multiplier == 1 else multiplier * x
