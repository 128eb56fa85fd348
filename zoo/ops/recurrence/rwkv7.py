"""RWKV-7: a state that forgets, is read and corrected in directions of their own, and added to.

    S_t = diag(exp(g_t)) S_{t-1} + b_t (a_t · S_{t-1})ᵀ + k_t v_tᵀ,    o_t = q_t · S_t

(Peng et al., arXiv:2503.14456, section 4, with the state transposed: their receptance is the query, a_t is minus the
removal key, b_t the removal key times the in-context learning rate.)
"""

from jaxtyping import Array, Float, Int

from .chunks import RecurrenceMode
from .generalized_delta import MatrixState, select_delta

_Queries = Float[Array, "batch seq heads key_dim"]
_Values = Float[Array, "batch seq heads value_dim"]


def rwkv7(
    query: _Queries,
    key: _Queries,
    value: _Values,
    log_decay: _Queries,
    read: _Queries,
    write: _Queries,
    *,
    state: MatrixState | None = None,
    segment_ids: Int[Array, "batch seq"] | None = None,
    mode: RecurrenceMode = "chunked",
) -> tuple[_Values, MatrixState]:
    """S_t = diag(exp(g_t)) S_{t-1} + write_t (read_t · S_{t-1})ᵀ + k_t v_tᵀ,  o_t = q_t · S_t, without a scale.

    What is read is the state before the decay. Gives the outputs, in the dtype of `value`, and the state after the
    last token, in float32; state, segments and forms are those of `zoo.ops.delta`.
    """
    return select_delta(mode)(
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
