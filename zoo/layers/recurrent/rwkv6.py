"""RWKV-6 (Finch) time mixing as a layer. The recurrence is `zoo.ops.recurrence.rwkv6`."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from zoo.ops.recurrence.chunks import RecurrenceMode
from zoo.ops.recurrence.rwkv6 import rwkv6
from zoo.parallel import Dim, full_precision, implementation_option
from zoo.shapes import HiddenStates

from ..abstract import AbstractLinear, AbstractMixer
from ..linear import Linear, resolve_head_dim
from ..token_info import TokenInfo
from .common import HeadNorm, LowRank, RecurrentState, recurrence_options, split_heads_and_steps
from .context import RecurrenceContext
from .token_shift import TokenShift, compute_token_delta, init_rwkv_state


class RWKV6(AbstractMixer):
    """y = W_out [silu(W_gate x_g) * norm(o)], o_t = r_tᵀ (S_{t-1} + diag(u) k_t v_tᵀ) and
    S_t = diag(exp(-exp(w_t))) S_{t-1} + k_t v_tᵀ (Finch: Peng et al., arXiv:2404.05892, section 4.2), where r, k, v and
    the gate are projections of shifted vectors, each with a shift of its own, and w = b + W_up tanh(W_down x_w).

    r, the receptance, is called `query` here. The paper keeps the five shifts' first matrices in one.
    """

    shift: TokenShift
    """What the others' adjustments read."""
    shifts: tuple[TokenShift, ...]
    """Of queries, keys, values, gate and decay."""
    query: AbstractLinear
    key: AbstractLinear
    value: AbstractLinear
    gate: AbstractLinear
    decay: AbstractLinear
    bonus: Float[Array, "heads key_dim"] = full_precision()
    norm: HeadNorm
    out: AbstractLinear

    head_dim: int = eqx.field(static=True)
    mode: RecurrenceMode = implementation_option()

    def __init__(
        self,
        embed: int,
        heads: int,
        *,
        head_dim: int | None = None,
        rank: int = 32,
        decay_rank: int = 64,
        out_scale: float = 1.0,
        mode: RecurrenceMode = "chunked",
        key: Key[Array, ""],
    ):
        """`head_dim` is `embed / heads` unless given; `rank` and `decay_rank` are those of shifts and decays. Decays
        start between exp(-exp(-6)) and exp(-exp(-1)) a token, as the paper's, slow to fast over a head's channels."""
        size = resolve_head_dim(embed, heads, head_dim)
        keys = jax.random.split(key, 12)
        inner = Dim("heads", size)
        read = partial(Linear, embed, heads * size, in_=Dim("embed"), out=inner)
        adjust = partial(LowRank, embed, embed, rank=rank, out=Dim("embed"), activation=jnp.tanh)
        self.shift = TokenShift(embed)
        self.shifts = tuple(TokenShift(embed, adjust=adjust(key=own)) for own in keys[:5])
        self.query, self.key, self.value, self.gate = (read(key=own) for own in keys[5:9])
        low = LowRank(embed, heads * size, rank=decay_rank, out=inner, bias=True, activation=jnp.tanh, key=keys[9])
        self.decay = eqx.tree_at(lambda low: low.up.bias, low, jnp.tile(jnp.linspace(-6.0, -1.0, size), heads))
        self.bonus = 0.5 * jax.random.normal(keys[10], (heads, size))
        self.norm = HeadNorm(heads, size, epsilon=64e-5, centered=True, bias=True)
        self.out = Linear(heads * size, embed, in_=inner, out=Dim("embed"), scale=out_scale, key=keys[11])
        self.head_dim, self.mode = size, mode

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> RecurrentState:
        heads = self.query.out_size // self.head_dim
        return init_rwkv_state(batch, heads, self.head_dim, self.shift.weight.shape[0], dtype)

    def __call__(
        self, x: HiddenStates, info: TokenInfo, state: RecurrentState | None = None
    ) -> tuple[HiddenStates, RecurrentState | None]:
        course = RecurrenceContext.from_info(x, info, state, self.mode)
        change, windows = compute_token_delta(x, course, state)
        mixture = self.shift(x, change)
        parts = (self.query, self.key, self.value, self.gate, self.decay)
        query, key, value, gate, decay = (
            part(shift(x, change, mixture)) for part, shift in zip(parts, self.shifts, strict=True)
        )
        heads = query.shape[-1] // self.head_dim
        query, key, value, decay = (split_heads_and_steps(y, heads, self.head_dim) for y in (query, key, value, decay))
        log_decay = -jnp.exp(decay.astype(jnp.float32))
        mixed, matrix = rwkv6(
            query,
            course.mask_padding(key),
            value,
            course.mask_padding(log_decay),
            self.bonus,
            **recurrence_options(course, state),
        )
        y = self.out(jax.nn.silu(gate) * self.norm(mixed.reshape(*x.shape[:2], -1)))
        return y, None if state is None else RecurrentState(matrix, windows)
