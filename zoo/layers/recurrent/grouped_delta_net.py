"""Gated DeltaNet in which several heads share the queries and keys of a group, as in Qwen3-Next and Qwen3.5."""

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from zoo.ops.recurrence.delta_rule import DELTA_RULE, gated_delta_rule
from zoo.parallel import Dim, implementation_option
from zoo.shapes import HiddenStates, ResidualStream

from ..abstract import AbstractLinear, AbstractMixer
from ..convolution import ConvState, ShortConvolution
from ..heads import select_kv_heads
from ..linear import Linear
from ..norm import RMSNorm
from ..token_info import TokenInfo
from .common import DecayGate, OutputGate, RecurrentState, l2_normalize
from .context import RecurrenceContext


class GroupedGatedDeltaNet(AbstractMixer):
    """`zoo.layers.GatedDeltaNet` with `groups` of queries and keys, each for `heads / groups` heads that follow one
    another: values, decays, betas and gates are per head (Gated DeltaNet, Yang et al., arXiv:2412.06464; Qwen3-Next,
    Qwen team, 2025).

    Heads and groups are sharded over `tensor`. With fewer groups than devices on that axis, queries and keys are
    replicated and each device selects the groups of its heads.
    """

    shards_sequence = True

    query: AbstractLinear
    key: AbstractLinear
    value: AbstractLinear
    query_convolution: ShortConvolution
    key_convolution: ShortConvolution
    value_convolution: ShortConvolution
    rate: AbstractLinear
    decay: DecayGate
    readout: OutputGate

    key_dim: int = eqx.field(static=True)
    value_dim: int = eqx.field(static=True)
    group: int = eqx.field(static=True)
    """Heads per group."""
    activation: Callable = eqx.field(static=True)
    max_beta: float = eqx.field(static=True)
    """1, or 2 with negative eigenvalues."""
    implementation: str = implementation_option(DELTA_RULE)

    def __init__(
        self,
        embed: int,
        heads: int,
        *,
        groups: int = 1,
        key_dim: int = 128,
        value_dim: int = 128,
        conv_width: int = 4,
        activation: Callable = jax.nn.silu,
        gate_activation: Callable = jax.nn.silu,
        negative_eigenvalues: bool = False,
        epsilon: float | int = 1e-6,
        out_scale: float = 1.0,
        implementation: str = "auto",
        key: Key[Array, ""],
    ):
        """- `activation`: of queries, keys and values, after their convolutions. `gate_activation`: of the output gate.
        - `negative_eigenvalues`: allow beta up to 2 (Grazzi et al., arXiv:2411.12537).
        - `epsilon`: of the norm of each head's output.

        **Raises** `ValueError` for a size below 1, and if `groups` does not divide `heads`.
        """
        sizes = {"heads": heads, "groups": groups, "key_dim": key_dim, "value_dim": value_dim}
        if wrong := [name for name, size in sizes.items() if size < 1]:
            raise ValueError(f"{wrong[0]} is {sizes[wrong[0]]}, and a size is at least 1")
        if heads % groups:
            raise ValueError(f"{heads} heads do not divide evenly over {groups} groups")
        query_key, key_key, value_key, *conv_keys, rate_key, decay_key, out_key = jax.random.split(key, 9)
        group_keys = Dim("groups", key_dim)
        head_values = Dim("heads", value_dim)
        project = partial(Linear, embed, in_=Dim("embed"))
        self.query = project(groups * key_dim, out=group_keys, key=query_key)
        self.key = project(groups * key_dim, out=group_keys, key=key_key)
        self.value = project(heads * value_dim, out=head_values, key=value_key)
        self.query_convolution, self.key_convolution, self.value_convolution = (
            ShortConvolution(linear.out_size, conv_width, features=features, key=conv_key)
            for linear, features, conv_key in zip(
                (self.query, self.key, self.value), (group_keys, group_keys, head_values), conv_keys, strict=True
            )
        )
        self.rate = project(heads, out=Dim("heads"), key=rate_key)
        self.decay = DecayGate(project, heads, key=decay_key)
        norm = partial(RMSNorm, value_dim, features=Dim("value_dim"), epsilon=epsilon)
        gate = {"gate": True, "activation": gate_activation}
        self.readout = OutputGate(embed, heads, value_dim, norm=norm, **gate, out_scale=out_scale, key=out_key)
        self.key_dim = key_dim
        self.value_dim = value_dim
        self.group = heads // groups
        self.activation = activation
        self.max_beta = 2.0 if negative_eigenvalues else 1.0
        self.implementation = implementation

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> RecurrentState:
        matrix = jnp.zeros((batch, self.rate.out_size, self.key_dim, self.value_dim), jnp.float32)
        convolutions = self.query_convolution, self.key_convolution, self.value_convolution
        return RecurrentState(matrix, tuple(convolution.init_state(batch, dtype) for convolution in convolutions))

    def __call__(
        self, x: HiddenStates, info: TokenInfo, state: RecurrentState | None = None
    ) -> tuple[ResidualStream, RecurrentState | None]:
        """With a `state`, tokens continue the sequence that it summarizes."""
        context = RecurrenceContext.from_info(x, info, state, self.implementation)
        states = (None, None, None) if state is None else state.conv_states
        query, query_state = self._convolve(self.query(x), self.query_convolution, context, states[0], self.key_dim)
        key, key_state = self._convolve(self.key(x), self.key_convolution, context, states[1], self.key_dim)
        value, value_state = self._convolve(self.value(x), self.value_convolution, context, states[2], self.value_dim)
        query, key = (self._share(l2_normalize(groups), value) for groups in (query, key))
        beta = jax.nn.sigmoid(self.rate(x).astype(jnp.float32))
        if self.max_beta != 1:
            beta = self.max_beta * beta
        beta = context.mask_padding(beta)
        decay = context.mask_padding(self.decay(x))
        mixed, matrix = gated_delta_rule(query, key, value, beta, decay, **context.options())
        y = self.readout(mixed, x)
        if query_state is None or key_state is None or value_state is None:
            return y, None
        return y, RecurrentState(matrix, (query_state, key_state, value_state))

    def _convolve(
        self,
        x: Float[Array, "batch seq features"],
        convolution: ShortConvolution,
        context: RecurrenceContext,
        state: ConvState | None,
        size: int,
    ) -> tuple[Float[Array, "batch seq units {size}"], ConvState | None]:
        """Return activation(conv(x)) by heads or groups of this size, and the updated state unless `state` is None."""
        y, state = convolution(context.mask_padding(x), context, state)
        return self.activation(y).reshape(*y.shape[:2], -1, size), state

    def _share(
        self, x: Float[Array, "batch seq groups key_dim"], heads: Float[Array, "batch seq heads _"]
    ) -> Float[Array, "batch seq heads key_dim"]:
        """Repeat the vector of each group for its heads on this device."""
        x = select_kv_heads(x, heads, self.group)
        return jnp.repeat(x, heads.shape[2] // x.shape[2], axis=2)
