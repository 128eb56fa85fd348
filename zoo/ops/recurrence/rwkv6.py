"""RWKV-6's time mixing: a decay for every key channel and token, and a bonus for the present token."""

from jaxtyping import Array, Float, Int

from .chunks import RecurrenceMode
from .gated_linear import MatrixState, select_gated_linear


def rwkv6(
    query: Float[Array, "batch seq heads key_dim"],
    key: Float[Array, "batch seq heads key_dim"],
    value: Float[Array, "batch seq heads value_dim"],
    log_decay: Float[Array, "batch seq heads key_dim"],
    bonus: Float[Array, "heads key_dim"],
    *,
    state: MatrixState | None = None,
    segment_ids: Int[Array, "batch seq"] | None = None,
    mode: RecurrenceMode = "chunked",
) -> tuple[Float[Array, "batch seq heads value_dim"], MatrixState]:
    """o_t = q_tᵀ (S_{t-1} + diag(u) k_t v_tᵀ); S_t = diag(exp(g_t)) S_{t-1} + k_t v_tᵀ (Peng et al., Eagle and Finch,
    arXiv:2404.05892, equations 18 and 19, where queries are called receptance).

    The present token enters with the bonus u, undecayed. Nothing is scaled. Costs and rounding are those of
    `zoo.ops.gated`.
    """
    return select_gated_linear(mode)(query, key, value, log_decay, bonus=bonus, state=state, segment_ids=segment_ids)
