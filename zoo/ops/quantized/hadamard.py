"""Random Hadamard transforms of blocks, which spread outliers over the values of a block."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

SIGNS = np.random.default_rng(0).choice(np.array([-1, 1], np.float32), 16)
"""Random signs, the same for every block and step: one vector is enough (NVIDIA, arXiv:2509.25149, appendix C)."""


def make_hadamard(size: int) -> Float[np.ndarray, "size size"]:
    """Return the orthogonal Hadamard matrix of Sylvester's construction. `size` is a power of two."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.sqrt(size, dtype=np.float32)


def transform_tokens(x: Float[Array, "batch tokens features"]) -> Float[Array, "batch padded features"]:
    """Return H D x for each 16 consecutive tokens of a row, where D has random signs; tokens are padded with zeros to a
    multiple of 16.

    H D is orthogonal, so that a product that contracts the tokens of two arrays stays the same, while an outlier among
    16 tokens is spread over all of them.
    """
    size = len(SIGNS)
    x = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, -x.shape[1] % size), (0, 0)))
    blocks = x.reshape(x.shape[0], -1, size, x.shape[2])
    matrix = jnp.asarray(make_hadamard(size) * SIGNS)
    return jnp.einsum("ij,bnjf->bnif", matrix, blocks, precision="highest").reshape(x.shape)
