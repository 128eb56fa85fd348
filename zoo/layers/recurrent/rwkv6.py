"""RWKV's time mixing, sixth and seventh generation. The recurrences are `zoo.ops.rwkv6` and `zoo.ops.rwkv7`.

What is projected is not a token's vector but a mixture of it and the one before: the token shift, which a state
remembers as a window of one token. Matrices of low rank make what depends on the token: mixtures, decays, rates, gates.
Heads are split over `tensor`.
"""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from zoo.ops.recurrence.chunks import RecurrenceMode
from zoo.ops.recurrence.rwkv6 import rwkv6
from zoo.ops.recurrence.rwkv7 import rwkv7
from zoo.parallel import Dim, Module, full_precision, implementation_option

from ..abstract import AbstractLinear, AbstractMixer
from ..convolution import ConvState, init_token_shift, token_shift
from ..linear import Linear
from ..token_info import TokenInfo
from .common import (
    HeadNorm,
    LowRank,
    RecurrentState,
    l2_normalize,
    recurrence_options,
    resolve_head_dim,
    split_heads_and_steps,
)
from .context import RecurrenceContext

_HiddenStates = Float[Array, "batch seq embed"]


class _TokenShift(Module):
    """x + (previous - x) * weight: between a token's vector and the one before (Peng et al., RWKV, arXiv:2305.13048,
    section 3.1). With `adjust` the weight depends on the token: weight + adjust(mixture), the data-dependent shift of
    RWKV-6 (arXiv:2404.05892, section 4.1)."""

    weight: Float[Array, "embed"]
    adjust: AbstractLinear | None

    def __init__(self, embed: int, *, adjust: AbstractLinear | None = None):
        """Weights start at a half."""
        self.weight, self.adjust = jnp.full(embed, 0.5), adjust

    def __call__(self, x: _HiddenStates, delta: _HiddenStates, mixture: _HiddenStates | None = None) -> _HiddenStates:
        """`change` is the previous vector less the present one; `mixture`, what `adjust` reads."""
        if self.adjust is None or mixture is None:
            return x + delta * self.weight
        return x + delta * (self.weight + self.adjust(mixture))


def _compute_token_delta(
    x: _HiddenStates, context: RecurrenceContext, state: RecurrentState | None
) -> tuple[_HiddenStates, tuple[ConvState, ...]]:
    """The vector before each token's, less its own; and the window that remembers the last."""
    previous, window = token_shift(x, context, None if state is None else state.windows[0])
    return previous - x, () if window is None else (window,)


def _init_rwkv_state(batch: int, heads: int, head_dim: int, embed: int, dtype: Any) -> RecurrentState:
    """A memory before the first token."""
    return RecurrentState(
        jnp.zeros((batch, heads, head_dim, head_dim), jnp.float32), (init_token_shift(batch, embed, dtype),)
    )


class RWKV6(AbstractMixer):
    """y = W_out [silu(W_gate x_g) * norm(o)], o_t = r_tᵀ (S_{t-1} + diag(u) k_t v_tᵀ) and
    S_t = diag(exp(-exp(w_t))) S_{t-1} + k_t v_tᵀ (Finch: Peng et al., arXiv:2404.05892, section 4.2), where r, k, v and
    the gate are projections of shifted vectors, each with a shift of its own, and w = b + W_up tanh(W_down x_w).

    r, the receptance, is called `query` here. The paper keeps the five shifts' first matrices in one.
    """

    shift: _TokenShift
    """What the others' adjustments read."""
    shifts: tuple[_TokenShift, ...]
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
        self.shift = _TokenShift(embed)
        self.shifts = tuple(_TokenShift(embed, adjust=adjust(key=own)) for own in keys[:5])
        self.query, self.key, self.value, self.gate = (read(key=own) for own in keys[5:9])
        low = LowRank(embed, heads * size, rank=decay_rank, out=inner, bias=True, activation=jnp.tanh, key=keys[9])
        self.decay = eqx.tree_at(lambda low: low.up.bias, low, jnp.tile(jnp.linspace(-6.0, -1.0, size), heads))
        self.bonus = 0.5 * jax.random.normal(keys[10], (heads, size))
        self.norm = HeadNorm(heads, size, epsilon=64e-5, centered=True, bias=True)
        self.out = Linear(heads * size, embed, in_=inner, out=Dim("embed"), scale=out_scale, key=keys[11])
        self.head_dim, self.mode = size, mode

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> RecurrentState:
        heads = self.query.out_size // self.head_dim
        return _init_rwkv_state(batch, heads, self.head_dim, self.shift.weight.shape[0], dtype)

    def __call__(
        self, x: _HiddenStates, info: TokenInfo, state: RecurrentState | None = None
    ) -> tuple[_HiddenStates, RecurrentState | None]:
        course = RecurrenceContext.from_info(x, info, state, self.mode)
        change, windows = _compute_token_delta(x, course, state)
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


class RWKV7(AbstractMixer):
    """A state read and corrected in directions of their own (Goose: Peng et al., arXiv:2503.14456, section 4.1):

        S_t = diag(exp(g_t)) S_{t-1} - (a_t c_t) (S_{t-1}ᵀ c_t)ᵀ + k'_t v_tᵀ,    o_t = S_tᵀ r_t
        y = W_out [gate * (norm(o) + (r · (u * k')) v)]

    with r, k, v projections of shifted vectors, each with a shift of its own; the removal key c = unit(w_c * k), the
    in-context rate a = sigmoid(b + W_up W_down x), the key k' = k * (1 + (a - 1) * w_k) that is added, decays
    g = -exp(-1/2) sigmoid(b + W_up tanh(W_down x)) and gate = W_up sigmoid(W_down x).

    r, the receptance, is called `query` here. The paper's values also take some of the first layer's; these do not.
    """

    shifts: tuple[_TokenShift, ...]
    """Of queries, keys, values, gate, decay and rate."""
    query: AbstractLinear
    key: AbstractLinear
    value: AbstractLinear
    gate: AbstractLinear
    decay: AbstractLinear
    rate: AbstractLinear
    removal: Float[Array, "heads key_dim"]
    """w_c: what a key becomes where it removes."""
    replacement: Float[Array, "heads key_dim"]
    """w_k: by how much the rate scales a key where it adds."""
    bonus: Float[Array, "heads key_dim"]
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
        rank: int = 64,
        out_scale: float = 1.0,
        mode: RecurrenceMode = "chunked",
        key: Key[Array, ""],
    ):
        """`head_dim` is `embed / heads` unless given; `rank` is that of decays, rates and the gate."""
        size = resolve_head_dim(embed, heads, head_dim)
        keys = jax.random.split(key, 8)
        inner, stream = Dim("heads", size), Dim("embed")
        read = partial(Linear, embed, heads * size, in_=stream, out=inner)
        low = partial(LowRank, embed, heads * size, rank=rank, out=inner)
        self.shifts = tuple(_TokenShift(embed) for _ in range(6))
        self.query, self.key, self.value = (read(key=own) for own in keys[:3])
        self.gate = low(activation=jax.nn.sigmoid, key=keys[3])
        decay = low(bias=True, activation=jnp.tanh, key=keys[4])
        self.decay = eqx.tree_at(lambda low: low.up.bias, decay, jnp.tile(jnp.linspace(-5.5, 0.5, size), heads))
        self.rate = low(bias=True, key=keys[5])
        self.removal = jnp.full((heads, size), 0.85)
        self.replacement = jnp.ones((heads, size))
        self.bonus = 0.1 * jax.random.normal(keys[6], (heads, size))
        self.norm = HeadNorm(heads, size, epsilon=1e-5 * size, centered=True, bias=True)
        self.out = Linear(heads * size, embed, in_=inner, out=stream, scale=out_scale, key=keys[7])
        self.head_dim, self.mode = size, mode

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> RecurrentState:
        heads = self.query.out_size // self.head_dim
        return _init_rwkv_state(batch, heads, self.head_dim, self.shifts[0].weight.shape[0], dtype)

    def __call__(
        self, x: _HiddenStates, info: TokenInfo, state: RecurrentState | None = None
    ) -> tuple[_HiddenStates, RecurrentState | None]:
        course = RecurrenceContext.from_info(x, info, state, self.mode)
        change, windows = _compute_token_delta(x, course, state)
        parts = (self.query, self.key, self.value, self.gate, self.decay, self.rate)
        made = [part(shift(x, change)) for part, shift in zip(parts, self.shifts, strict=True)]
        heads = made[0].shape[-1] // self.head_dim
        query, key, value, gate, decay, rate = (split_heads_and_steps(y, heads, self.head_dim) for y in made)
        rate = jax.nn.sigmoid(rate.astype(jnp.float32))
        log_decay = -(jnp.e**-0.5) * jax.nn.sigmoid(decay.astype(jnp.float32))
        removal = course.mask_padding(l2_normalize(key * self.removal))
        key = course.mask_padding((key * (1 + (rate - 1) * self.replacement)).astype(value.dtype))
        mixed, matrix = rwkv7(
            query,
            key,
            value,
            course.mask_padding(log_decay),
            (-removal).astype(value.dtype),
            (removal * rate).astype(value.dtype),
            **recurrence_options(course, state),
        )
        present = (query * key * self.bonus).sum(-1, keepdims=True) * value
        mixed = self.norm(mixed.reshape(*x.shape[:2], -1)) + present.reshape(*x.shape[:2], -1)
        y = self.out((gate.reshape(mixed.shape) * mixed).astype(x.dtype))
        return y, None if state is None else RecurrentState(matrix, windows)
