"""Interpolation of a grid of vectors to another size, as PyTorch computes it: bicubic, or linear."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

_SHARPNESS = -0.75
"""Keys' parameter a, the slope of the cubic kernel at distance 1. PyTorch has -0.75, `jax.image.resize` -0.5."""


def cubic_weights(size: int, new_size: int) -> Float[np.ndarray, "new old"]:
    """Return the matrix that interpolates `size` values at the centers of equal cells to `new_size` of them.

    Output i is at u = (i + 1/2) size / new_size - 1/2, and has the four values next to u with weights k(|u - j|):

        k(t) = (a + 2) t³ - (a + 3) t² + 1         0 <= t < 1
        k(t) = a (t³ - 5 t² + 8 t - 4)             1 <= t < 2

    (Keys, IEEE Transactions on Acoustics, Speech, and Signal Processing 29, 1981, equation 4.) Beyond the edge the
    outermost value repeats; a smaller grid is sampled, without a filter.
    """
    position = (np.arange(new_size) + 0.5) * (size / new_size) - 0.5
    weights = np.zeros((new_size, size))
    for offset in (-1, 0, 1, 2):
        neighbor = np.floor(position).astype(int) + offset
        t = np.abs(position - neighbor)
        near = (_SHARPNESS + 2) * t**3 - (_SHARPNESS + 3) * t**2 + 1
        far = _SHARPNESS * (t**3 - 5 * t**2 + 8 * t - 4)
        np.add.at(weights, (np.arange(new_size), np.clip(neighbor, 0, size - 1)), np.where(t < 1, near, far))
    return weights


@jax.named_scope("resize_bicubic")
def resize_bicubic(
    x: Float[Array, "height width features"], size: tuple[int, int]
) -> Float[Array, "new_height new_width features"]:
    """Interpolate a grid of vectors to `size` (height, width) by `cubic_weights` along each dim. Computed in float32,
    with the result in the dtype of `x`; the same as PyTorch's `interpolate(mode="bicubic", align_corners=False)`."""
    rows, columns = (jnp.asarray(cubic_weights(*sizes), jnp.float32) for sizes in zip(x.shape, size, strict=False))
    resized = jnp.einsum("yh,hwf->ywf", rows, x.astype(jnp.float32), precision="highest")
    return jnp.einsum("xw,ywf->yxf", columns, resized, precision="highest").astype(x.dtype)


def linear_weights(
    size: int, new_sizes: Int[Array, "batch"], index: Int[Array, "batch outputs"]
) -> Float[Array, "batch outputs old"]:
    """Return the weights of `size` values, at the centers of equal cells, in the output `index` of `new_sizes` of them.

    Output i is at u = (i + 1/2) s with s = size / new_size, and value j has the weight

        max(0, 1 - |j + 1/2 - u| / max(s, 1)),

    divided by the sum of all: linear interpolation, with a filter that is wider where the grid shrinks. The same as
    PyTorch's `interpolate(mode="bilinear", align_corners=False, antialias=True)` along one dim. The new sizes may
    differ from row to row, and be unknown when a program is compiled.
    """
    step = (size / new_sizes.astype(jnp.float32))[:, None, None]
    centers = (index[..., None] + 0.5) * step
    weights = jnp.maximum(0, 1 - jnp.abs(jnp.arange(size) + 0.5 - centers) / jnp.maximum(step, 1))
    return weights / weights.sum(-1, keepdims=True)


def corner_weights(size: int, new_sizes: Int[Array, "*rows"], index: Int[Array, "*rows"]) -> Float[Array, "*rows old"]:
    """Return the weights of `size` values in the output `index` of `new_sizes` of them, where the first and the last of
    both coincide.

    Output i is at u = i (size - 1) / (new_size - 1), or at 0 if it is the only one, and value j has the weight
    max(0, 1 - |j - u|). The same as PyTorch's `interpolate(mode="bilinear", align_corners=True)` along one dim.
    """
    position = index * ((size - 1) / jnp.maximum(new_sizes - 1, 1).astype(jnp.float32))
    return jnp.maximum(0, 1 - jnp.abs(jnp.arange(size) - position[..., None]))
