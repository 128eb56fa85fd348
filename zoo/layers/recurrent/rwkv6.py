"""RWKV-6 (Finch) time mixing as a layer. The recurrence is `zoo.ops.recurrence.rwkv6`."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from zoo.ops.recurrence.gated_linear import GATED_LINEAR
from zoo.ops.recurrence.rwkv6 import rwkv6
from zoo.parallel import Dim, implementation_option, no_weight_decay
from zoo.shapes import HiddenStates, ResidualStream

from ..abstract import AbstractLinear, AbstractMixer
from ..linear import Linear, resolve_head_dim
from ..token_info import TokenInfo
from .common import HeadNorm, LowRank, RecurrentState, split_heads_and_steps
from .context import RecurrenceContext
from .token_shift import TokenShift, compute_token_delta, init_rwkv_state


class RWKV6(AbstractMixer):
    """y = W_out [silu(W_gate x_g) * norm(o)], o_t = r_tᵀ (S_{t-1} + diag(u) k_t v_tᵀ) and
    S_t = diag(exp(-exp(w_t))) S_{t-1} + k_t v_tᵀ (Finch: Peng et al., arXiv:2404.05892, section 4.2). r, k, v and the
    gate are projections of x after a token shift, one shift each, and w = b + W_up tanh(W_down x_w).

    `query` is the paper's receptance r. The paper concatenates the down projections of the five shifts to one matrix.
    Heads are sharded over `tensor`.
    """

    shards_sequence = True

    shift: TokenShift
    """Token shift whose output is the input of the adjustments of `shifts`."""
    shifts: tuple[TokenShift, ...]
    """Token shifts of queries, keys, values, gate and decay."""
    query: AbstractLinear
    key: AbstractLinear
    value: AbstractLinear
    gate: AbstractLinear
    decay: AbstractLinear
    bonus: Float[Array, "heads key_dim"] = no_weight_decay(full_precision=True)
    norm: HeadNorm
    out: AbstractLinear

    head_dim: int = eqx.field(static=True)
    implementation: str = implementation_option(GATED_LINEAR)

    def __init__(
        self,
        embed: int,
        heads: int,
        *,
        head_dim: int | None = None,
        value_dim: int | None = None,
        rank: int = 32,
        decay_rank: int = 64,
        epsilon: float = 64e-5,
        out_scale: float = 1.0,
        implementation: str = "auto",
        key: Key[Array, ""],
    ):
        """- `head_dim`: of queries and keys, `embed / heads` by default. `value_dim`: `head_dim` by default.
        - `rank`, `decay_rank`: of the projections of shifts and decays. `epsilon`: of the norm.

        Decays are initialized from exp(-exp(-6)) to exp(-exp(-1)) over the channels of a head, as in the paper.
        """
        size = resolve_head_dim(embed, heads, head_dim)
        value_size = value_dim or size
        keys = jax.random.split(key, 12)
        inner_dim = Dim("heads", size)
        values_dim = Dim("heads", value_size)
        project = partial(Linear, embed, heads * size, in_=Dim("embed"), out=inner_dim)
        project_values = partial(Linear, embed, heads * value_size, in_=Dim("embed"), out=values_dim)
        adjust = partial(LowRank, embed, embed, rank=rank, out=Dim("embed"), activation=jnp.tanh)
        self.shift = TokenShift(embed)
        self.shifts = tuple(TokenShift(embed, adjust=adjust(key=shift_key)) for shift_key in keys[:5])
        self.query, self.key = (project(key=linear_key) for linear_key in keys[5:7])
        self.value, self.gate = (project_values(key=linear_key) for linear_key in keys[7:9])
        decay = LowRank(
            embed, heads * size, rank=decay_rank, out=inner_dim, bias=True, activation=jnp.tanh, key=keys[9]
        )
        bias = jnp.linspace(-6.0, -1.0, size, dtype=jnp.float32)
        self.decay = eqx.tree_at(lambda decay: decay.up.bias, decay, jnp.tile(bias, heads))
        self.bonus = 0.5 * jax.random.normal(keys[10], (heads, size), jnp.float32)
        self.norm = HeadNorm(heads, value_size, epsilon=epsilon, centered=True, bias=True)
        self.out = Linear(heads * value_size, embed, in_=values_dim, out=Dim("embed"), scale=out_scale, key=keys[11])
        self.head_dim = size
        self.implementation = implementation

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> RecurrentState:
        heads = self.query.out_size // self.head_dim
        embed = self.shift.weight.shape[0]
        return init_rwkv_state(batch, heads, self.head_dim, embed, dtype, self.value.out_size // heads)

    def __call__(
        self, x: HiddenStates, info: TokenInfo, state: RecurrentState | None = None
    ) -> tuple[ResidualStream, RecurrentState | None]:
        context = RecurrenceContext.from_info(x, info, state, self.implementation)
        delta, conv_states = compute_token_delta(x, context, state)
        mixture = self.shift(x, delta)
        linears = (self.query, self.key, self.value, self.gate, self.decay)
        query, key, value, gate, decay = (
            linear(shift(x, delta, mixture)) for linear, shift in zip(linears, self.shifts, strict=True)
        )
        heads = query.shape[-1] // self.head_dim
        query, key, decay = (split_heads_and_steps(y, heads, self.head_dim) for y in (query, key, decay))
        value = split_heads_and_steps(value, heads, value.shape[-1] // heads)
        log_decay = -jnp.exp(decay.astype(jnp.float32))
        mixed, matrix = rwkv6(
            query,
            context.mask_padding(key),
            value,
            context.mask_padding(log_decay),
            self.bonus,
            **context.options(),
        )
        y = self.out(jax.nn.silu(gate) * self.norm(mixed.reshape(*x.shape[:2], -1)))
        if state is None:
            return y, None
        return y, RecurrentState(matrix, conv_states)
