"""The generalized delta rule: recurrences that read their state before they write to it.

    u_t = c_t + a_t · R_t                                             a, b, k: [key_dim], c, v: [value_dim] of each head
    S_t = diag(exp(g_t)) S_{t-1} + b_t u_tᵀ + k_t v_tᵀ                S: [key_dim, value_dim]
    o_t = scale q_t · S_t

a is `read`, b `write`, c `write_value`, g <= 0 the log decay: none, one per head or one per key channel. R_t is the
state after the decay of its step, diag(exp(g_t)) S_{t-1}, or with `read_before_decay` S_{t-1}. Delta rules (Yang et
al., arXiv:2406.06484; gated: arXiv:2412.06464; a vector of decays: Kimi Linear, arXiv:2510.26692) have a = -beta k, b =
k and c = beta v, and beta up to 2 gives negative eigenvalues (arXiv:2411.12537); RWKV-7 (arXiv:2503.14456) reads before
the decay and has separate keys and values in place of c; DeltaProduct (arXiv:2502.10297) takes several `steps` per
token: the first decays, and the query reads after the last.

`recurrent_delta` is this, token by token: the reference, and the decode step. `chunked_delta` is for training. For a
chunk of C rows let e_ij be the decay from the write of row j to the read of row i, f_i the decay from the start of the
chunk to row i, h_j the decay from row j to its end, and S the state before it. The u of a chunk solve a triangular
system (the WY representation: arXiv:2406.06484, section 3.2),

    (I - L) U = c + P v + (a f) S                       L_ij = a_i e_ij b_j for j < i, P the same with k for b
    o  = scale [(q f) S + M U + N v]                    M_ij = q_i e_ij b_j for j <= i, N the same with k for b
    S' = f_C S + (b h)ᵀ U + (k h)ᵀ v

so that U = W S + U0, with W and U0 the solutions for a f and c + P v. These, and the outputs given the states, are
batched products over all chunks; only two products per chunk are sequential, in `lax.scan` (`scan_chunks`).

FLOPs per token and head, with K = key_dim and V = value_dim: `recurrent_delta` 7 K V; `chunked_delta` with a delta rule
C (6 K + 4 V) for triangles, solutions and outputs, 5 C^2 for the inverse, 6 K V with the state; a gradient twice that
again, except for the inverse. RWKV-7's separate keys and values add C (4 K + 4 V) + 2 K V, and the map of a shard of a
sequence 4 K^2 + 2 K V (K / C + 1). Bytes: `recurrent_delta` reads and writes the state, 8 K V, at every token;
`chunked_delta` saves residuals of 4 (4 K + 3 V) for rows, 16 C for triangles and 4 K V / C for states.

One product per chunk in the scan would do, with its matrix (b h)ᵀ W computed before for all chunks; that takes more
FLOPs, and was no faster on a CPU. `scripts/bench.py --parts recurrences` measures every case.

Rounding is the error of a triangular system, 6e-8 of the largest terms times the growth in the inverse. For keys in
random directions this is the error of a sum; for nearly parallel keys with beta near 2, where rows cancel alternately,
it is up to C times larger. Scalar decays add 6e-8 of their sum over a chunk. In half precision the operands of products
are rounded, and with them every u; the inverse, the states and decays are float32.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from zoo.shapes import LogDecays, MatrixState, Queries, SegmentIds, Values

from ..custom_vjps import refuse_forward_mode
from .affine import IncomingState
from .chunks import find_segment_starts, join_chunks
from .generalized_delta_chunks import DeltaChunks, DeltaOperands, scan_chunks, scan_chunks_of_shard
from .select import make_recurrence

_CHUNK_SIZE = 64
"""Rows per chunk, `steps` for each token: a power of two."""

_RowKeys = Float[Array, "batch rows heads key_dim"]
_RowValues = Float[Array, "batch rows heads value_dim"]


def recurrent_delta(
    query: Queries,
    read: _RowKeys,
    write: _RowKeys,
    write_value: _RowValues | None = None,
    *,
    key: _RowKeys | None = None,
    value: _RowValues | None = None,
    log_decay: LogDecays | None = None,
    steps: int = 1,
    read_before_decay: bool = False,
    scale: float | int = 1.0,
    state: MatrixState | None = None,
    segment_ids: SegmentIds | None = None,
) -> tuple[Values, MatrixState]:
    """Scan over tokens in float32: returns the outputs and the state after the last token.

    There are seq * `steps` rows; the rows of a token are adjacent. `state` is the initial state, zero by default; every
    segment but the first resets it.

    **Raises** `ValueError` if rows are not seq * steps, if keys come without values or the reverse, and if there is
    neither `write_value` nor `value`.
    """
    operands = DeltaOperands.from_arrays(query, read, write, write_value, key, value, log_decay, state, steps)
    dtype = operands.dtype
    seq = query.shape[1]
    if segment_ids is None:
        starts = jnp.zeros(query.shape[:2], bool)
    else:
        starts = find_segment_starts(segment_ids)

    def step(state: Array, token: tuple) -> tuple[Array, Array]:
        query, read, write, write_value, key, value, decay, is_start = token
        state = jnp.where(is_start[:, None, None, None], 0, state)
        for i in range(steps):
            read_state = state
            if i == 0:
                state = decay[..., None] * state
                if not read_before_decay:
                    read_state = state
            update = (read[i][..., None] * read_state).sum(-2)
            if write_value is not None:
                update = write_value[i] + update
            state = state + write[i][..., None] * update[..., None, :]
            if key is not None and value is not None:
                state = state + key[i][..., None] * value[i][..., None, :]
        return state, (query[..., None] * state).sum(-2)

    def split_steps(x: Array) -> Array:
        return jnp.moveaxis(x.astype(jnp.float32).reshape(x.shape[0], seq, steps, *x.shape[2:]), 0, 2)

    rows = (operands.read, operands.write, operands.write_value, operands.key, operands.value)
    rows = jax.tree.map(split_steps, rows)
    tokens = (operands.query.astype(jnp.float32), jnp.exp(operands.log_decay), starts)
    query, decay, starts = (x.swapaxes(0, 1) for x in tokens)
    state, output = lax.scan(step, operands.state, (query, *rows, decay, starts))
    return (scale * output.swapaxes(0, 1)).astype(dtype), state


def chunked_delta(
    query: Queries,
    read: _RowKeys,
    write: _RowKeys,
    write_value: _RowValues | None = None,
    *,
    key: _RowKeys | None = None,
    value: _RowValues | None = None,
    log_decay: LogDecays | None = None,
    steps: int = 1,
    read_before_decay: bool = False,
    scale: float | int = 1.0,
    state: MatrixState | IncomingState | None = None,
    segment_ids: SegmentIds | None = None,
    chunk_size: int = _CHUNK_SIZE,
) -> tuple[Values, MatrixState]:
    """Compute `recurrent_delta` by matrix products over chunks of up to `chunk_size` rows, a power of two.

    For a shard of a sequence `state` is an `IncomingState`, called with the map of the tokens.

    A custom VJP: forward-mode differentiation raises `TypeError`.

    **Raises** `ValueError` as `recurrent_delta`, and for a `chunk_size` that is not a power of two or below `steps`.
    """
    find_state = None
    if callable(state):
        find_state = state
        state = None
    operands = DeltaOperands.from_arrays(query, read, write, write_value, key, value, log_decay, state, steps)
    operands = refuse_forward_mode(operands, "the chunked delta rule")
    chunks = DeltaChunks(operands, segment_ids, steps, read_before_decay, chunk_size)
    transition = chunks.compute_transition()
    if find_state is None:
        last, boundary_states, updates = scan_chunks(operands.state, transition)
    else:
        last, boundary_states, updates = scan_chunks_of_shard(find_state, operands.state, transition)
    output = (scale * chunks.compute_output(boundary_states, updates)).astype(operands.dtype)
    return join_chunks(output, query.shape[1]), last


def scan_heads(step: Callable, state: MatrixState, *tokens: Array) -> tuple[Array, MatrixState]:
    """Run `step(state, *token)` over the tokens of each head in float32: returns the outputs and the last state.

    For references, which are written for one head and one token.
    """
    scan_head = lambda state, *tokens: lax.scan(lambda state, token: step(state, *token), state, tokens)
    over_heads = jax.vmap(scan_head, in_axes=(0, *(1 for _ in tokens)), out_axes=(0, 1))
    with jax.default_matmul_precision("highest"):
        state, output = jax.vmap(over_heads)(*(x.astype(jnp.float32) for x in (state, *tokens)))
    return output, state


GENERALIZED_DELTA = make_recurrence("generalized delta rule", recurrent_delta, chunked_delta)
"""Implementations of the generalized delta rule, in the order in which `"auto"` tries them."""
