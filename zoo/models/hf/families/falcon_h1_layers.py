"""Layers of Falcon-H1: attention and Mamba-2 side by side, and a gated MLP with multipliers."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Key

from zoo.layers import AbstractFeedForward, AbstractLinear, Attention, Linear, Mamba2, TokenInfo
from zoo.layers.abstract import AbstractMixer, mix_tokens
from zoo.layers.mlp import make_gated_projections
from zoo.ops.rotary import Rotary
from zoo.shapes import HiddenStates, ResidualStream

_Multipliers = tuple[float, float]


class SideBySide(AbstractMixer):
    """y = a_out attention(a_in x) + r_out recurrent(r_in x): two mixers read the same input, and their outputs are
    added (Falcon-H1, Zuo et al., arXiv:2507.22448, section 2.1). The factors belong to the mixer, and not to its
    matrices: what an adapter adds to a matrix is multiplied, too.

    Its state is a KV cache and a recurrent state. Where `context` shards new tokens, attention takes its shard, and the
    recurrence all of them (`zoo.layers.abstract.mix_tokens`).
    """

    shards_sequence = True
    shards_state = True

    attention: Attention
    recurrent: Mamba2

    attention_multipliers: _Multipliers = eqx.field(static=True)
    """Factors of the input and of the output."""
    recurrent_multipliers: _Multipliers = eqx.field(static=True)

    def __init__(
        self,
        attention: Callable[..., Attention],
        recurrent: Callable[..., Mamba2],
        *,
        attention_multipliers: _Multipliers = (1.0, 1.0),
        recurrent_multipliers: _Multipliers = (1.0, 1.0),
        key: Key[Array, ""],
    ):
        """`attention` and `recurrent` are factories, called with `key=`. Multipliers are those of input and output."""
        attention_key, recurrent_key = jax.random.split(key)
        self.attention = attention(key=attention_key)
        self.recurrent = recurrent(key=recurrent_key)
        self.attention_multipliers = attention_multipliers
        self.recurrent_multipliers = recurrent_multipliers

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> tuple[Any, Any]:
        return self.attention.init_state(batch, length, dtype), self.recurrent.init_state(batch, length, dtype)

    def __call__(
        self, x: HiddenStates, info: TokenInfo, state: tuple[Any, Any] | None = None
    ) -> tuple[ResidualStream, tuple[Any, Any] | None]:
        cache, recurrent_state = (None, None) if state is None else state
        before, after = self.attention_multipliers
        attended, cache = mix_tokens(self.attention, before * x, info, cache)
        mixed = after * attended
        before, after = self.recurrent_multipliers
        scanned, recurrent_state = mix_tokens(self.recurrent, before * x, info, recurrent_state)
        mixed = mixed + after * scanned
        if state is None:
            return mixed, None
        return mixed, (cache, recurrent_state)

    @property
    def rotary(self) -> Rotary | None:
        """RoPE of queries and keys."""
        return self.attention.rotary

    @property
    def rope_switch_length(self) -> int | None:
        return self.attention.rope_switch_length


class MultipliedMLP(AbstractFeedForward):
    """y = d W_down (activation(g W_gate x) * W_up x): a gated MLP with a multiplier of the gate and one of the output
    (Falcon-H1, arXiv:2507.22448, section 3.2)."""

    gate: AbstractLinear
    up: AbstractLinear
    down: AbstractLinear

    activation: Callable = eqx.field(static=True)
    gate_multiplier: float = eqx.field(static=True)
    down_multiplier: float = eqx.field(static=True)

    def __init__(
        self,
        embed: int,
        mlp: int,
        *,
        multipliers: _Multipliers = (1.0, 1.0),
        activation: Callable = jax.nn.silu,
        bias: bool = False,
        out_scale: float = 1.0,
        key: Key[Array, ""],
    ):
        """`multipliers`: of the gate and of the output."""
        self.gate, self.up, self.down = make_gated_projections(embed, mlp, Linear, bias, out_scale, key)
        self.activation = activation
        self.gate_multiplier, self.down_multiplier = multipliers

    def __call__(self, x: HiddenStates) -> tuple[ResidualStream, tuple[()]]:
        gate = self.activation(self.gate_multiplier * self.gate(x))
        hidden = checkpoint_name(gate * self.up(x), "mlp_hidden")
        return self.down_multiplier * self.down(hidden), ()
