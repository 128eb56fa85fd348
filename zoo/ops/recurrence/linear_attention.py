"""Linear attention and its gated kin: cases of one recurrence, `zoo.ops.gated`, which differ in how the state decays.

    linear_attention     not at all                                   Katharopoulos et al., arXiv:2006.16236
    normalized...        not at all; outputs divided by q · sum(k)    the same, equation 12
    retention            by a number a head, fixed                    Sun et al., arXiv:2307.08621, equation 5
    lightning_attention  the same, with other numbers                 Qin et al., arXiv:2401.04658
    simple_gla           by a number a head and token                 Yang et al., arXiv:2312.06635, appendix C
    gla                  by a number a key channel and token          the same, equation 3

Read-outs are scaled by key_dim ** -0.5 unless `scale` says otherwise. Lengths, states, segments, costs and rounding are
as `zoo.ops.gated` has them; each returns the outputs and the state after the last token.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .chunks import RecurrenceMode
from .gated_linear import MatrixState, select_gated_linear

_Queries = Float[Array, "batch seq heads key_dim"]
_Values = Float[Array, "batch seq heads value_dim"]
_SegmentIds = Int[Array, "batch seq"]
_NormalizedState = Float[Array, "batch heads key_dim value_dim+1"]


def linear_attention(
    query: _Queries,
    key: _Queries,
    value: _Values,
    *,
    scale: float | int | None = None,
    state: MatrixState | None = None,
    segment_ids: _SegmentIds | None = None,
    mode: RecurrenceMode = "chunked",
) -> tuple[_Values, MatrixState]:
    """S_t = S_{t-1} + k_t v_tᵀ; o_t = scale q_tᵀ S_t. A feature map of queries and keys is the caller's."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return select_gated_linear(mode)(query, key, value, scale=scale, state=state, segment_ids=segment_ids)


def normalized_linear_attention(
    query: _Queries,
    key: _Queries,
    value: _Values,
    *,
    epsilon: float | int = 0.0,
    state: _NormalizedState | None = None,
    segment_ids: _SegmentIds | None = None,
    mode: RecurrenceMode = "chunked",
) -> tuple[_Values, _NormalizedState]:
    """The same divided by its weights' sum: z_t = z_{t-1} + k_t; o_t = q_tᵀ S_t / (q_t · z_t + epsilon).

    z is one more column of the state: the state is "batch heads key_dim value_dim+1". Where q · z + epsilon is 0, as
    before any token, the output is; features should be positive, or the sum may vanish by chance.
    """
    one = jnp.ones_like(value[..., :1])
    value = jnp.concatenate([value, one], axis=-1)
    output, after = select_gated_linear(mode)(
        query, key, value.astype(jnp.float32), state=state, segment_ids=segment_ids
    )
    total = output[..., -1:] + epsilon
    return (output[..., :-1] / jnp.where(total == 0, 1, total)).astype(one.dtype), after


def retention(
    query: _Queries,
    key: _Queries,
    value: _Values,
    *,
    log_decay: Float[Array, "heads"] | None = None,
    scale: float | int | None = None,
    state: MatrixState | None = None,
    segment_ids: _SegmentIds | None = None,
    mode: RecurrenceMode = "chunked",
) -> tuple[_Values, MatrixState]:
    """S_t = gamma_h S_{t-1} + k_t v_tᵀ; o_t = scale q_tᵀ S_t, with gamma_h = 1 - 2 ** (-5 - h) of head h.

    `log_decay` is log(gamma) of each head, for other decays and for a device that holds some of the heads.
    """
    log_decay = retention_log_decays(value.shape[2]) if log_decay is None else log_decay
    return simple_gla(
        query,
        key,
        value,
        jnp.broadcast_to(log_decay, value.shape[:3]),
        scale=scale,
        state=state,
        segment_ids=segment_ids,
        mode=mode,
    )


def _lightning_attention(
    query: _Queries,
    key: _Queries,
    value: _Values,
    slopes: Float[Array, "heads"],
    *,
    scale: float | int = 1.0,
    state: MatrixState | None = None,
    segment_ids: _SegmentIds | None = None,
    mode: RecurrenceMode = "chunked",
) -> tuple[_Values, MatrixState]:
    """S_t = exp(-slope_h) S_{t-1} + k_t v_tᵀ; o_t = scale q_tᵀ S_t: retention whose decays are ALiBi's slopes.

    See `lightning_slopes`. The paper computes it in blocks for the sake of memory traffic, which is `chunked`.
    """
    options = {"state": state, "segment_ids": segment_ids, "mode": mode}
    return retention(query, key, value, log_decay=-slopes, scale=scale, **options)


def simple_gla(
    query: _Queries,
    key: _Queries,
    value: _Values,
    log_decay: Float[Array, "batch seq heads"],
    *,
    scale: float | int | None = None,
    state: MatrixState | None = None,
    segment_ids: _SegmentIds | None = None,
    mode: RecurrenceMode = "chunked",
) -> tuple[_Values, MatrixState]:
    """S_t = exp(g_t) S_{t-1} + k_t v_tᵀ; o_t = scale q_tᵀ S_t, g_t a number of each head."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return select_gated_linear(mode)(query, key, value, log_decay, scale=scale, state=state, segment_ids=segment_ids)


def gla(
    query: _Queries,
    key: _Queries,
    value: _Values,
    log_decay: Float[Array, "batch seq heads key_dim"],
    *,
    scale: float | int | None = None,
    state: MatrixState | None = None,
    segment_ids: _SegmentIds | None = None,
    mode: RecurrenceMode = "chunked",
) -> tuple[_Values, MatrixState]:
    """S_t = diag(exp(g_t)) S_{t-1} + k_t v_tᵀ; o_t = scale q_tᵀ S_t, g_t a number of each key channel."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return select_gated_linear(mode)(query, key, value, log_decay, scale=scale, state=state, segment_ids=segment_ids)


def retention_log_decays(heads: int) -> Float[Array, "heads"]:
    """log(1 - 2 ** (-5 - h)) of each head h: RetNet's decays, from 1/32 a token on."""
    return jnp.log1p(-(2.0 ** (-5 - jnp.arange(heads, dtype=jnp.float32))))


def lightning_slopes(heads: int, depth: float | int = 0.0) -> Float[Array, "heads"]:
    """2 ** (-8 (h + 1) / heads) (1 - depth) of each head h: steep in the first layers, flat in the last.

    `depth` is a layer's place, 0 for the first and 1 for the last (Qin et al., arXiv:2307.14995, section 3.1; slopes
    as ALiBi's, arXiv:2108.12409, section 3). A layer whose depth is 1 forgets nothing.

    **Raises** `ValueError` for a depth that is not within 0 and 1.
    """
    if not 0 <= depth <= 1:
        raise ValueError(f"lightning_slopes: a depth is 0 for the first layer and 1 for the last, not {depth}")
    return jnp.exp2(-8 * (jnp.arange(heads, dtype=jnp.float32) + 1) / heads) * (1 - depth)
