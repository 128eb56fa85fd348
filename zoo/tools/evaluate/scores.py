"""Log-probabilities of targets, and whether each target is the likeliest token."""

from collections.abc import Mapping

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from zoo.layers.token_info import token_info
from zoo.models import Decoder
from zoo.models.log_probs import map_targets
from zoo.models.loss import token_losses
from zoo.parallel import reduce
from zoo.parallel.collectives import shard_offset

_CHUNK = 1024
"""Tokens whose logits are in memory at a time."""


def score_targets(
    model: Decoder, batch: Mapping[str, Int[Array, "..."]]
) -> tuple[Float[Array, "batch seq"], Bool[Array, "batch seq"], Int[Array, "batch"]]:
    """Compute log p(target) of each token in float32, and whether the target is the argmax of the logits.

    - `batch`: `tokens` and `targets`, "batch seq"; `numbers`, "batch", which is returned as it is: the rows of a batch
      that several processes make come back in the order of the devices.

    A negative target scores 0. Of equal logits, the argmax is the first, as in greedy decoding. A sharded vocabulary is
    not all-gathered.
    """
    tokens = batch["tokens"]
    scores = map_targets(_score_logits, model, tokens, token_info(tokens), batch["targets"], _CHUNK)
    return *scores, batch["numbers"]


def _score_logits(
    logits: Float[Array, "tokens vocab"], targets: Int[Array, "tokens"]
) -> tuple[Float[Array, "tokens"], Bool[Array, "tokens"]]:
    """Return log p of each target, and whether it is the likeliest; `logits` may be a shard of the vocabulary."""
    logits = logits.astype(jnp.float32)
    size = logits.shape[-1]
    local = logits.argmax(axis=-1).astype(jnp.int32)
    local_peak = jnp.take_along_axis(logits, local[:, None], axis=-1)[:, 0]
    peak = reduce(local_peak, over="vocab", by=lax.pmax)
    candidates = jnp.where(local_peak == peak, local + shard_offset(logits, "vocab", size), jnp.iinfo(jnp.int32).max)
    likeliest = reduce(candidates, over="vocab", by=lax.pmin)
    return -token_losses(logits, targets), likeliest == targets
