"""Gated slot attention: linear attention to a few slots, which forget and take up keys and values."""

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from zoo.layers import AbstractLinear, Linear, RMSNorm
from zoo.layers.recurrent.base import AbstractRecurrence
from zoo.layers.recurrent.common import OutputGate, QKVProjections, RecurrentState
from zoo.layers.recurrent.context import RecurrenceContext
from zoo.ops.recurrence.gated_linear import GATED_LINEAR, gated_linear
from zoo.parallel import Dim, implementation_option
from zoo.shapes import HeadVectors, HiddenStates


class GatedSlotAttention(AbstractRecurrence):
    """y = W_out norm(silu(o)), o_t = V_tᵀ softmax(K_t q_t), with K_t = diag(a_t) K_{t-1} + (1 - a_t) k_tᵀ and V_t =
    diag(a_t) V_{t-1} + (1 - a_t) v_tᵀ: a row of K and V for each slot (GSA, Zhang et al., arXiv:2409.07146, section 3).
    Gates are log a = logsigmoid(W_forget x) / temperature, and v is silu(W_value x). The norm is over all heads
    together. Heads are sharded over `tensor`.

    Each of the two recurrences is gated linear attention. In the first, a slot is a head with a value of one number.
    """

    projections: QKVProjections
    forget: AbstractLinear
    readout: OutputGate

    slots: int = eqx.field(static=True)
    temperature: float = eqx.field(static=True)
    feature_map: Callable = eqx.field(static=True)
    """Applied to queries and keys."""
    implementation: str = implementation_option(GATED_LINEAR)

    def __init__(
        self,
        embed: int,
        heads: int,
        *,
        key_dim: int,
        value_dim: int,
        slots: int,
        kv_heads: int | None = None,
        conv_width: int | None = None,
        feature_map: Callable = jax.nn.silu,
        temperature: float = 8.0,
        epsilon: float = 1e-5,
        scaled: bool = True,
        out_scale: float = 1.0,
        implementation: str = "auto",
        key: Key[Array, ""],
    ):
        """`slots`: of each head. Other options are as in `zoo.layers.GatedLinearAttention`."""
        input_key, forget_key, out_key = jax.random.split(key, 3)
        options = {"kv_heads": kv_heads, "conv_width": conv_width, "activation": jax.nn.silu if conv_width else None}
        self.projections = QKVProjections(embed, heads, key_dim, value_dim, **options, key=input_key)
        dim = Dim("heads" if kv_heads is None else "kv_heads", slots)
        self.forget = Linear(embed, (kv_heads or heads) * slots, in_=Dim("embed"), out=dim, key=forget_key)
        features = {"features": Dim("heads", value_dim), "epsilon": epsilon, "scaled": scaled}
        norm = partial(RMSNorm, heads * value_dim, **features)
        options = {"norm": norm, "norm_over_heads": True, "out_scale": out_scale}
        self.readout = OutputGate(embed, heads, value_dim, **options, key=out_key)
        self.slots = slots
        self.temperature = float(temperature)
        self.feature_map = feature_map
        self.implementation = implementation

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> RecurrentState:
        """Return an empty state: the keys and values of the slots, side by side."""
        inputs = self.projections
        state = inputs.init_state(batch, dtype=dtype)
        size = inputs.key_dim + inputs.value_dim
        return RecurrentState(jnp.zeros((batch, state.matrix.shape[1], self.slots, size)), state.conv_states)

    def recur(self, x: HiddenStates, context: RecurrenceContext) -> tuple[HeadVectors, RecurrentState]:
        conv_states = None if context.state is None else context.state.conv_states
        query, key, value, conv_states = self.projections(x, context, conv_states)
        key_dim = key.shape[-1]
        log_decay = jax.nn.log_sigmoid(self.forget(x).astype(jnp.float32)) / self.temperature
        log_decay = self.projections.repeat(log_decay.reshape(*x.shape[:2], -1, self.slots), query)
        log_decay = context.mask_padding(log_decay)  # and what is written is 0
        written = -jnp.expm1(log_decay)
        keys = None
        values = None
        if context.state is not None:
            keys, values = jnp.split(context.state.matrix, [key_dim], axis=-1)
            keys = keys.reshape(len(x), -1, key_dim, 1)
        options = {"segment_ids": context.segment_ids, "implementation": context.implementation}
        scores, keys = gated_linear(
            self.feature_map(query),
            self.feature_map(key),
            written.reshape(*x.shape[:2], -1, 1).astype(value.dtype),
            log_decay.reshape(*x.shape[:2], -1),
            state=context.initial_state(keys),
            **options,
        )
        shares = jax.nn.softmax(scores.reshape(log_decay.shape).astype(jnp.float32), axis=-1).astype(value.dtype)
        written = written.astype(value.dtype)
        state = context.initial_state(values)
        mixed, values = gated_linear(shares, written, jax.nn.silu(value), log_decay, state=state, **options)
        keys = keys.reshape(*values.shape[:3], key_dim)
        return jax.nn.silu(mixed), RecurrentState(jnp.concatenate([keys, values], axis=-1), conv_states)
