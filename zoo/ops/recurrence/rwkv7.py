"""RWKV-7: a generalized delta rule with separate read, write and key vectors and one decay per key channel.

    S_t = diag(exp(g_t)) S_{t-1} + b_t (a_t · S_{t-1})ᵀ + k_t v_tᵀ,    o_t = q_t · S_t

(Peng et al., arXiv:2503.14456, section 4, with the state transposed: their receptance is the query, a_t is minus the
removal key, b_t the removal key times the in-context learning rate.)
"""

import jax.numpy as jnp

from zoo.shapes import MatrixState, Queries, SegmentIds, Values

from .affine import IncomingState
from .generalized_delta import GENERALIZED_DELTA, scan_heads
from .select import RecurrenceRequest


def rwkv7(
    query: Queries,
    key: Queries,
    value: Values,
    log_decay: Queries,
    read: Queries,
    write: Queries,
    *,
    state: MatrixState | IncomingState | None = None,
    segment_ids: SegmentIds | None = None,
    implementation: str = "auto",
) -> tuple[Values, MatrixState]:
    """Compute RWKV-7's recurrence, S_t = diag(exp(g_t)) S_{t-1} + write_t (read_t · S_{t-1})ᵀ + k_t v_tᵀ,
    o_t = q_t · S_t.

    `read` reads the state before the decay; outputs are not scaled. Returns the outputs, in the dtype of `value`, and
    the state after the last token, in float32. For state, segments and implementations see
    `zoo.ops.recurrence.generalized_delta`.
    """
    request = RecurrenceRequest.from_heads(query, value, log_decay, state=state)
    return GENERALIZED_DELTA.select(implementation, request).function(
        query,
        read,
        write,
        key=key,
        value=value,
        log_decay=log_decay,
        read_before_decay=True,
        state=state,
        segment_ids=segment_ids,
    )


def rwkv7_reference(
    query: Queries,
    key: Queries,
    value: Values,
    log_decay: Queries,
    read: Queries,
    write: Queries,
    *,
    state: MatrixState,
) -> tuple[Values, MatrixState]:
    """Compute S_t = (diag(exp(g_t)) + b_t a_tᵀ) S_{t-1} + k_t v_tᵀ (arXiv:2503.14456, section 4, transposed)."""

    def step(S, q, k, v, g, a, b):
        S = (jnp.diag(jnp.exp(g)) + jnp.outer(b, a)) @ S + jnp.outer(k, v)
        return S, q @ S

    return scan_heads(step, state, query, key, value, log_decay, read, write)
