"""Griffin's real-gated linear recurrent unit, a number of state a channel.

    log a_t = -8 sigmoid(r_t) softplus(param)
    h_t = a_t h_{t-1} + sqrt(1 - a_t^2) sigmoid(i_t) x_t,    o_t = h_t

(De et al., arXiv:2402.19427, section 2.4.) The root keeps the variance of h, and so is replaced by 1 where there is no
h_{t-1}: at the first token of a row that has no state, and of every segment. It is taken of -expm1(2 log a), since
1 - a^2 has no digits left where a is near 1, and of nothing below `SMALLEST`, where its slope would be infinite.

FLOPs and bytes are those of `zoo.ops.elementwise` and 20 and 12 more for the gates, a token and channel. Rounding: 1e-7
of a is T times that after T tokens that are remembered, and this is why everything is float32.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from zoo.ops.recurrence import diagonal_scan
from zoo.ops.recurrence.chunks import RecurrenceMode, find_segment_starts

SHARPNESS = 8.0
"""The paper's constant c."""
_MIN_SQRT_ARGUMENT = 1e-36
"""Below this, 1 - a^2 counts as this."""


def rg_lru(
    x: Float[Array, "batch seq channels"],
    r: Float[Array, "batch seq channels"],
    i: Float[Array, "batch seq channels"],
    a_param: Float[Array, "channels"],
    *,
    state: Float[Array, "batch channels"] | None = None,
    is_first: Bool[Array, "batch seq"] | None = None,
    segment_ids: Int[Array, "batch seq"] | None = None,
    mode: RecurrenceMode = "chunked",
) -> tuple[Float[Array, "batch seq channels"], Float[Array, "batch channels"]]:
    """The unit of `x` with the gates `r` (recurrence) and `i` (input) before their sigmoids; in the dtype of `x`, and
    the last h in float32.

    `state` is what earlier tokens left. None is not zeros: it says that there were none, so that the first token comes
    in whole. The state counts for nothing from where a token's segment is not that of the one before.
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
    entering = root * jax.nn.sigmoid(i.astype(jnp.float32)) * x.astype(jnp.float32)
    run = diagonal_scan.recurrent_diagonal if mode == "recurrent" else diagonal_scan.chunked_diagonal
    output, last = run(log_a, entering, state=state, segment_ids=segment_ids)
    return output.astype(x.dtype), last
