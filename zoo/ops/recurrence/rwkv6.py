"""RWKV-6's time mixing: one decay per key channel and token, and a bonus for the current token."""

from jaxtyping import Array, Float

from zoo.shapes import MatrixState, Queries, SegmentIds, Values

from .affine import IncomingState
from .gated_linear import gated_linear


def rwkv6(
    query: Queries,
    key: Queries,
    value: Values,
    log_decay: Queries,
    bonus: Float[Array, "heads key_dim"],
    *,
    state: MatrixState | IncomingState | None = None,
    segment_ids: SegmentIds | None = None,
    implementation: str = "auto",
) -> tuple[Values, MatrixState]:
    """Compute RWKV-6's recurrence: o_t = q_tᵀ (S_{t-1} + diag(u) k_t v_tᵀ); S_t = diag(exp(g_t)) S_{t-1} + k_t v_tᵀ.

    The current token gets the bonus u instead of a decay. Outputs are not scaled. For costs and rounding see
    `zoo.ops.recurrence.gated_linear`. Source: Peng et al., Eagle and Finch, arXiv:2404.05892, equations 18 and 19,
    where queries are called receptance.
    """
    options = {"state": state, "segment_ids": segment_ids, "implementation": implementation}
    return gated_linear(query, key, value, log_decay, bonus=bonus, **options)
