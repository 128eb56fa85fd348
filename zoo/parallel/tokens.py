"""Sequence parallelism inside tensor parallelism (Korthikanti et al., arXiv:2205.05198, section 4.2.2).

With the layout `SEQUENCE`, the hidden states between two sublayers are sharded along their tokens by `tensor`, and so
are the norms, the dropout and the residuals of the backward pass. A sublayer is entered by an all-gather of its tokens,
and its last contraction is a reduce-scatter, `reduce(y, over=..., into="tokens")`, instead of an all-reduce: the same
bytes. In the backward pass the two change places.

Inside a sublayer all devices along `tensor` have all tokens, and the types say that they differ (`gather_tokens`): the
gradients that each device computes are parts of a sum. With other layouts every function is the identity.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PyTree, Shaped

from .collectives import check_token_count, current_mesh, varying


def find_token_axes() -> tuple[str, ...]:
    """Return the mesh axes that shard the tokens of hidden states but not the tokens of mixers: () unless the layout is
    `SEQUENCE`."""
    mesh = current_mesh()
    if mesh is None:
        return ()
    return tuple(axis for axis in mesh.axes("tokens") if axis not in mesh.axes("seq"))


def run_on_all_tokens(
    sublayer: Callable[..., tuple[Array, Any]], x: Float[Array, "batch tokens embed"], *args: Any
) -> tuple[Float[Array, "batch tokens embed"], Any]:
    """Return `sublayer(x, *args)`, the output and an extra result of a mixer or feed-forward layer. All-gathers the
    tokens before the call, and keeps this device's tokens of the output."""
    y, other = sublayer(gather_tokens(x), *args)
    return match_tokens(y, x), other


def gather_tokens(x: Float[Array, "batch tokens embed"]) -> Float[Array, "batch seq embed"]:
    """All-gather the tokens of hidden states, typed as varying: the gradient is a reduce-scatter."""
    axes = find_token_axes()
    return lax.all_gather(x, axes, axis=1, tiled=True) if axes else x


def replicate_tokens(x: Float[Array, "batch tokens embed"]) -> Float[Array, "batch seq embed"]:
    """All-gather the tokens of hidden states, typed as equal on all devices, for a head, whose contractions all-reduce
    the gradient."""
    axes = find_token_axes()
    return lax.all_gather(x, axes, axis=1, tiled=True, to="invarying") if axes else x


def shard_tokens(x: Shaped[Array, "..."], axis: int = 1) -> Shaped[Array, "..."]:
    """Slice this device's tokens, along array axis `axis`, out of all tokens. **Raises** `ValueError` if the mesh does
    not divide them."""
    axes = find_token_axes()
    if not axes:
        return x
    check_token_count(x.shape[axis], axes)
    size = x.shape[axis] // lax.axis_size(axes)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size, axis)


def match_tokens(x: Shaped[Array, "batch _ *rest"], like: Shaped[Array, "batch tokens *dims"]) -> Shaped[Array, "..."]:
    """Slice this device's tokens out of `x`, unless `x` already has as few tokens as `like`. A sublayer whose last
    contraction needs no sum returns all tokens, and so does the low-rank update of an adapter."""
    return x if x.ndim < 3 or x.shape[1] == like.shape[1] else shard_tokens(x)


def merge_copies(tree: PyTree) -> PyTree:
    """Type arrays that a sublayer computed from all tokens, and that are equal along `tensor`, as equal."""
    axes = find_token_axes()

    def merge(x):
        if not varying(x).intersection(axes):
            return x
        if jnp.issubdtype(x.dtype, jnp.inexact):
            return lax.pmean(x, axes)
        return lax.pmax(x, axes)

    return jax.tree.map(merge, tree) if axes else tree
