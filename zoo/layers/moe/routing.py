"""Routing decisions of a mixture of experts, per token, and their sums over each row for load-balancing losses."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zoo.parallel import Module, vary
from zoo.parallel.collectives import varying
from zoo.shapes import PaddingMask, SegmentIds


class Routing(Module):
    """Router logits and expert indices of one mixture-of-experts layer, row first."""

    logits: Float[Array, "batch seq choices"]
    """Router logits of all experts in float32, before any softmax."""
    chosen: Int[Array, "batch seq top"]
    """Indices of the top-k experts of each token."""


class RoutingSums(Module):
    """Sums over the tokens of each row of what one router decided: a few numbers per row and expert instead of some per
    token, and enough for every load-balancing loss. Padding, which is segment 0, is left out.

    Inside `zoo.spmd` on a mesh that shards the sequence, these are sums over the tokens of this device.
    """

    visits: Float[Array, "batch choices"]
    """Tokens that are routed to each expert. A token counts for each of its top-k experts."""
    softmax_scores: Float[Array, "batch choices"]
    """Sum of softmax(logits)."""
    sigmoid_scores: Float[Array, "batch choices"]
    """Sum of sigmoid(logits), divided by their sum over experts for each token."""
    squared_log_z: Float[Array, "batch"]
    """Sum of (log Σ_e exp(logit_e))²."""
    num_tokens: Float[Array, "batch"]
    per_token: Routing | None = None
    """The decisions themselves, padding included, if `zoo.configure(model, routing="tokens")` asked for them."""


def sum_routing(routing: Routing, segment_ids: SegmentIds | None = None) -> RoutingSums:
    """Sum the decisions of a router over the tokens of each row whose segment id is not 0: all without `segment_ids`.

    The gradient recomputes the scores from the logits.
    """
    logits = routing.logits
    if segment_ids is None:
        is_token = jnp.ones(logits.shape[:2], bool)
    else:
        is_token = segment_ids != 0
    one_hot_sum = (routing.chosen[..., None] == jnp.arange(logits.shape[-1])).sum(2)
    visits = jnp.where(is_token[..., None], one_hot_sum, 0).sum(1).astype(jnp.float32)
    num_tokens = vary(is_token, varying(logits)).sum(1).astype(jnp.float32)
    softmax_scores, sigmoid_scores, squared_log_z = _sum_scores(logits, is_token)
    return RoutingSums(visits, softmax_scores, sigmoid_scores, squared_log_z, num_tokens)


@partial(jax.checkpoint, prevent_cse=False)
def _sum_scores(
    logits: Float[Array, "batch seq choices"], is_token: PaddingMask
) -> tuple[Float[Array, "batch choices"], Float[Array, "batch choices"], Float[Array, "batch"]]:
    """Return the sums of the softmax scores, of the normalized sigmoid scores, and of the squared log Z."""
    sigmoid = jax.nn.sigmoid(logits)
    scores = jax.nn.softmax(logits, axis=-1), sigmoid / sigmoid.sum(-1, keepdims=True)
    softmax_scores, sigmoid_scores = (jnp.where(is_token[..., None], x, 0).sum(1) for x in scores)
    squared_log_z = jnp.where(is_token, jax.nn.logsumexp(logits, axis=-1) ** 2, 0).sum(1)
    return softmax_scores, sigmoid_scores, squared_log_z
