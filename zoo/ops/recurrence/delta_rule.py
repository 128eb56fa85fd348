"""Delta rules: a state that is read with the key, and corrected toward the value, before it is asked.

    S_t = decayed S_{t-1};   S_t += k_t (beta_t (v_t - k_t · S_t))ᵀ;   o_t = key_dim ** -0.5 q_t · S_t

`delta_rule` has no decay (Schlag et al., arXiv:2102.11174, section 4.2; in parallel: arXiv:2406.06484),
`gated_delta_rule` a number a head (Gated DeltaNet, arXiv:2412.06464, section 3.1), `kda` one for each of key_dim (Kimi
Linear, arXiv:2510.26692, section 3), `gated_delta_product` a number a head and several corrections a token
(DeltaProduct, arXiv:2502.10297, section 4). Keys are as they are given: layers normalize them to length one, with which
beta in [0, 2] keeps the state from growing. All give the outputs, in the dtype of the values, and the state after the
last token, in float32; state, segments and forms are those of `zoo.ops.delta`, where costs and rounding are too.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .chunks import RecurrenceMode
from .generalized_delta import Decay, MatrixState, select_delta

_Queries = Float[Array, "batch seq heads key_dim"]
_Values = Float[Array, "batch seq heads value_dim"]
_SegmentIds = Int[Array, "batch seq"]


def delta_rule(
    query: _Queries,
    key: _Queries,
    value: _Values,
    beta: Float[Array, "batch seq heads"],
    *,
    state: MatrixState | None = None,
    segment_ids: _SegmentIds | None = None,
    mode: RecurrenceMode = "chunked",
) -> tuple[_Values, MatrixState]:
    """S_t = S_{t-1} + k_t (beta_t (v_t - k_t · S_{t-1}))ᵀ,  o_t = key_dim ** -0.5 q_t · S_t."""
    return _apply_delta_rule(query, key, value, beta, None, 1, state, segment_ids, mode)


def gated_delta_rule(
    query: _Queries,
    key: _Queries,
    value: _Values,
    beta: Float[Array, "batch seq heads"],
    log_decay: Float[Array, "batch seq heads"],
    *,
    state: MatrixState | None = None,
    segment_ids: _SegmentIds | None = None,
    mode: RecurrenceMode = "chunked",
) -> tuple[_Values, MatrixState]:
    """R_t = exp(g_t) S_{t-1},  S_t = R_t + k_t (beta_t (v_t - k_t · R_t))ᵀ,  o_t = key_dim ** -0.5 q_t · S_t."""
    return _apply_delta_rule(query, key, value, beta, log_decay, 1, state, segment_ids, mode)


def kda(
    query: _Queries,
    key: _Queries,
    value: _Values,
    beta: Float[Array, "batch seq heads"],
    log_decay: _Queries,
    *,
    state: MatrixState | None = None,
    segment_ids: _SegmentIds | None = None,
    mode: RecurrenceMode = "chunked",
) -> tuple[_Values, MatrixState]:
    """The gated delta rule with R_t = diag(exp(g_t)) S_{t-1}, a decay for each row of the state."""
    return _apply_delta_rule(query, key, value, beta, log_decay, 1, state, segment_ids, mode)


def gated_delta_product(
    query: _Queries,
    key: Float[Array, "batch rows heads key_dim"],
    value: Float[Array, "batch rows heads value_dim"],
    beta: Float[Array, "batch rows heads"],
    log_decay: Float[Array, "batch seq heads"],
    *,
    state: MatrixState | None = None,
    segment_ids: _SegmentIds | None = None,
    mode: RecurrenceMode = "chunked",
) -> tuple[_Values, MatrixState]:
    """exp(g_t) S_{t-1}, then n delta rules one after another with rows n t to n t + n - 1, then the query reads.

    n is rows / seq, 2 in DeltaProduct's models. **Raises** `ValueError` where that is no whole number.
    """
    return _apply_delta_rule(
        query, key, value, beta, log_decay, key.shape[1] // query.shape[1], state, segment_ids, mode
    )


def _apply_delta_rule(
    query: Array,
    key: Array,
    value: Array,
    beta: Array,
    log_decay: Decay | None,
    steps: int,
    state: Array | None,
    segment_ids: Array | None,
    mode: RecurrenceMode,
) -> tuple[Array, Array]:
    """Delta rules as the recurrence that they are cases of: reads -beta k, writes k, and new beta v."""
    rate = beta.astype(jnp.float32)[..., None]
    return select_delta(mode)(
        query,
        (-rate * key).astype(key.dtype),
        key,
        (rate * value).astype(value.dtype),
        log_decay=log_decay,
        steps=steps,
        scale=query.shape[-1] ** -0.5,
        state=state,
        segment_ids=segment_ids,
    )
