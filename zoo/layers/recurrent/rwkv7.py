"""RWKV-7 (Goose) time mixing as a layer. The recurrence is `zoo.ops.recurrence.rwkv7`."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from zoo.ops.recurrence.generalized_delta import GENERALIZED_DELTA
from zoo.ops.recurrence.rwkv7 import rwkv7
from zoo.parallel import Dim, implementation_option, no_weight_decay
from zoo.shapes import HiddenStates, ResidualStream, Values

from ..abstract import AbstractLinear, AbstractMixer
from ..linear import Linear, resolve_head_dim
from ..token_info import TokenInfo
from .common import HeadNorm, LowRank, RecurrentState, l2_normalize, split_heads_and_steps
from .context import RecurrenceContext
from .token_shift import TokenShift, compute_token_delta, init_rwkv_state


class RWKV7(AbstractMixer):
    """RWKV-7 time mixing, a generalized delta rule (Goose: Peng et al., arXiv:2503.14456, section 4.1):

        S_t = diag(exp(g_t)) S_{t-1} - (a_t c_t) (S_{t-1}ᵀ c_t)ᵀ + k'_t v_tᵀ,    o_t = S_tᵀ r_t
        y = W_out [gate * (norm(o) + (r · (u * k')) v)]

    with r, k, v projections of x after a token shift, one shift each; removal key c = w_c * k, L2-normalized;
    in-context learning rate a = sigmoid(b + W_up W_down x); replacement key k' = k * (1 + (a - 1) * w_k);
    log decays g = -exp(-1/2) sigmoid(b + W_up tanh(W_down x)); and gate = W_up sigmoid(W_down x).

    With a `value_rank`, values are interpolated with the values v_1 of the first layer, which `mix` takes:
    v + (v_1 - v) sigmoid(b + W_up W_down x), of the same shifted x as v (`zoo.models.hf.families.rwkv7_layers`).
    `query` is the paper's receptance r. Heads are sharded over `tensor`.
    """

    shards_sequence = True

    shifts: tuple[TokenShift, ...]
    """Token shifts of queries, keys, values, gate, decay and rate."""
    query: AbstractLinear
    key: AbstractLinear
    value: AbstractLinear
    gate: AbstractLinear
    decay: AbstractLinear
    rate: AbstractLinear
    value_residual: AbstractLinear | None
    """None in a first layer, and in a model whose layers do not share values."""
    removal: Float[Array, "heads key_dim"] = no_weight_decay()
    """w_c: scale of the removal key."""
    replacement: Float[Array, "heads key_dim"] = no_weight_decay()
    """w_k: influence of the in-context learning rate on the replacement key."""
    bonus: Float[Array, "heads key_dim"] = no_weight_decay()
    norm: HeadNorm
    out: AbstractLinear

    head_dim: int = eqx.field(static=True)
    implementation: str = implementation_option(GENERALIZED_DELTA)

    def __init__(
        self,
        embed: int,
        heads: int,
        *,
        head_dim: int | None = None,
        rank: int = 64,
        decay_rank: int | None = None,
        gate_rank: int | None = None,
        value_rank: int | None = None,
        epsilon: float | int = 1e-5,
        out_scale: float = 1.0,
        implementation: str = "auto",
        key: Key[Array, ""],
    ):
        """- `head_dim`: `embed / heads` by default.
        - `rank`: of the projection of rates, and by default of decays (`decay_rank`) and of the gate (`gate_rank`).
        - `value_rank`: of the projection of the value residual; None for a layer without.
        - `epsilon`: of the norm, times the head dim.
        """
        size = resolve_head_dim(embed, heads, head_dim)
        keys = jax.random.split(key, 8)
        inner_dim = Dim("heads", size)
        embed_dim = Dim("embed")
        project = partial(Linear, embed, heads * size, in_=embed_dim, out=inner_dim)
        low_rank = partial(LowRank, embed, heads * size, out=inner_dim)
        self.shifts = tuple(TokenShift(embed) for _ in range(6))
        self.query, self.key, self.value = (project(key=linear_key) for linear_key in keys[:3])
        self.gate = low_rank(rank=gate_rank or rank, activation=jax.nn.sigmoid, key=keys[3])
        decay = low_rank(rank=decay_rank or rank, bias=True, activation=jnp.tanh, key=keys[4])
        bias = jnp.linspace(-5.5, 0.5, size, dtype=jnp.float32)
        self.decay = eqx.tree_at(lambda decay: decay.up.bias, decay, jnp.tile(bias, heads))
        self.rate = low_rank(rank=rank, bias=True, key=keys[5])
        self.value_residual = None
        if value_rank is not None:
            self.value_residual = low_rank(rank=value_rank, bias=True, key=jax.random.fold_in(key, 8))
        self.removal = jnp.full((heads, size), 0.85, jnp.float32)
        self.replacement = jnp.ones((heads, size), jnp.float32)
        self.bonus = 0.1 * jax.random.normal(keys[6], (heads, size), jnp.float32)
        self.norm = HeadNorm(heads, size, epsilon=epsilon * size, centered=True, bias=True)
        self.out = Linear(heads * size, embed, in_=inner_dim, out=embed_dim, scale=out_scale, key=keys[7])
        self.head_dim = size
        self.implementation = implementation

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> RecurrentState:
        heads = self.query.out_size // self.head_dim
        return init_rwkv_state(batch, heads, self.head_dim, self.shifts[0].weight.shape[0], dtype)

    def __call__(
        self, x: HiddenStates, info: TokenInfo, state: RecurrentState | None = None
    ) -> tuple[ResidualStream, RecurrentState | None]:
        """Return the output, and the updated state. **Raises** `ValueError` for a layer with a `value_rank`."""
        y, (state, _) = self.mix(x, info, state, None)
        return y, state

    def mix(
        self, x: HiddenStates, info: TokenInfo, state: RecurrentState | None, first_value: Values | None
    ) -> tuple[ResidualStream, tuple[RecurrentState | None, Values]]:
        """Return the output, the updated state, and the values of the first layer: `first_value`, or, if it is None,
        this layer's own.

        **Raises** `ValueError` for a layer with a `value_rank` and no `first_value`.
        """
        if self.value_residual is not None and first_value is None:
            raise ValueError(
                "this layer interpolates its values with the values of a first layer, and no layer before it has "
                "handed them on: run the layers in their model"
            )
        context = RecurrenceContext.from_info(x, info, state, self.implementation)
        delta, conv_states = compute_token_delta(x, context, state)
        linears = (self.query, self.key, self.value, self.gate, self.decay, self.rate)
        projected = [linear(shift(x, delta)) for linear, shift in zip(linears, self.shifts, strict=True)]
        heads = projected[0].shape[-1] // self.head_dim
        query, key, value, gate, decay, rate = (split_heads_and_steps(y, heads, self.head_dim) for y in projected)
        if first_value is None:
            first_value = value
        elif self.value_residual is not None:
            share = jax.nn.sigmoid(self.value_residual(self.shifts[2](x, delta))).reshape(value.shape)
            value = value + (first_value - value) * share
        rate = jax.nn.sigmoid(rate.astype(jnp.float32))
        log_decay = -(jnp.e**-0.5) * jax.nn.sigmoid(decay.astype(jnp.float32))
        removal = context.mask_padding(l2_normalize(key * self.removal))
        key = context.mask_padding((key * (1 + (rate - 1) * self.replacement)).astype(value.dtype))
        mixed, matrix = rwkv7(
            query,
            key,
            value,
            context.mask_padding(log_decay),
            (-removal).astype(value.dtype),
            (removal * rate).astype(value.dtype),
            **context.options(),
        )
        current = (query * key * self.bonus).sum(-1, keepdims=True) * value
        mixed = self.norm(mixed.reshape(*x.shape[:2], -1)) + current.reshape(*x.shape[:2], -1)
        y = self.out((gate.reshape(mixed.shape) * mixed).astype(x.dtype))
        if state is None:
            return y, (None, first_value)
        return y, (RecurrentState(matrix, conv_states), first_value)
