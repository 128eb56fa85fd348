"""Hyper-connections: n residual streams X, which a layer reads, mixes and writes (Zhu et al., arXiv:2409.19606), with
weights of each token that keep the sum of the streams (mHC; Xie et al., arXiv:2512.24880, section 4):

    u = Σ_i pre_i X_i
    X'_j = Σ_i comb_ij X_i + post_j layer(u)

Weights and sums are computed in float32, as in DeepSeek-V4.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

Streams = Float[Array, "*rows streams embed"]
"""Residual streams of each token."""


class StreamWeights(NamedTuple):
    """Weights of one token between its residual streams and a layer."""

    pre: Float[Array, "*rows streams"]
    """The part of each stream in the input of the layer."""
    post: Float[Array, "*rows streams"]
    """The part of the output of the layer in each stream."""
    comb: Float[Array, "*rows streams streams"]
    """The part of each stream (rows) in each new stream (columns): doubly stochastic."""


def make_stream_weights(
    logits: Float[Array, "*rows weights"],
    scale: Float[Array, "3"],
    base: Float[Array, "weights"],
    *,
    iterations: int = 20,
    epsilon: float = 1e-6,
) -> StreamWeights:
    """Make the weights of n streams of logits: n for `pre`, n for `post`, n² for `comb`, row by row.

        pre = sigmoid(scale_0 logits + base) + epsilon
        post = 2 sigmoid(scale_1 logits + base)
        comb = sinkhorn(scale_2 logits + base)

    Source: mHC, equations 7 to 9, with the `epsilon` of DeepSeek-V4.
    """
    streams = _count_streams(logits.shape[-1])
    ends = [streams, 2 * streams]
    parts = zip(jnp.split(logits.astype(jnp.float32), ends, axis=-1), scale, jnp.split(base, ends), strict=True)
    pre, post, comb = (part * factor + offset for part, factor, offset in parts)
    comb = comb.reshape(*comb.shape[:-1], streams, streams)
    return StreamWeights(
        pre=jax.nn.sigmoid(pre) + epsilon,
        post=2 * jax.nn.sigmoid(post),
        comb=sinkhorn(comb, iterations=iterations, epsilon=epsilon),
    )


@partial(jax.checkpoint, static_argnums=(1, 2))
def _sinkhorn(logits: Float[Array, "*rows n n"], iterations: int, epsilon: float) -> Float[Array, "*rows n n"]:
    """Saves the logits for the backward pass, and not two matrices per iteration. Tokens are the last dims in between:
    on a CPU the sums over n numbers took 7 times as long where they were."""
    matrix = jnp.moveaxis(jax.nn.softmax(logits, axis=-1) + epsilon, (-2, -1), (0, 1))
    matrix = matrix / (matrix.sum(0, keepdims=True) + epsilon)

    def normalize(matrix: Array, _: None) -> tuple[Array, None]:
        matrix = matrix / (matrix.sum(1, keepdims=True) + epsilon)
        return matrix / (matrix.sum(0, keepdims=True) + epsilon), None

    matrix, _ = lax.scan(normalize, matrix, length=iterations - 1)
    return jnp.moveaxis(matrix, (0, 1), (-2, -1))


def sinkhorn(
    logits: Float[Array, "*rows n n"], *, iterations: int = 20, epsilon: float = 1e-6
) -> Float[Array, "*rows n n"]:
    """Return a doubly stochastic matrix: softmax over each row, and then columns and rows divided by their sums in
    turns, `iterations` times in all (Sinkhorn & Knopp, 1967). Columns are the last, and sum to 1 up to `epsilon`; rows
    approach it."""
    return _sinkhorn(logits, iterations, epsilon)


def read_streams(streams: Streams, pre: Float[Array, "*rows streams"]) -> Float[Array, "*rows embed"]:
    """Return the input of a layer, u = Σ_i pre_i X_i, in the dtype of the streams."""
    return jnp.einsum("...i,...ie->...e", pre, streams.astype(jnp.float32)).astype(streams.dtype)


def write_streams(streams: Streams, output: Float[Array, "*rows embed"], weights: StreamWeights) -> Streams:
    """Return the streams after a layer, X'_j = Σ_i comb_ij X_i + post_j output, in their dtype."""
    mixed = jnp.einsum("...ij,...ie->...je", weights.comb, streams.astype(jnp.float32))
    added = weights.post[..., None] * output[..., None, :].astype(jnp.float32)
    return (mixed + added).astype(streams.dtype)


def _count_streams(weights: int) -> int:
    """Return n of n + n + n² weights."""
    streams = round((1 + weights) ** 0.5) - 1
    assert streams * (streams + 2) == weights
    return streams
