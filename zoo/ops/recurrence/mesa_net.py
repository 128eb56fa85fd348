"""MesaNet: linear attention whose query is first multiplied by the inverse of a decayed covariance of the keys.

    R_t = exp(g_t) R_{t-1} + beta_t k_t k_tᵀ                    R: [key_dim, key_dim] of each head, symmetric
    S_t = exp(g_t) S_{t-1} + beta_t k_t v_tᵀ                    S: [key_dim, value_dim]
    o_t = S_tᵀ x_t   with   (R_t + diag(lambda)) x_t = q_t

(von Oswald et al., arXiv:2506.05233.) o_t is the value that ridge regression predicts for q_t from all keys and values
so far, weighted by beta and the decays: a delta rule takes one step of gradient descent per token, this is the minimum.
The state is [R, S], side by side. It is the state of `gated_linear` with keys beta k and values [k, v], and has its
affine map.

Conjugate gradients compute x of all tokens at once. "chunked" never forms R_t: in a chunk with the decay f_i from its
start to token i, the decay m_ij from token j to token i and the state R before it, a step multiplies by

    R_i x_i = f_i R x_i + sum over j <= i of (x_i · k_j) m_ij beta_j k_j

"recurrent" forms R_t, token by token: the reference, and the decode step. After n steps an error of at most
2 exp(-2 n / sqrt(c)) is left, in the norm of R_t + diag(lambda), with c the condition number of this matrix; for keys
of length one c is at most (max(lambda) + sum(beta)) / min(lambda). A token stops when its residual is below 1e-7 of its
query; the loop ends with the last token, or after `steps`.

The gradient is the gradient of the equation, not of the steps: one more solution, with the cotangent of x in place of q
(`jax.lax.custom_linear_solve`). It is as exact as the solutions are.

FLOPs per token and head, with K = key_dim, V = value_dim and n steps: "recurrent" 2 n K^2 + K (3 K + 5 V); "chunked"
with chunks of C tokens 2 n K (2 C + K) for the solution, and 2 (C + K) (K + V) + 2 K V for the state and the output.
Bytes: as `gated_linear` with values of size K + V. Everything is float32, whatever the dtype of the operands: the
condition number would multiply the rounding of half precision.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from zoo.shapes import Queries, SegmentIds, Values

from ..varying import align_varying
from .affine import IncomingState
from .chunks import (
    batched_matmul,
    count_segment_starts,
    decay_from_start,
    exp_segsum,
    find_segment_starts,
    join_chunks,
    split_into_chunks,
)
from .gated_linear import compute_chunk_maps, scan_chunk_maps
from .generalized_delta import scan_heads
from .select import RecurrenceRequest, make_recurrence

_CHUNK_SIZE = 64
"""Tokens per chunk, a power of two."""
_TOLERANCE = 1e-7
"""Residual, relative to the query, at which a token's iterations end: the rounding of float32."""

_MesaState = Float[Array, "batch heads key_dim _"]
_Rates = Float[Array, "batch seq heads"]


def mesa_net(
    query: Queries,
    key: Queries,
    value: Values,
    log_decay: _Rates,
    beta: _Rates,
    regularization: Float[Array, "heads key_dim"],
    *,
    steps: int = 30,
    state: _MesaState | IncomingState | None = None,
    segment_ids: SegmentIds | None = None,
    implementation: str = "auto",
) -> tuple[Values, _MesaState]:
    """Compute MesaNet's mixing: the outputs, in the dtype of `value`, and the state [R, S] after the last token,
    "batch heads key_dim key_dim+value_dim" in float32.

    - `regularization`: lambda > 0.
    - `steps`: the largest number of conjugate gradient steps.
    - `state`: the initial state, zero by default, with a symmetric R. Every segment but the first resets it.

    **Raises** `ValueError` for `steps` below 1, for an unknown implementation, and for one that cannot compute the
    call, with the reason.
    """
    if steps < 1:
        raise ValueError(f"mesa_net: {steps} steps of conjugate gradients solve nothing; the default is 30")
    request = RecurrenceRequest.from_heads(query, value, log_decay, state=state, segment_ids=segment_ids)
    run = MESA_NET.select(implementation, request).function
    operands = (query, key, value, log_decay, beta, regularization)
    return run(*operands, steps=steps, state=state, segment_ids=segment_ids)


def mesa_net_reference(
    query: Queries,
    key: Queries,
    value: Values,
    log_decay: _Rates,
    beta: _Rates,
    regularization: Float[Array, "heads key_dim"],
    *,
    state: _MesaState,
) -> tuple[Values, _MesaState]:
    """Compute o_t = S_tᵀ (R_t + diag(lambda))⁻¹ q_t by a direct solution for each token (arXiv:2506.05233)."""

    def step(RS, q, k, v, g, beta, lam):
        RS = jnp.exp(g) * RS + beta * jnp.outer(k, jnp.concatenate([k, v]))
        R, S = jnp.split(RS, [len(k)], axis=1)
        return RS, S.T @ jnp.linalg.solve(R + jnp.diag(lam), q)

    per_token = jnp.broadcast_to(regularization, query.shape)
    return scan_heads(step, state, query, key, value, log_decay, beta, per_token)


def recurrent_mesa_net(
    query: Queries,
    key: Queries,
    value: Values,
    log_decay: _Rates,
    beta: _Rates,
    regularization: Float[Array, "heads key_dim"],
    *,
    steps: int,
    state: _MesaState | None = None,
    segment_ids: SegmentIds | None = None,
) -> tuple[Values, _MesaState]:
    """Scan over tokens in float32, with a solution for each: returns the outputs and the state after the last token."""
    dtype = value.dtype
    if segment_ids is None:
        starts = jnp.zeros(value.shape[:2], bool)
    else:
        starts = find_segment_starts(segment_ids)
    query, write, values, log_decay, regularization, initial = _prepare_operands(
        query, key, value, log_decay, beta, regularization, state
    )
    key_dim = query.shape[-1]

    def step(state: Array, token: tuple) -> tuple[Array, Array]:
        query, write, value, log_decay, is_start = token
        state = jnp.where(is_start[:, None, None, None], 0, state)
        state = jnp.exp(log_decay)[..., None, None] * state + write[..., None] * value[..., None, :]
        covariance, memory = jnp.split(state, [key_dim], axis=-1)
        multiply = lambda x: (covariance * x[..., None, :]).sum(-1) + regularization * x
        solution = _solve(multiply, query, steps)
        return state, (solution[..., None] * memory).sum(-2)

    tokens = tuple(x.swapaxes(0, 1) for x in (query, write, values, log_decay, starts))
    last, output = lax.scan(step, initial, tokens)
    return output.swapaxes(0, 1).astype(dtype), last


def chunked_mesa_net(
    query: Queries,
    key: Queries,
    value: Values,
    log_decay: _Rates,
    beta: _Rates,
    regularization: Float[Array, "heads key_dim"],
    *,
    steps: int,
    state: _MesaState | IncomingState | None = None,
    segment_ids: SegmentIds | None = None,
    chunk_size: int = _CHUNK_SIZE,
) -> tuple[Values, _MesaState]:
    """Compute `recurrent_mesa_net` by matrix products over chunks of `chunk_size` tokens, a power of two.

    For a shard of a sequence `state` is an `IncomingState`, called with the `DiagonalAffineMap` of [R, S].
    """
    dtype = value.dtype
    seq = value.shape[1]
    find_state = None
    if callable(state):
        find_state = state
        state = None
    query, write, values, log_decay, regularization, initial = _prepare_operands(
        query, key, value, log_decay, beta, regularization, state
    )
    count = count_segment_starts(segment_ids, seq, chunk_size)[:, :, None]
    query, write, values, log_decay = (split_into_chunks(x, chunk_size) for x in (query, write, values, log_decay))
    last, states = scan_chunk_maps(compute_chunk_maps(write, values, log_decay, count), initial, find_state)
    key, value = jnp.split(values, [query.shape[-1]], axis=-1)
    covariances, memories = jnp.split(states, [query.shape[-1]], axis=-1)  # before each chunk
    decay = jnp.where(count[..., :, None] == count[..., None, :], exp_segsum(log_decay), 0)
    from_start = jnp.where((count == 0)[..., None], decay_from_start(log_decay[..., None]), 0)

    def read(x: Array, rows: Array, columns: Array, states: Array) -> Array:
        """Multiply x of each token by the decayed state, of which a token adds rows columnsᵀ, transposed."""
        within = batched_matmul(batched_matmul(x, rows.mT) * decay, columns)
        return within + from_start * batched_matmul(x, states)

    def multiply(x: Array) -> Array:
        return read(x, key, write, covariances.mT) + regularization[:, None, :] * x

    output = read(_solve(multiply, query, steps), write, value, memories)
    return join_chunks(output, seq).astype(dtype), last


def _prepare_operands(
    query: Array,
    key: Array,
    value: Array,
    log_decay: Array,
    beta: Array,
    regularization: Array,
    state: Array | None,
) -> tuple[Any, ...]:
    """Return queries, keys times beta, [keys, values], decays, regularization and state, in float32 and with the same
    varying mesh axes."""
    operands = (query, key, value, log_decay, beta, regularization)
    query, key, value, log_decay, beta, regularization = (x.astype(jnp.float32) for x in operands)
    values = jnp.concatenate([key, value], axis=-1)
    if state is None:
        state = jnp.zeros((key.shape[0], *key.shape[2:], values.shape[-1]), jnp.float32)
    return align_varying(query, beta[..., None] * key, values, log_decay, regularization, state.astype(jnp.float32))


def _solve(multiply: Callable[[Array], Array], x: Float[Array, "*rows dim"], steps: int) -> Float[Array, "*rows dim"]:
    """Solve multiply(y) = x for a symmetric positive definite matrix per row, differentiably."""
    return lax.custom_linear_solve(multiply, x, partial(_conjugate_gradients, steps=steps), symmetric=True)


def _conjugate_gradients(
    multiply: Callable[[Array], Array], x: Float[Array, "*rows dim"], *, steps: int
) -> Float[Array, "*rows dim"]:
    """Solve multiply(y) = x by up to `steps` conjugate gradient steps from 0 (Hestenes & Stiefel, 1952), each row with
    step lengths of its own."""

    def square(x: Array) -> Array:
        return (x * x).sum(-1, keepdims=True)

    size = jnp.abs(x).max(-1, keepdims=True)
    size = jnp.where(size > 0, size, 1)
    x = x / size  # squares of small cotangents would underflow
    bound = _TOLERANCE**2 * square(x)

    def is_open(norm: Array) -> Array:
        return ~(norm <= bound)  # NaN never ends a row

    def improve(carry: tuple) -> tuple:
        step, solution, residual, direction, norm = carry
        going = is_open(norm)
        product = multiply(direction)
        curvature = jnp.where(going, (direction * product).sum(-1, keepdims=True), 1)
        length = jnp.where(going, norm / curvature, 0)
        solution = solution + length * direction
        residual = residual - length * product
        new_norm = square(residual)
        direction = residual + jnp.where(going, new_norm / jnp.where(going, norm, 1), 0) * direction
        return step + 1, solution, residual, direction, new_norm

    start = (0, jnp.zeros_like(x), x, x, square(x))
    end = lax.while_loop(lambda carry: (carry[0] < steps) & is_open(carry[-1]).any(), improve, start)
    return size * end[1]


MESA_NET = make_recurrence("MesaNet", recurrent_mesa_net, chunked_mesa_net)
"""Implementations of MesaNet, in the order in which `"auto"` tries them."""
