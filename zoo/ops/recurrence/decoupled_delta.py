"""Delta rules that read with another vector than they write: Gated DeltaNet-2 and Comba.

    Gated DeltaNet-2    R_t = diag(exp(g_t)) S_{t-1};   S_t = R_t + k_t (w_t * v_t - (b_t * k_t) · R_t)ᵀ
    Comba               R_t = exp(g_t) S_{t-1};         S_t = R_t + k_t (beta_t (v_t - p_t · S_{t-1}))ᵀ

and o_t = key_dim ** -0.5 q_t · S_t. A delta rule has one beta for what it erases and what it writes. `gdn2` (Gated
DeltaNet-2, arXiv:2605.22791) has an erase gate b per key channel and a write gate w per value channel: with b = w =
beta it is KDA. `comba` (Hu et al., arXiv:2506.02475) reads what it erases with p, which is the key times a factor in
(0, 1), and before the decay of the token: the transition of the state, exp(g) I - beta k pᵀ, is a scalar plus a matrix
of rank one.

Both are a `generalized_delta`, in both of its modes, and as exact as it is; for state, segments, costs and rounding see
there. They return the outputs, in the dtype of the values, and the state after the last token, in float32. Each has a
`_reference`: the paper's equation, token by token.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from zoo.shapes import MatrixState, Queries, SegmentIds, Values

from .affine import IncomingState
from .generalized_delta import GENERALIZED_DELTA, scan_heads
from .select import RecurrenceRequest


def gdn2(
    query: Queries,
    key: Queries,
    value: Values,
    log_decay: Queries,
    erase: Queries,
    write: Values,
    *,
    state: MatrixState | IncomingState | None = None,
    segment_ids: SegmentIds | None = None,
    implementation: str = "auto",
) -> tuple[Values, MatrixState]:
    """Compute Gated DeltaNet-2: R_t = diag(exp(g_t)) S_{t-1},  S_t = R_t + k_t (w_t * v_t - (b_t * k_t) · R_t)ᵀ,
    o_t = key_dim ** -0.5 q_t · S_t, with the gates b = `erase` and w = `write`."""
    request = RecurrenceRequest.from_heads(query, value, log_decay, state=state, segment_ids=segment_ids)
    return GENERALIZED_DELTA.select(implementation, request).function(
        query,
        (-erase.astype(jnp.float32) * key).astype(key.dtype),
        key,
        (write.astype(jnp.float32) * value).astype(value.dtype),
        log_decay=log_decay,
        scale=query.shape[-1] ** -0.5,
        state=state,
        segment_ids=segment_ids,
    )


def gdn2_reference(
    query: Queries,
    key: Queries,
    value: Values,
    log_decay: Queries,
    erase: Queries,
    write: Values,
    *,
    state: MatrixState,
) -> tuple[Values, MatrixState]:
    """Compute S_t = (I - k_t (b_t * k_t)ᵀ) diag(exp(g_t)) S_{t-1} + k_t (w_t * v_t)ᵀ (arXiv:2605.22791)."""

    def step(S, q, k, v, g, b, w):
        S = (jnp.eye(len(k)) - jnp.outer(k, b * k)) @ (jnp.exp(g)[:, None] * S) + jnp.outer(k, w * v)
        return S, q @ S * len(q) ** -0.5

    return scan_heads(step, state, query, key, value, log_decay, erase, write)


def comba(
    query: Queries,
    key: Queries,
    value: Values,
    read: Queries,
    beta: Float[Array, "batch seq heads"],
    log_decay: Float[Array, "batch seq heads"],
    *,
    read_before_decay: bool = True,
    state: MatrixState | IncomingState | None = None,
    segment_ids: SegmentIds | None = None,
    implementation: str = "auto",
) -> tuple[Values, MatrixState]:
    """Compute Comba: S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - p_t · S_{t-1}))ᵀ,  o_t = key_dim ** -0.5 q_t · S_t,
    with p = `read`. The output correction of the paper is in the queries: q is its q_t - d k_t.

    Without `read_before_decay` p reads exp(g_t) S_{t-1}, and p = k gives Gated DeltaNet. In flash-linear-attention the
    kernels read before the decay, and `naive_recurrent_comba` reads after it.
    """
    request = RecurrenceRequest.from_heads(query, value, log_decay, state=state, segment_ids=segment_ids)
    rate = beta.astype(jnp.float32)[..., None]
    return GENERALIZED_DELTA.select(implementation, request).function(
        query,
        (-rate * read).astype(read.dtype),
        key,
        (rate * value).astype(value.dtype),
        log_decay=log_decay,
        read_before_decay=read_before_decay,
        scale=query.shape[-1] ** -0.5,
        state=state,
        segment_ids=segment_ids,
    )


def comba_reference(
    query: Queries,
    key: Queries,
    value: Values,
    read: Queries,
    beta: Float[Array, "batch seq heads"],
    log_decay: Float[Array, "batch seq heads"],
    *,
    state: MatrixState,
) -> tuple[Values, MatrixState]:
    """Compute S_t = (exp(g_t) I - beta_t k_t p_tᵀ) S_{t-1} + beta_t k_t v_tᵀ (arXiv:2506.02475, transposed)."""

    def step(S, q, k, v, p, beta, g):
        S = (jnp.exp(g) * jnp.eye(len(k)) - beta * jnp.outer(k, p)) @ S + beta * jnp.outer(k, v)
        return S, q @ S * len(q) ** -0.5

    return scan_heads(step, state, query, key, value, read, beta, log_decay)
