"""Short causal convolutions along time, one filter a feature.

    y_t = bias + sum over k < width of weight_{width-1-k} x_{t-k}

(H3, Fu et al., arXiv:2212.14052, section 3; Mamba, arXiv:2312.00752, figure 3). The last tap is the present token's, as
PyTorch's `Conv1d` has it with padding on the left. Nothing crosses the border of a segment.

`summed` is this, and what `convolved` computes; the second has a gradient of its own: x's is a convolution, of later
outputs with the same taps. The one that JAX derives adds up padded copies, one a tap, and sums what a tap contributed
over two dims at once, in one thread: a fifth of a training step of Gated DeltaNet (width 256, two cores of an EPYC, jax
0.10), of which a fifth is left.

FLOPs: 2 width a feature and token, twice that again for a gradient. Bytes: those of x and y, since taps are fused.
"""

from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .varying import vary, varying

_InputsWithHistory = Float[Array, "batch _ features"]
"""Inputs, and in front of them the width - 1 before."""
_Taps = Float[Array, "features conv"]


def causal_conv1d(
    inputs: _InputsWithHistory,
    weight: _Taps,
    bias: Float[Array, "features"] | None = None,
    segment_ids: Int[Array, "batch seq"] | None = None,
) -> Float[Array, "batch seq features"]:
    """The convolution at all but the first width - 1 of `seen`, in the dtype that operands promote to.

    There is no forward-mode differentiation, which JAX says with a `TypeError`.
    """
    given = (inputs, weight, bias, segment_ids)
    return _causal_conv1d_custom_vjp(*vary(given, frozenset().union(*(varying(x) for x in given if x is not None))))


def causal_conv1d_reference(
    inputs: _InputsWithHistory,
    weight: _Taps,
    bias: Float[Array, "features"] | None = None,
    segment_ids: Int[Array, "batch seq"] | None = None,
) -> Float[Array, "batch seq features"]:
    """The definition: a sum over taps."""
    width = weight.shape[-1]
    seq = inputs.shape[1] - width + 1
    taps = (weight[:, ~lag] * lag_inputs(inputs, lag, seq, segment_ids) for lag in range(width - 1, -1, -1))
    y = reduce(jnp.add, taps)
    return y if bias is None else y + bias


def lag_inputs(
    inputs: _InputsWithHistory, lag: int, seq: int, segment_ids: Int[Array, "batch seq"] | None = None
) -> Float[Array, "batch seq features"]:
    """What stood `lag` tokens before each of the last `seq`; zero where that is another segment's."""
    first = inputs.shape[1] - seq - lag
    x = inputs[:, first : first + seq]
    same = _is_same_segment(segment_ids, lag)
    return x if same is None else jnp.where(same[..., None], x, 0)


def _is_same_segment(segment_ids: Int[Array, "batch seq"] | None, lag: int) -> Bool[Array, "batch seq"] | None:
    """Where the token `lag` earlier is of a token's own segment, as what was before the first token is. None where all
    are."""
    if segment_ids is None or lag == 0:
        return None
    seq = segment_ids.shape[1]
    same = segment_ids[:, lag:] == segment_ids[:, :-lag]
    return jnp.pad(same, [(0, 0), (min(lag, seq), 0)], constant_values=True)[:, :seq]


_causal_conv1d_custom_vjp = jax.custom_vjp(causal_conv1d_reference)


def _causal_conv1d_fwd(*operands: Any) -> tuple:
    """The output, and what its gradient needs: the inputs."""
    return causal_conv1d_reference(*operands), operands


def _causal_conv1d_bwd(residuals: tuple, gradient: Float[Array, "batch seq features"]) -> tuple:
    """With gradients of outputs beside the inputs that they took with a lag, a tap's is the sum of their products."""
    seen, weight, bias, segment_ids = residuals
    rest, along = weight.shape[-1] - 1, seen.shape[1]
    # What follows reads the padded copy alone, which XLA makes once: what led to `gradient` it would make for each tap.
    gradient = jnp.pad(gradient.astype(jnp.float32), [(0, 0), (rest, rest), (0, 0)])
    of_seen, of_taps = jnp.zeros_like(seen, jnp.float32), []
    for lag in range(rest, -1, -1):
        reached = gradient[:, lag : lag + along]
        same = _is_same_segment(segment_ids, lag)
        if same is not None:
            same = jnp.pad(same, [(0, 0), (rest, rest)])[:, lag : lag + along]
            reached = jnp.where(same[..., None], reached, 0)
        of_seen = of_seen + weight[:, ~lag] * reached
        of_taps.append(_sum_over_rows(reached * seen))
    of_weight = jnp.stack(of_taps, axis=-1).astype(weight.dtype)
    of_bias = None if bias is None else _sum_over_rows(gradient[:, :along]).astype(bias.dtype)
    return of_seen.astype(seen.dtype), of_weight, of_bias, None


def _sum_over_rows(x: Float[Array, "batch _ features"]) -> Float[Array, "features"]:
    """The sum over all rows. Its first step is an addition of halves: XLA makes a sum over two dims of any other, even
    of one that was reshaped, and those it takes in one thread, ten times as slowly."""
    rows = x.reshape(-1, x.shape[-1])
    half = len(rows) // 2
    rows = rows if len(rows) % 2 else rows[:half] + rows[half:]
    return rows.sum(0)


_causal_conv1d_custom_vjp.defvjp(_causal_conv1d_fwd, _causal_conv1d_bwd)
