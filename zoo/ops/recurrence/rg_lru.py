"""Griffin's real-gated linear recurrent unit (RG-LRU), a diagonal scan with one scalar state per channel.

    log a_t = -8 sigmoid(r_t) softplus(a_param)
    h_t = a_t h_{t-1} + sqrt(1 - a_t^2) sigmoid(i_t) x_t,    o_t = h_t

(De et al., arXiv:2402.19427, section 2.4.) The root preserves the variance of h, so it is 1 where there is no
h_{t-1}: at the first token of a row without a state, and of every segment. Its argument is computed as -expm1(2 log a),
because 1 - a^2 cancels for a near 1, and bounded from below, because the gradient of the root is infinite at 0.

FLOPs and bytes per token and channel are those of `zoo.ops.recurrence.diagonal_scan`, and 20 and 12 more for the gates.
Rounding: an error of 1e-7 in a grows T-fold over T tokens that have not decayed; hence everything is float32.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from zoo.ops.recurrence import diagonal_scan
from zoo.ops.recurrence.chunks import find_segment_starts
from zoo.shapes import SegmentIds

SHARPNESS = 8.0
"""The paper's constant c."""
_MIN_SQRT_ARGUMENT = 1e-36
"""Lower bound of 1 - a^2."""


def rg_lru(
    x: Float[Array, "batch seq channels"],
    r: Float[Array, "batch seq channels"],
    i: Float[Array, "batch seq channels"],
    a_param: Float[Array, "channels"],
    *,
    state: Float[Array, "batch channels"] | None = None,
    is_first: Bool[Array, "batch seq"] | None = None,
    segment_ids: SegmentIds | None = None,
    implementation: str = "auto",
) -> tuple[Float[Array, "batch seq channels"], Float[Array, "batch channels"]]:
    """Compute the RG-LRU of `x`, with recurrence gate `r` and input gate `i` before their sigmoids.

    Returns the outputs in the dtype of `x`, and the last h in float32. `state` is the initial state. None is not zero:
    it means that there are no earlier tokens, so the first is not scaled by the root. Segments reset the state.
    """
    gate = jax.nn.sigmoid(r.astype(jnp.float32))
    log_a = -SHARPNESS * gate * jax.nn.softplus(a_param.astype(jnp.float32))
    root = jnp.sqrt(jnp.maximum(-jnp.expm1(2 * log_a), _MIN_SQRT_ARGUMENT))
    if segment_ids is not None:
        root = jnp.where(find_segment_starts(segment_ids)[..., None], 1, root)
    if is_first is not None:
        root = jnp.where(is_first[..., None], 1, root)
    if state is None:
        root = jnp.where(jnp.arange(x.shape[1])[:, None] == 0, 1, root)
    gated_x = root * jax.nn.sigmoid(i.astype(jnp.float32)) * x.astype(jnp.float32)
    options = {"state": state, "segment_ids": segment_ids, "implementation": implementation}
    output, last = diagonal_scan.diagonal_scan(log_a, gated_x, **options)
    return output.astype(x.dtype), last
