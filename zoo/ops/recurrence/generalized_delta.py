"""Recurrences that read their state before they write to it: the delta rule, and all that generalizes it.

    u_t = c_t + a_t · R_t                                             a, b, k: [key_dim], c, v: [value_dim] of each head
    S_t = diag(exp(g_t)) S_{t-1} + b_t u_tᵀ + k_t v_tᵀ                S: [key_dim, value_dim]
    o_t = scale q_t · S_t

a is `read`, b `write`, c `new`, g <= 0 the log decay: nothing, a number a head or a number for each of key_dim. R_t is
the state after the decay of its step, diag(exp(g_t)) S_{t-1}, or `before` it, S_{t-1}. Delta rules (Yang et al.,
arXiv:2406.06484; gated: arXiv:2412.06464; a vector of decays: Kimi Linear, arXiv:2510.26692) have a = -beta k, b = k
and c = beta v, and beta up to 2 gives negative eigenvalues (arXiv:2411.12537); RWKV-7 (arXiv:2503.14456) reads before
the decay and has keys and values of its own in place of c; DeltaProduct (arXiv:2502.10297) takes several `steps` a
token, of which the first decays and after the last of which the query reads.

`recurrent` is this, one token after another: the oracle, and the step of decoding. `chunked` is what trains. Of a chunk
of C rows let e_ij be the decay between the writing of row j and the reading of row i, f_i that from the chunk's start
to row i, h_j that from row j to the end, and S the state before. Its u solve a triangular system (the WY form:
arXiv:2406.06484, section 3.2),

    (I - L) U = c + P v + (a f) S                       L_ij = a_i e_ij b_j for j < i, P the same with k for b
    o  = scale [(q f) S + M U + N v]                    M_ij = q_i e_ij b_j for j <= i, N the same with k for b
    S' = f_C S + (b h)ᵀ U + (k h)ᵀ v

so that U = W S + U0, with W and U0 the solutions for a f and c + P v. These, and the outputs when states are known, are
batched products over all chunks; two products a chunk wait for one another in `lax.scan` (`delta_chunks.follow`).

FLOPs a token and head, K and V being key_dim and value_dim: `recurrent` 7 K V; `chunked` with a delta rule C (6 K + 4
V) for triangles, solutions and outputs, 5 C^2 for the inverse, 6 K V with the state; a gradient twice that again, the
inverse excepted. RWKV-7's own keys and values add C (4 K + 4 V) + 2 K V. Bytes: `recurrent` reads and writes the state,
8 K V, at every token; `chunked` keeps 4 (4 K + 3 V) of rows, 16 C of triangles and 4 K V / C of states for a gradient.

One product a chunk in the scan would do, with its matrix (b h)ᵀ W made before it for all chunks; that is more to
multiply, and on a CPU it was no faster. `scripts/bench.py --parts recurrences` takes the time of every case.

Rounding: that of a triangular system, 6e-8 of the largest terms times the growth in the inverse; for keys in random
directions that is that of a sum, and for keys nearly parallel with beta near 2, where all rows cancel in turn, up to C
times more. Decays that are numbers add 6e-8 of their sum over a chunk. In half precision the operands of products are
rounded, and with them every u; the inverse, the states and decays are float32.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ..varying import vary, varying
from .chunks import RecurrenceMode, find_segment_starts, join_chunks
from .generalized_delta_chunks import DeltaChunks, DeltaOperands, scan_chunks

_CHUNK_SIZE = 64
"""Rows in a chunk, `steps` for each token: a power of two."""

Decay = Float[Array, "batch seq heads"] | Float[Array, "batch seq heads key_dim"]
MatrixState = Float[Array, "batch heads key_dim value_dim"]
_RowKeys = Float[Array, "batch rows heads key_dim"]
_RowValues = Float[Array, "batch rows heads value_dim"]


class _DenseAffineMap(NamedTuple):
    """What a stretch of tokens does to the state: S -> factor S + added. Two stretches one after the other are
    (f2 f1, f2 a1 + a2), which is how a sequence that is split over devices learns its incoming states."""

    factor: Float[Array, "batch heads key_dim key_dim"]
    """0 where a segment began in the stretch."""
    offset: MatrixState


def select_delta(mode: RecurrenceMode) -> Callable:
    """`recurrent` or `chunked`."""
    return {"recurrent": recurrent_delta, "chunked": chunked_delta}[mode]


def recurrent_delta(
    query: Float[Array, "batch seq heads key_dim"],
    read: _RowKeys,
    write: _RowKeys,
    write_value: _RowValues | None = None,
    *,
    key: _RowKeys | None = None,
    value: _RowValues | None = None,
    log_decay: Decay | None = None,
    steps: int = 1,
    read_before_decay: bool = False,
    scale: float | int = 1.0,
    state: MatrixState | None = None,
    segment_ids: Int[Array, "batch seq"] | None = None,
) -> tuple[Float[Array, "batch seq heads value_dim"], MatrixState]:
    """The definition, one token after another, in float32: the outputs, and the state after the last.

    The rows of a token, seq * `steps` in all, follow one another. The state goes on from `state`, zero unless given,
    and begins anew with every segment but the first.

    **Raises** `ValueError` where rows are not seq * steps, where a key has no value or a value no key, and where there
    is neither `new` nor `value`.
    """
    given = DeltaOperands.from_arrays(query, read, write, write_value, key, value, log_decay, state, steps)
    dtype, seq = given.dtype, query.shape[1]
    first = jnp.zeros(query.shape[:2], bool) if segment_ids is None else find_segment_starts(segment_ids)

    def step(state: Array, now: tuple) -> tuple[Array, Array]:
        query, read, write, new, key, value, decay, first = now
        state = jnp.where(first[:, None, None, None], 0, state)
        for i in range(steps):
            seen = state
            if i == 0:
                state = decay[..., None] * state
                seen = seen if read_before_decay else state
            update = 0 if new is None else new[i]
            update = update + (read[i][..., None] * seen).sum(-2)
            state = state + write[i][..., None] * update[..., None, :]
            if key is not None and value is not None:
                state = state + key[i][..., None] * value[i][..., None, :]
        return state, (query[..., None] * state).sum(-2)

    rows = [
        None if x is None else jnp.moveaxis(x.astype(jnp.float32).reshape(len(x), seq, steps, *x.shape[2:]), 0, 2)
        for x in (given.read, given.write, given.write_value, given.key, given.value)
    ]
    tokens = (given.query.astype(jnp.float32), jnp.exp(given.log_decay), first)
    query, decay, first = (x.swapaxes(0, 1) for x in tokens)
    state, output = lax.scan(step, given.state, (query, *rows, decay, first))
    return (scale * output.swapaxes(0, 1)).astype(dtype), state


def chunked_delta(
    query: Float[Array, "batch seq heads key_dim"],
    read: _RowKeys,
    write: _RowKeys,
    write_value: _RowValues | None = None,
    *,
    key: _RowKeys | None = None,
    value: _RowValues | None = None,
    log_decay: Decay | None = None,
    steps: int = 1,
    read_before_decay: bool = False,
    scale: float | int = 1.0,
    state: MatrixState | None = None,
    segment_ids: Int[Array, "batch seq"] | None = None,
    chunk_size: int = _CHUNK_SIZE,
) -> tuple[Float[Array, "batch seq heads value_dim"], MatrixState]:
    """The same in matrix products over chunks of up to `chunk` rows, a power of two.

    There is no forward-mode differentiation, which JAX says with a `TypeError`.

    **Raises** `ValueError` as `recurrent` does, and for a `chunk` that is no power of two or below `steps`.
    """
    given = DeltaOperands.from_arrays(query, read, write, write_value, key, value, log_decay, state, steps)
    chunks = DeltaChunks(given, segment_ids, steps, read_before_decay, chunk_size)
    last, borders, updates = scan_chunks(given.state, chunks.compute_transition())
    return join_chunks((scale * chunks.compute_output(borders, updates)).astype(given.dtype), query.shape[1]), last


def affine_delta(
    read: _RowKeys,
    write: _RowKeys,
    write_value: _RowValues | None = None,
    *,
    key: _RowKeys | None = None,
    value: _RowValues | None = None,
    log_decay: Decay | None = None,
    steps: int = 1,
    read_before_decay: bool = False,
    segment_ids: Int[Array, "batch seq"] | None = None,
    chunk_size: int = _CHUNK_SIZE,
) -> _DenseAffineMap:
    """What these tokens do to any state before them; the first token's segment goes on from before.

    The columns of the identity and a state of zeros go through the chunks side by side. **Raises** as `chunked` does.
    """
    seq = read.shape[1] // steps
    given = DeltaOperands.from_arrays(read[:, :seq], read, write, write_value, key, value, log_decay, None, steps)
    chunks = DeltaChunks(given, segment_ids, steps, read_before_decay, chunk_size)
    width = read.shape[3]
    unit = vary(jnp.broadcast_to(jnp.eye(width), (*given.state.shape[:2], width, width)), varying(given.state))
    beside = lambda left, right: jnp.concatenate([left, right], axis=-1)
    transition = chunks.compute_transition()
    none = lambda x: None if x is None else beside(jnp.zeros((*x.shape[:-1], width), x.dtype), x)
    transition = transition._replace(constant=none(transition.constant), kv_update=none(transition.kv_update))
    state, _, _ = scan_chunks(beside(unit, given.state), transition)
    return _DenseAffineMap(state[..., :width], state[..., width:])
