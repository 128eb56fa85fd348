"""Delta rules: linear attention that corrects the value stored under a key instead of adding to it.

    S_t = decayed S_{t-1};   S_t += k_t (beta_t (v_t - k_t · S_t))ᵀ;   o_t = key_dim ** -0.5 q_t · S_t

`delta_rule` has no decay (DeltaNet: Schlag et al., arXiv:2102.11174, section 4.2; in parallel: arXiv:2406.06484),
`gated_delta_rule` one decay per head (Gated DeltaNet, arXiv:2412.06464, section 3.1), `kda` one per key channel (Kimi
Linear, arXiv:2510.26692, section 3), `gated_delta_product` one decay per head and several corrections per token
(DeltaProduct, arXiv:2502.10297, section 4). Layers normalize keys to length one, so that beta in [0, 2] keeps the state
bounded; here keys are used as given.

All return the outputs, in the dtype of the values, and the state after the last token, in float32. For state, segments,
costs and rounding see `zoo.ops.recurrence.generalized_delta`. Each has a `_reference`: the paper's equation, token by
token.
"""

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Float

from zoo.shapes import LogDecays, MatrixState, Queries, SegmentIds, Values

from .affine import IncomingState
from .generalized_delta import chunked_delta, recurrent_delta, scan_heads
from .pallas.common import make_pallas_implementation
from .pallas.delta_rule import find_delta_rule_obstacle, pallas_delta_rule
from .select import RecurrenceRequest, make_recurrence
from .tokamax_delta_rule import TOKAMAX


def delta_rule(
    query: Queries,
    key: Queries,
    value: Values,
    beta: Float[Array, "batch seq heads"],
    *,
    state: MatrixState | IncomingState | None = None,
    segment_ids: SegmentIds | None = None,
    implementation: str = "auto",
) -> tuple[Values, MatrixState]:
    """Compute the delta rule: S_t = S_{t-1} + k_t (beta_t (v_t - k_t · S_{t-1}))ᵀ,  o_t = key_dim ** -0.5 q_t · S_t."""
    return _apply_delta_rule(query, key, value, beta, None, 1, state, segment_ids, implementation)


def delta_rule_reference(
    query: Queries, key: Queries, value: Values, beta: Float[Array, "batch seq heads"], *, state: MatrixState
) -> tuple[Values, MatrixState]:
    """Compute S_t = (I - beta_t k_t k_tᵀ) S_{t-1} + beta_t k_t v_tᵀ (arXiv:2406.06484, section 2.2, transposed)."""

    def step(S, q, k, v, beta):
        S = (jnp.eye(len(k)) - beta * jnp.outer(k, k)) @ S + beta * jnp.outer(k, v)
        return S, q @ S * len(q) ** -0.5

    return scan_heads(step, state, query, key, value, beta)


def gated_delta_rule(
    query: Queries,
    key: Queries,
    value: Values,
    beta: Float[Array, "batch seq heads"],
    log_decay: Float[Array, "batch seq heads"],
    *,
    state: MatrixState | IncomingState | None = None,
    segment_ids: SegmentIds | None = None,
    implementation: str = "auto",
) -> tuple[Values, MatrixState]:
    """Compute the gated delta rule: R_t = exp(g_t) S_{t-1},  S_t = R_t + k_t (beta_t (v_t - k_t · R_t))ᵀ,
    o_t = key_dim ** -0.5 q_t · S_t."""
    return _apply_delta_rule(query, key, value, beta, log_decay, 1, state, segment_ids, implementation)


def gated_delta_rule_reference(
    query: Queries,
    key: Queries,
    value: Values,
    beta: Float[Array, "batch seq heads"],
    log_decay: Float[Array, "batch seq heads"],
    *,
    state: MatrixState,
) -> tuple[Values, MatrixState]:
    """Compute S_t = exp(g_t) (I - beta_t k_t k_tᵀ) S_{t-1} + beta_t k_t v_tᵀ (arXiv:2412.06464, section 3.1,
    transposed)."""

    def step(S, q, k, v, beta, g):
        S = jnp.exp(g) * (jnp.eye(len(k)) - beta * jnp.outer(k, k)) @ S + beta * jnp.outer(k, v)
        return S, q @ S * len(q) ** -0.5

    return scan_heads(step, state, query, key, value, beta, log_decay)


def kda(
    query: Queries,
    key: Queries,
    value: Values,
    beta: Float[Array, "batch seq heads"],
    log_decay: Queries,
    *,
    state: MatrixState | IncomingState | None = None,
    segment_ids: SegmentIds | None = None,
    implementation: str = "auto",
) -> tuple[Values, MatrixState]:
    """Compute Kimi Delta Attention: the gated delta rule with R_t = diag(exp(g_t)) S_{t-1}, one decay per key
    channel."""
    return _apply_delta_rule(query, key, value, beta, log_decay, 1, state, segment_ids, implementation)


def kda_reference(
    query: Queries,
    key: Queries,
    value: Values,
    beta: Float[Array, "batch seq heads"],
    log_decay: Queries,
    *,
    state: MatrixState,
) -> tuple[Values, MatrixState]:
    """Compute S_t = (I - beta_t k_t k_tᵀ) diag(exp(g_t)) S_{t-1} + beta_t k_t v_tᵀ (arXiv:2510.26692, section 3)."""

    def step(S, q, k, v, beta, g):
        S = (jnp.eye(len(k)) - beta * jnp.outer(k, k)) @ (jnp.exp(g)[:, None] * S) + beta * jnp.outer(k, v)
        return S, q @ S * len(q) ** -0.5

    return scan_heads(step, state, query, key, value, beta, log_decay)


def gated_delta_product(
    query: Queries,
    key: Float[Array, "batch rows heads key_dim"],
    value: Float[Array, "batch rows heads value_dim"],
    beta: Float[Array, "batch rows heads"],
    log_decay: Float[Array, "batch seq heads"],
    *,
    state: MatrixState | IncomingState | None = None,
    segment_ids: SegmentIds | None = None,
    implementation: str = "auto",
) -> tuple[Values, MatrixState]:
    """Compute gated DeltaProduct: decay by exp(g_t), apply n delta rules with rows n t to n t + n - 1, then read.

    n is rows / seq, 2 in DeltaProduct's models. **Raises** `ValueError` if it is not an integer.
    """
    steps = key.shape[1] // query.shape[1]
    return _apply_delta_rule(query, key, value, beta, log_decay, steps, state, segment_ids, implementation)


def gated_delta_product_reference(
    query: Queries,
    key: Float[Array, "batch rows heads key_dim"],
    value: Float[Array, "batch rows heads value_dim"],
    beta: Float[Array, "batch rows heads"],
    log_decay: Float[Array, "batch seq heads"],
    *,
    state: MatrixState,
) -> tuple[Values, MatrixState]:
    """Compute S_t = prod_j (I - beta_j k_j k_jᵀ) exp(g_t) S_{t-1} + ..., a product of the n Householder transforms of a
    token (arXiv:2502.10297, section 4)."""

    def step(S, q, k, v, beta, g):
        S = jnp.exp(g) * S
        for j in range(len(k)):
            S = (jnp.eye(len(k[j])) - beta[j] * jnp.outer(k[j], k[j])) @ S + beta[j] * jnp.outer(k[j], v[j])
        return S, q @ S * len(q) ** -0.5

    by_token = lambda x: jnp.moveaxis(x.reshape(*query.shape[:2], -1, *x.shape[2:]), 2, 3)
    return scan_heads(step, state, query, by_token(key), by_token(value), by_token(beta), log_decay)


def _apply_delta_rule(
    query: Array,
    key: Array,
    value: Array,
    beta: Array,
    log_decay: LogDecays | None,
    steps: int,
    state: Array | IncomingState | None,
    segment_ids: Array | None,
    implementation: str,
) -> tuple[Array, Array]:
    """Compute a delta rule by an implementation of `DELTA_RULE`."""
    request = RecurrenceRequest.from_heads(query, value, log_decay, steps=steps, state=state, segment_ids=segment_ids)
    run = DELTA_RULE.select(implementation, request).function
    return run(query, key, value, beta, log_decay, state=state, segment_ids=segment_ids)


def _apply_generalized_delta(
    run: Callable,
    query: Array,
    key: Array,
    value: Array,
    beta: Array,
    log_decay: LogDecays | None,
    *,
    state: Array | IncomingState | None,
    segment_ids: Array | None,
) -> tuple[Array, Array]:
    """Run a delta rule as a generalized one with read -beta k, write k and write_value beta v."""
    rate = beta.astype(jnp.float32)[..., None]
    return run(
        query,
        (-rate * key).astype(key.dtype),
        key,
        (rate * value).astype(value.dtype),
        log_decay=log_decay,
        steps=key.shape[1] // query.shape[1],
        scale=query.shape[-1] ** -0.5,
        state=state,
        segment_ids=segment_ids,
    )


DELTA_RULE = make_recurrence(
    "delta rule",
    partial(_apply_generalized_delta, recurrent_delta),
    partial(_apply_generalized_delta, chunked_delta),
    make_pallas_implementation(pallas_delta_rule, find_delta_rule_obstacle),
    TOKAMAX,
)
"""Implementations of the delta rules, in the order in which `"auto"` tries them."""
