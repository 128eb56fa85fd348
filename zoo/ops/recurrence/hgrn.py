"""HGRN's gated recurrence, a number of state a channel.

    h_t = exp(g_t) h_{t-1} + x_t,    o_t = h_t

(Qin et al., arXiv:2311.04823, section 3.2: exp(g) is the forget gate, above a lower bound that grows with depth, and x
the input times what the gate leaves, both made by the layer; in HGRN2 it is no longer elementwise.) FLOPs, bytes and
rounding are those of `zoo.ops.elementwise`, of which this is the plain case.
"""

from jaxtyping import Array, Float, Int

from zoo.ops.recurrence import diagonal_scan
from zoo.ops.recurrence.chunks import RecurrenceMode


def hgrn(
    x: Float[Array, "batch seq channels"],
    g: Float[Array, "batch seq channels"],
    *,
    state: Float[Array, "batch channels"] | None = None,
    segment_ids: Int[Array, "batch seq"] | None = None,
    mode: RecurrenceMode = "chunked",
) -> tuple[Float[Array, "batch seq channels"], Float[Array, "batch channels"]]:
    """o_t = exp(g_t) o_{t-1} + x_t in the dtype of `x`, and the last in float32. `g` is the log decay, at most 0.

    `state` is what earlier tokens left, None zero; it counts for nothing from where a token's segment is not that of
    the one before.
    """
    run = diagonal_scan.recurrent_diagonal if mode == "recurrent" else diagonal_scan.chunked_diagonal
    return run(g, x, state=state, segment_ids=segment_ids)
