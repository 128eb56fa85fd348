"""Kernels of `pallas_delta_rule`: one chunk of one head, forward and backward, in the notation of `delta_rule`."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from .common import Pairs, ScalarDecays, compare_tokens, compute_decays, multiply, pull_back_decays, to_column, to_row

_Keys = Float[Array, "size key_dim"]
_RowValues = Float[Array, "size value_dim"]
_State = Float[Array, "key_dim value_dim"]

BETA, LOG_DECAY, COUNT = range(3)
"""Rows of the `gates` of a chunk, [3, size]: beta, the log decay, and the count of segments that start in the chunk."""


class _Chunk(NamedTuple):
    """Parts of a chunk that forward and backward pass compute alike."""

    query: _Keys
    key: _Keys
    beta: Float[Array, "size 1"]
    decays: ScalarDecays
    couplings: Pairs
    """D_ij k_i · k_j for j < i, so that L = -beta couplings."""
    scores: Pairs
    """D_ij q_i · k_j for j <= i."""

    @classmethod
    def read(cls, query_ref: Any, key_ref: Any, gates_ref: Any) -> "_Chunk":
        """Load the operands of a chunk, and compute its decays and products."""
        query = query_ref[...]
        key = key_ref[...]
        gates = gates_ref[...]
        beta, log_decay, count = (gates[i : i + 1] for i in (BETA, LOG_DECAY, COUNT))
        decays = compute_decays(log_decay, count)
        couplings = multiply(key, key, transpose_y=True) * decays.pairs
        couplings = jnp.where(compare_tokens(len(key), strict=True), couplings, 0)
        scores = multiply(query, key, transpose_y=True) * decays.pairs
        return cls(query, key, to_column(beta), decays, couplings, scores)

    def compute_corrections(self, value: _RowValues, inverse: Pairs, state: _State) -> tuple[Array, Array, Array]:
        """Return X = K S, the errors R = V - f X, and the updates U = T (beta R), rounded."""
        reads = multiply(self.key, state.astype(self.key.dtype))
        errors = value - self.decays.from_start * reads
        update = multiply(inverse, (self.beta * errors).astype(self.key.dtype))
        return reads, errors, update.astype(self.key.dtype)

    @property
    def key_to_end(self) -> _Keys:
        """h K, rounded."""
        return (self.decays.to_end * self.key).astype(self.key.dtype)


def forward_kernel(
    query_ref: Any,
    key_ref: Any,
    value_ref: Any,
    gates_ref: Any,
    first_ref: Any,
    output_ref: Any,
    last_ref: Any,
    *residual_refs: Any,
    scale: float,
) -> None:
    """Compute the output of a chunk and the state after it, which stays in `last_ref` from chunk to chunk.

    `residual_refs`, if any: the state before the chunk, and the inverse.
    """

    @pl.when(pl.program_id(2) == 0)
    def _start() -> None:
        last_ref[...] = first_ref[...]

    chunk = _Chunk.read(query_ref, key_ref, gates_ref)
    state = last_ref[...]
    dtype = chunk.key.dtype
    inverse = invert_unit_lower(-chunk.beta * chunk.couplings, refine=dtype == jnp.float32).astype(dtype)
    if residual_refs:
        state_ref, inverse_ref = residual_refs
        state_ref[...] = state
        inverse_ref[...] = inverse
    _, _, update = chunk.compute_corrections(value_ref[...], inverse, state)
    output = chunk.decays.from_start * multiply(chunk.query, state.astype(dtype))
    output = scale * (output + multiply(chunk.scores.astype(dtype), update))
    output_ref[...] = output.astype(output_ref.dtype)
    last_ref[...] = chunk.decays.total * state + multiply(chunk.key_to_end, update, transpose_x=True)


def backward_kernel(
    query_ref: Any,
    key_ref: Any,
    value_ref: Any,
    gates_ref: Any,
    state_ref: Any,
    inverse_ref: Any,
    grad_output_ref: Any,
    grad_last_ref: Any,
    grad_query_ref: Any,
    grad_key_ref: Any,
    grad_value_ref: Any,
    grad_gates_ref: Any,
    grad_first_ref: Any,
    *,
    scale: float,
) -> None:
    """Compute the cotangents of a chunk; the state's stays in `grad_first_ref`, from the last chunk to the first.

    The cotangent of an exponent is its decay's cotangent times the decay, so products with decayed factors give it.
    """

    @pl.when(pl.program_id(2) == 0)
    def _start() -> None:
        grad_first_ref[...] = grad_last_ref[...]

    chunk = _Chunk.read(query_ref, key_ref, gates_ref)
    state = state_ref[...]
    inverse = inverse_ref[...]
    query = chunk.query
    key = chunk.key
    beta = chunk.beta
    decays = chunk.decays
    dtype = key.dtype
    reads, errors, update = chunk.compute_corrections(value_ref[...], inverse, state)
    grad_state = grad_first_ref[...]
    rounded_state = state.astype(dtype)
    rounded_grad = grad_state.astype(dtype)
    grad_output = scale * grad_output_ref[...].astype(jnp.float32)
    rounded_output = grad_output.astype(dtype)

    # Back through U, which outputs and the next state read, to the right side of the system and the errors.
    grad_update = multiply(chunk.scores.astype(dtype), rounded_output, transpose_x=True)
    grad_update = grad_update + multiply(chunk.key_to_end, rounded_grad)
    grad_right = multiply(inverse, grad_update.astype(dtype), transpose_x=True)
    grad_errors = beta * grad_right
    grad_value_ref[...] = grad_errors.astype(grad_value_ref.dtype)

    # The triangles of scores and couplings.
    grad_scores = multiply(rounded_output, update, transpose_y=True)
    grad_lower = multiply(grad_right.astype(dtype), update, transpose_y=True)
    grad_beta = (grad_right * errors).sum(1, keepdims=True) - (grad_lower * chunk.couplings).sum(1, keepdims=True)
    grad_couplings = -beta * grad_lower
    pair_exponents = grad_scores * chunk.scores + grad_couplings * chunk.couplings
    score_products = (grad_scores * decays.pairs).astype(dtype)
    strict = compare_tokens(len(key), strict=True)
    key_products = jnp.where(strict, grad_couplings * decays.pairs, 0).astype(dtype)

    # The reads of the state before the chunk, by queries and keys, and the writes to the state after it.
    query_reads = (decays.from_start * grad_output).astype(dtype)
    key_reads = (-decays.from_start * grad_errors).astype(dtype)
    grad_query = multiply(query_reads, rounded_state, transpose_y=True)
    start_exponents = (grad_query * query).sum(1, keepdims=True)
    start_exponents = start_exponents - (decays.from_start * grad_errors * reads).sum(1, keepdims=True)
    grad_key = decays.to_end * multiply(update, rounded_grad, transpose_y=True)
    end_exponents = (grad_key * key).sum(1, keepdims=True)
    total_exponent = (decays.total * grad_state * state).sum(1, keepdims=True).sum(0, keepdims=True)

    grad_query = grad_query + multiply(score_products, key)
    grad_key = grad_key + multiply(score_products, query, transpose_x=True)
    grad_key = grad_key + multiply(key_products, key) + multiply(key_products, key, transpose_x=True)
    grad_key = grad_key + multiply(key_reads, rounded_state, transpose_y=True)
    grad_query_ref[...] = grad_query.astype(grad_query_ref.dtype)
    grad_key_ref[...] = grad_key.astype(grad_key_ref.dtype)

    grad_decay = pull_back_decays(ScalarDecays(pair_exponents, start_exponents, end_exponents, total_exponent))
    grad_gates_ref[BETA : BETA + 1] = to_row(grad_beta)
    grad_gates_ref[LOG_DECAY : LOG_DECAY + 1] = grad_decay
    grad_gates_ref[COUNT : COUNT + 1] = jnp.zeros_like(grad_decay)

    grad_state = decays.total * grad_state + multiply(key, key_reads, transpose_x=True)
    grad_first_ref[...] = grad_state + multiply(query, query_reads, transpose_x=True)


def invert_unit_lower(lower: Pairs, *, refine: bool) -> Pairs:
    """Compute (I - lower)^-1 in float32 for a strictly lower triangle whose size is a power of two.

    Blocks on the diagonal are inverted together, and double at each level. With T the inverses of the blocks of `block`
    rows, and M the blocks of `lower` left of every second one, the next inverses are T + T M T. This is the assembly of
    `zoo.ops.recurrence.triangular` with products of full size, and like it forms nothing larger than the inverse. The
    product of the factors I + lower^(2^i), which takes as many products, does: for keys in one direction and beta 2,
    powers of 1e27 that cancel to entries of 2. `refine` adds a Newton step, T + T (I - (I - lower) T).
    """
    size = len(lower)
    row, column = (lax.broadcasted_iota(jnp.int32, lower.shape, dim) for dim in (0, 1))
    differing_bits = row ^ column
    identity = jnp.where(row == column, 1.0, 0.0)
    inverse = identity + jnp.where(differing_bits == 1, lower, 0)
    block = 2
    while block < size:
        corner = jnp.where((differing_bits >= block) & (differing_bits < 2 * block), lower, 0)
        inverse = inverse + multiply(multiply(inverse, corner), inverse)
        block *= 2
    if refine:
        residual = identity - inverse + multiply(lower, inverse)
        inverse = inverse + multiply(inverse, residual)
    return inverse
