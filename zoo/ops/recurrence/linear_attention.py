"""Linear attention and its gated variants: instances of `gated_linear` that differ in the decay of the state.

    linear_attention     no decay                                     Katharopoulos et al., arXiv:2006.16236
    normalized...        no decay; outputs divided by q · sum(k)      the same, equation 12
    retention            one constant per head                        Sun et al., arXiv:2307.08621, equation 5
    lightning_attention  the same, with ALiBi slopes                  Qin et al., arXiv:2401.04658
    simple_gla           one per head and token                       Yang et al., arXiv:2312.06635, appendix C
    gla                  one per key channel and token                the same, equation 3

Outputs are scaled by key_dim ** -0.5 by default. For lengths, states, segments, costs and rounding see
`zoo.ops.recurrence.gated_linear`; each function returns the outputs and the state after the last token.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from zoo.shapes import MatrixState, Queries, SegmentIds, Values

from .affine import IncomingState
from .gated_linear import gated_linear

_NormalizedState = Float[Array, "batch heads key_dim value_dim+1"]


def linear_attention(
    query: Queries,
    key: Queries,
    value: Values,
    *,
    scale: float | int | None = None,
    state: MatrixState | IncomingState | None = None,
    segment_ids: SegmentIds | None = None,
    implementation: str = "auto",
) -> tuple[Values, MatrixState]:
    """Compute linear attention: S_t = S_{t-1} + k_t v_tᵀ; o_t = scale q_tᵀ S_t. Callers apply the feature map."""
    options: dict[str, Any] = {"state": state, "segment_ids": segment_ids, "implementation": implementation}
    options["scale"] = query.shape[-1] ** -0.5 if scale is None else scale
    return gated_linear(query, key, value, **options)


def normalized_linear_attention(
    query: Queries,
    key: Queries,
    value: Values,
    *,
    epsilon: float | int = 0.0,
    state: _NormalizedState | IncomingState | None = None,
    segment_ids: SegmentIds | None = None,
    implementation: str = "auto",
) -> tuple[Values, _NormalizedState]:
    """Compute linear attention normalized by the sum of its weights: z_t = z_{t-1} + k_t;
    o_t = q_tᵀ S_t / (q_t · z_t + epsilon).

    z is an additional column of the state, "batch heads key_dim value_dim+1". Where q · z + epsilon is 0, so is the
    output; features should be positive, so that the sum does not vanish.
    """
    ones = jnp.ones_like(value[..., :1])
    value = jnp.concatenate([value, ones], axis=-1)
    options = {"state": state, "segment_ids": segment_ids, "implementation": implementation}
    output, last = gated_linear(query, key, value.astype(jnp.float32), **options)
    total = output[..., -1:] + epsilon
    return (output[..., :-1] / jnp.where(total == 0, 1, total)).astype(ones.dtype), last


def retention(
    query: Queries,
    key: Queries,
    value: Values,
    *,
    log_decay: Float[Array, "heads"] | None = None,
    scale: float | int | None = None,
    state: MatrixState | IncomingState | None = None,
    segment_ids: SegmentIds | None = None,
    implementation: str = "auto",
) -> tuple[Values, MatrixState]:
    """Compute retention (RetNet): S_t = gamma_h S_{t-1} + k_t v_tᵀ; o_t = scale q_tᵀ S_t, with gamma_h = 1 - 2 ** (-5 -
    h) of head h.

    `log_decay` is log(gamma) per head, for other decays and for sharded heads.
    """
    if log_decay is None:
        log_decay = retention_log_decays(value.shape[2])
    return simple_gla(
        query,
        key,
        value,
        jnp.broadcast_to(log_decay, value.shape[:3]),
        scale=scale,
        state=state,
        segment_ids=segment_ids,
        implementation=implementation,
    )


def lightning_attention(
    query: Queries,
    key: Queries,
    value: Values,
    slopes: Float[Array, "heads"],
    *,
    scale: float | int = 1.0,
    state: MatrixState | IncomingState | None = None,
    segment_ids: SegmentIds | None = None,
    implementation: str = "auto",
) -> tuple[Values, MatrixState]:
    """Compute lightning attention: S_t = exp(-slope_h) S_{t-1} + k_t v_tᵀ; o_t = scale q_tᵀ S_t.

    This is retention with ALiBi's slopes, see `lightning_slopes`. The paper's blockwise algorithm is "chunked".
    """
    options = {"state": state, "segment_ids": segment_ids, "implementation": implementation}
    return retention(query, key, value, log_decay=-slopes, scale=scale, **options)


def simple_gla(
    query: Queries,
    key: Queries,
    value: Values,
    log_decay: Float[Array, "batch seq heads"],
    *,
    scale: float | int | None = None,
    state: MatrixState | IncomingState | None = None,
    segment_ids: SegmentIds | None = None,
    implementation: str = "auto",
) -> tuple[Values, MatrixState]:
    """Compute scalar-gated linear attention: S_t = exp(g_t) S_{t-1} + k_t v_tᵀ; o_t = scale q_tᵀ S_t."""
    options: dict[str, Any] = {"state": state, "segment_ids": segment_ids, "implementation": implementation}
    options["scale"] = query.shape[-1] ** -0.5 if scale is None else scale
    return gated_linear(query, key, value, log_decay, **options)


def gla(
    query: Queries,
    key: Queries,
    value: Values,
    log_decay: Float[Array, "batch seq heads key_dim"],
    *,
    scale: float | int | None = None,
    state: MatrixState | IncomingState | None = None,
    segment_ids: SegmentIds | None = None,
    implementation: str = "auto",
) -> tuple[Values, MatrixState]:
    """Compute gated linear attention: S_t = diag(exp(g_t)) S_{t-1} + k_t v_tᵀ; o_t = scale q_tᵀ S_t."""
    options: dict[str, Any] = {"state": state, "segment_ids": segment_ids, "implementation": implementation}
    options["scale"] = query.shape[-1] ** -0.5 if scale is None else scale
    return gated_linear(query, key, value, log_decay, **options)


def retention_log_decays(heads: int) -> Float[Array, "heads"]:
    """Return RetNet's log decays log(1 - 2 ** (-5 - h)) of heads h."""
    return jnp.log1p(-(2.0 ** (-5 - jnp.arange(heads, dtype=jnp.float32))))


def lightning_slopes(heads: int, depth: float | int = 0.0) -> Float[Array, "heads"]:
    """Return the slopes 2 ** (-8 (h + 1) / heads) (1 - depth) of heads h, which get flatter with depth.

    `depth` is the relative depth of a layer, 0 for the first and 1 for the last (Qin et al., arXiv:2307.14995, section
    3.1; slopes as ALiBi's, arXiv:2108.12409, section 3). A layer at depth 1 does not decay.

    **Raises** `ValueError` for a depth outside [0, 1].
    """
    if not 0 <= depth <= 1:
        raise ValueError(f"lightning_slopes: a depth is 0 for the first layer and 1 for the last, not {depth}")
    return jnp.exp2(-8 * (jnp.arange(heads, dtype=jnp.float32) + 1) / heads) * (1 - depth)
