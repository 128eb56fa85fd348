"""The loss by `tokamax.linear_softmax_cross_entropy_loss`: a Pallas kernel for TPUs that holds no logits in HBM."""

import functools
from types import ModuleType
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from zoo.ops.platform import current_platform
from zoo.ops.tokamax import call_tokamax, find_tokamax_obstacle

from .loss_request import LossRequest

_LANES = 128
"""Features, and words, of the smallest block of the TPU kernel."""
_ROWS = 1024
"""Tokens of the smallest block of the TPU kernel."""
_INSTEAD = 'take cross_entropy(..., implementation="chunked"), or "reference" for further derivatives'


def tokamax_cross_entropy(
    head: Any, x: Array, targets: Array, weights: Array, z_loss: float, chunk: int
) -> Float[Array, ""]:
    """Compute the weighted sum of `token_losses(head(x), targets)` by tokamax: a Pallas kernel on TPUs, all logits at
    once on CPUs. `chunk` is not used: tokamax chooses the blocks.

    **Raises** `ValueError` with the reason of `find_tokamax_loss_obstacle`, and with tokamax's own.
    """
    if obstacle := find_tokamax_loss_obstacle(LossRequest.from_head(head, x, z_loss, chunk)):
        raise ValueError(f"tokamax_cross_entropy cannot compute this, because {obstacle}")
    table = head.table.dense_weight.astype(x.dtype).T
    is_known = targets < table.shape[1]
    labels = jnp.where((targets >= 0) & is_known, targets, 0).astype(jnp.int32)
    # Not "chunked_xla": with a vocabulary that its blocks of 2,048 do not divide, it counts the padding (0.0.17).
    name = "xla" if current_platform() == "cpu" else "mosaic_tpu"
    operands = head.multiplier * x, table
    losses = call_tokamax(functools.partial(_losses, name), operands, labels, operation="loss", instead=_INSTEAD)
    # As `token_losses`: 0 for a negative target, NaN for one beyond the vocabulary.
    losses = jnp.where(targets < 0, 0, losses * jnp.where(is_known, 1, jnp.nan))
    return (losses * weights).sum()


def find_tokamax_loss_obstacle(request: LossRequest) -> str | None:
    """Return why `tokamax_cross_entropy` cannot compute a request, or None."""
    if reason := find_tokamax_obstacle("cpu", "tpu"):
        return reason
    if request.has_z_loss:
        return "it does not return log Z, which z_loss needs"
    if not request.is_matrix:
        return "it takes a matrix, and the head has a bias, a soft cap or a transform too"
    if request.vocab_shards > 1:
        return f"the vocabulary has {request.vocab_shards} shards, and it takes a whole one"
    if request.dtype not in (jnp.float32, jnp.bfloat16):
        return f"it computes in float32 or bfloat16, not {jnp.dtype(request.dtype).name}"
    if current_platform() == "tpu" and (request.embed % _LANES or request.vocab % _LANES):
        return f"{request.embed} features and a vocabulary of {request.vocab} are not multiples of {_LANES}"
    return None


def _losses(name: str, tokamax: ModuleType, x: Array, table: Array, labels: Array) -> Float[Array, "tokens"]:
    rows = len(x)
    if name == "mosaic_tpu":
        x = jnp.pad(x, ((0, -rows % _ROWS), (0, 0)))
        labels = jnp.pad(labels, (0, -rows % _ROWS))
    losses = tokamax.linear_softmax_cross_entropy_loss(x, labels, table, reduction="none", implementation=name)
    return losses[:rows]
