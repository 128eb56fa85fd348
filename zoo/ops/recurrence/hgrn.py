"""HGRN's gated recurrence, a diagonal scan with one scalar state per channel.

    h_t = exp(g_t) h_{t-1} + x_t,    o_t = h_t

(Qin et al., arXiv:2311.04823, section 3.2: exp(g) is the forget gate, above a lower bound that grows with depth, and x
the input times 1 - exp(g), both computed by the layer; HGRN2 is not elementwise.) For FLOPs, bytes and rounding see
`zoo.ops.recurrence.diagonal_scan`.
"""

from jaxtyping import Array, Float

from zoo.ops.recurrence import diagonal_scan
from zoo.ops.recurrence.affine import IncomingState
from zoo.shapes import SegmentIds


def hgrn(
    x: Float[Array, "batch seq channels"],
    g: Float[Array, "batch seq channels"],
    *,
    state: Float[Array, "batch channels"] | IncomingState | None = None,
    segment_ids: SegmentIds | None = None,
    implementation: str = "auto",
) -> tuple[Float[Array, "batch seq channels"], Float[Array, "batch channels"]]:
    """Compute o_t = exp(g_t) o_{t-1} + x_t in the dtype of `x`, and the last in float32. `g` is the log decay, <= 0.

    `state` is the initial state, zero by default; every segment but the first resets it.
    """
    options = {"state": state, "segment_ids": segment_ids, "implementation": implementation}
    return diagonal_scan.diagonal_scan(g, x, **options)
