"""RWKV-4: time mixing and channel mixing, both with token shift. The recurrence is `zoo.ops.recurrence.rwkv4`."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from zoo.ops.activations import relu_squared
from zoo.ops.recurrence.rwkv4 import WKV, WKVState, rwkv4
from zoo.ops.recurrence.stabilizer import NO_HISTORY
from zoo.parallel import Dim, Module, full_precision, implementation_option
from zoo.parallel.tokens import match_tokens
from zoo.shapes import HiddenStates, ResidualStream

from ..abstract import AbstractLinear, AbstractMixer
from ..convolution import ConvState, init_token_shift, token_shift
from ..linear import Linear
from ..token_info import TokenInfo
from .context import RecurrenceContext


class RWKV4State(Module):
    """Recurrent state of time mixing: the numerator and denominator of each channel, in float32 and scaled by
    exp(-maximum), and the last input."""

    numerator: Float[Array, "batch inner"]
    denominator: Float[Array, "batch inner"]
    maximum: Float[Array, "batch inner"]
    shift_state: ConvState


class RWKV4(AbstractMixer):
    """RWKV-4 time mixing (Peng et al., arXiv:2305.13048, section 3.1):

        r, k, v = W_r mix_r(x), W_k mix_k(x), W_v mix_v(x),    mix(x)_t = mix x_t + (1 - mix) x_{t-1}
        y = W_out (sigmoid(r) * wkv(k, v))

    wkv is the mean of values weighted by exp(k), with a decay of exp(-exp(decay)) per token and a bonus for the current
    one. Decay and bonus keep their dtype under `cast`; the sums are float32. Channels are sharded over `tensor`.
    """

    shards_sequence = True

    receptance: AbstractLinear
    key: AbstractLinear
    value: AbstractLinear
    out: AbstractLinear
    receptance_mix: Float[Array, "embed"]
    key_mix: Float[Array, "embed"]
    value_mix: Float[Array, "embed"]
    decay: Float[Array, "inner"] = full_precision()
    bonus: Float[Array, "inner"] = full_precision()

    implementation: str = implementation_option(WKV)

    def __init__(
        self,
        embed: int,
        *,
        inner: int | None = None,
        out_scale: float = 1.0,
        implementation: str = "auto",
        key: Key[Array, ""],
    ):
        """`inner`: number of channels, `embed` by default.

        `decay` is initialized to -5, ..., 3 over channels, mixing weights to 0, ..., 1 over features, and the bonus to
        values around log 0.3 (appendix E, for the first layer).

        **Raises** `ValueError` for a size below 1.
        """
        if inner is None:
            inner = embed
        if inner < 1:
            raise ValueError(f"inner is {inner}, and a size is at least 1")
        keys = jax.random.split(key, 4)
        embed_dim = Dim("embed")
        channel_dim = Dim("inner")
        project = partial(Linear, embed, inner, in_=embed_dim, out=channel_dim)
        self.receptance, self.key, self.value = (project(key=key) for key in keys[:3])
        self.out = Linear(inner, embed, in_=channel_dim, out=embed_dim, scale=out_scale, key=keys[3])
        mix = jnp.linspace(0, 1, embed, dtype=jnp.float32)
        self.key_mix, self.value_mix, self.receptance_mix = (mix**n for n in (1, 1, 0.5))
        ratio = jnp.arange(inner, dtype=jnp.float32) / max(inner - 1, 1)
        self.decay = -5 + 8 * ratio**0.7
        self.bonus = jnp.log(0.3) + 0.5 * ((jnp.arange(inner, dtype=jnp.float32) + 1) % 3 - 1)
        self.implementation = implementation

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> RWKV4State:
        shape = (batch, self.decay.shape[0])
        numerator, denominator = (jnp.zeros(shape, jnp.float32) for _ in range(2))  # donated separately
        maximum = jnp.full(shape, NO_HISTORY, jnp.float32)
        return RWKV4State(numerator, denominator, maximum, init_token_shift(batch, self.key_mix.shape[0], dtype))

    def __call__(
        self, x: HiddenStates, info: TokenInfo, state: RWKV4State | None = None
    ) -> tuple[ResidualStream, RWKV4State | None]:
        """With a `state`, tokens continue the sequence that it summarizes."""
        context = RecurrenceContext.from_info(x, info, state, self.implementation)
        previous, shift_state = token_shift(x, context, None if state is None else state.shift_state)
        if state is None:
            sums = None
        else:
            sums = WKVState(state.numerator, state.denominator, state.maximum)
        mixed, sums = rwkv4(
            self.key(_lerp(self.key_mix, x, previous)),
            self.value(_lerp(self.value_mix, x, previous)),
            self.decay,
            self.bonus,
            state=context.initial_state(sums),
            segment_ids=context.segment_ids,
            token_mask=context.token_mask,
            implementation=context.implementation,
        )
        receptance = jax.nn.sigmoid(self.receptance(_lerp(self.receptance_mix, x, previous)))
        return self.out(receptance * mixed), None if shift_state is None else RWKV4State(*sums, shift_state)


class RWKV4ChannelMixing(AbstractMixer):
    """RWKV-4 channel mixing (arXiv:2305.13048, section 3.1): sigmoid(W_r mix_r(x)) * W_v relu(W_k mix_k(x))², with the
    token shift of `RWKV4`. It replaces the feed-forward layer; its state is one token."""

    shards_sequence = True

    receptance: AbstractLinear
    key: AbstractLinear
    value: AbstractLinear
    receptance_mix: Float[Array, "embed"]
    key_mix: Float[Array, "embed"]

    def __init__(self, embed: int, mlp: int, *, out_scale: float = 1.0, key: Key[Array, ""]):
        """`mlp`: hidden size. Mixing weights are initialized as in `RWKV4`."""
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
        value = self.value(relu_squared(self.key(_lerp(self.key_mix, x, previous))))
        mixed = match_tokens(_lerp(self.receptance_mix, x, previous), value)
        return jax.nn.sigmoid(self.receptance(mixed)) * value, shift_state


def _lerp(mix: Float[Array, "embed"], x: HiddenStates, previous: HiddenStates) -> HiddenStates:
    """Return mix x + (1 - mix) previous."""
    return previous + mix.astype(x.dtype) * (x - previous)
