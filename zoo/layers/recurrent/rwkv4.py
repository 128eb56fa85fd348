"""RWKV-4: time mixing with token shift. The recurrence is `zoo.ops.recurrence.rwkv4`."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from zoo.ops.recurrence.rwkv4 import WKV, WKVState, rwkv4
from zoo.ops.recurrence.stabilizer import NO_HISTORY
from zoo.parallel import Dim, Module, full_precision, implementation_option
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
            self.key(mix_with_previous(self.key_mix, x, previous)),
            self.value(mix_with_previous(self.value_mix, x, previous)),
            self.decay,
            self.bonus,
            state=context.initial_state(sums),
            segment_ids=context.segment_ids,
            token_mask=context.token_mask,
            implementation=context.implementation,
        )
        receptance = jax.nn.sigmoid(self.receptance(mix_with_previous(self.receptance_mix, x, previous)))
        return self.out(receptance * mixed), None if shift_state is None else RWKV4State(*sums, shift_state)


def mix_with_previous(mix: Float[Array, "embed"], x: HiddenStates, previous: HiddenStates) -> HiddenStates:
    """Return mix x + (1 - mix) previous."""
    return previous + mix.astype(x.dtype) * (x - previous)
