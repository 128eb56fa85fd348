"""Griffin's real-gated linear recurrent unit (RG-LRU), a diagonal scan with one scalar state per channel.

    log a_t = -8 sigmoid(r_t) softplus(a_param)
    h_t = a_t h_{t-1} + sqrt(1 - a_t^2) sigmoid(i_t) x_t,    o_t = h_t

(De et al., arXiv:2402.19427, section 2.4.) The root preserves the variance of h, so it is 1 without an h_{t-1}: at the
first token of a sequence, and of every segment. Its argument is computed as -expm1(2 log a), because 1 - a^2 cancels
for a near 1, and bounded from below, because the gradient of the root is infinite at 0.

FLOPs and bytes per token and channel: as `zoo.ops.recurrence.diagonal_scan`, and 20 and 12 more for the gates.
Rounding: an error of 1e-7 in a grows T-fold over T tokens that have not decayed; hence everything is float32.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from zoo.ops.recurrence import diagonal_scan
from zoo.ops.recurrence.affine import IncomingState
from zoo.ops.recurrence.chunks import find_segment_starts
from zoo.shapes import SegmentIds

SHARPNESS = 8.0
"""The paper's constant c."""
_MIN_SQRT_ARGUMENT = 1e-36
"""Lower bound of 1 - a^2. RecurrentGemma's code bounds the derivative of the root by 1000 instead: its gradients differ
where 1 - a^2 < 2.5e-7."""


def rg_lru(
    x: Float[Array, "batch seq channels"],
    r: Float[Array, "batch seq channels"],
    i: Float[Array, "batch seq channels"],
    a_param: Float[Array, "channels"],
    *,
    state: Float[Array, "batch channels"] | IncomingState | None = None,
    is_first: Bool[Array, "batch seq"] | None = None,
    segment_ids: SegmentIds | None = None,
    implementation: str = "auto",
) -> tuple[Float[Array, "batch seq channels"], Float[Array, "batch channels"]]:
    """Compute the RG-LRU of `x`, with recurrence gate `r` and input gate `i` before their sigmoids.

    Returns the outputs in the dtype of `x`, and the last h in float32. `state` is the initial state, zero by default;
    every segment but the first resets it. `is_first` is True for tokens without earlier tokens; like the first token of
    a segment, they are not scaled by the root. By default, it is True for the first token of each row unless there is a
    `state`.

    **Raises** `ValueError` for an `IncomingState` without `is_first`.
    """
    if is_first is None and callable(state):
        raise ValueError("rg_lru: the state of earlier shards does not tell whether there are any: pass is_first")
    if is_first is None:
        is_first = jnp.broadcast_to((jnp.arange(x.shape[1]) == 0) & (state is None), x.shape[:2])
    if segment_ids is not None:
        is_first = is_first | find_segment_starts(segment_ids)
    gate = jax.nn.sigmoid(r.astype(jnp.float32))
    log_a = -SHARPNESS * gate * jax.nn.softplus(a_param.astype(jnp.float32))
    root = jnp.where(is_first[..., None], 1, jnp.sqrt(jnp.maximum(-jnp.expm1(2 * log_a), _MIN_SQRT_ARGUMENT)))
    gated_x = root * jax.nn.sigmoid(i.astype(jnp.float32)) * x.astype(jnp.float32)
    options = {"state": state, "segment_ids": segment_ids, "implementation": implementation}
    output, last = diagonal_scan.diagonal_scan(log_a, gated_x, **options)
    return output.astype(x.dtype), last
