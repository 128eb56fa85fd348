"""Mamba-2's state-space duality (SSD): the state-space model as gated linear attention."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from zoo.shapes import SegmentIds

from .affine import IncomingState
from .gated_linear import gated_linear


def ssd(
    x: Float[Array, "batch seq heads head_dim"],
    dt: Float[Array, "batch seq heads"],
    A: Float[Array, "heads"],
    B: Float[Array, "batch seq groups state"],
    C: Float[Array, "batch seq groups state"],
    D: Float[Array, "skips"] | None = None,
    *,
    state: Float[Array, "batch heads head_dim state"] | IncomingState | None = None,
    segment_ids: SegmentIds | None = None,
    implementation: str = "auto",
) -> tuple[Float[Array, "batch seq heads head_dim"], Float[Array, "batch heads head_dim state"]]:
    """Compute Mamba-2's state-space model with a scalar A per head (Dao & Gu, arXiv:2405.21060, section 5):

        h_t = exp(dt_t A) h_{t-1} + (dt_t x_t) B_tᵀ         h: [head_dim, state] of each head
        y_t = h_t C_t + D x_t

    which is `gated_linear` with queries C, keys B, values dt x and log decays dt A (section 7.2); see there for costs
    and rounding. Head h uses the B and C of group h // (heads // groups). A is negative; dt, after its softplus, is >=
    0. D has a number for each head, or for each channel of all heads.

    **Raises** `ValueError` if groups do not divide heads.
    """
    dt = dt.astype(jnp.float32)
    value = (x * dt[..., None]).astype(x.dtype)
    if state is not None and not callable(state):
        state = state.swapaxes(-1, -2)
    log_decay = dt * A.astype(jnp.float32)
    options = {"state": state, "segment_ids": segment_ids, "implementation": implementation}
    y, last = gated_linear(C, B, value, log_decay, **options)
    if D is not None:
        y = (y + D.astype(jnp.float32).reshape(x.shape[2], -1) * x).astype(x.dtype)
    return y, last.swapaxes(-1, -2)
