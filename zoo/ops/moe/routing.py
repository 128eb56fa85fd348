"""Top-k routing of mixtures of experts: from router scores to the selected experts of a token and their weights.

Every function takes `logits` or scores, one per expert, and returns `(weights, selected)`: the routing weights and the
indices of the `top` experts of each token, computed in float32. Ties go to the lower index. Gradients flow through the
weights, never through the selection.

`scale` multiplies the weights. Group-limited routing splits the experts into `groups` and selects from the best
`kept_groups` of them only: the experts of a group are close together, which limits communication (DeepSeek-V2, arXiv
2405.04434, section 2.2.2).
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

_TopKResult = tuple[Float[Array, "*tokens top"], Int[Array, "*tokens top"]]


def softmax_top_k(
    logits: Float[Array, "*tokens choices"],
    top: int,
    *,
    renormalize: bool = False,
    scale: float | int = 1.0,
    groups: int = 1,
    kept_groups: int = 1,
) -> _TopKResult:
    """Select the `top` largest of softmax(logits); with `renormalize`, divide them by their sum.

    Source: Shazeer et al., arXiv 1701.06538, section 2.1, as in Switch (arXiv 2101.03961), Qwen and OLMoE; renormalized
    in Mixtral (arXiv 2401.04088, section 2.1), where it is the softmax over the selected. The score of a group is its
    best expert's score (DeepSeek-V2).
    """
    scores = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    allowed = is_in_top_groups(scores, groups, kept_groups, experts_per_group_score=1)
    weights, selected = lax.top_k(jnp.where(allowed, scores, 0), top)
    if renormalize:
        weights = weights / weights.sum(-1, keepdims=True)
    return weights * scale, selected


def top_k_softmax(logits: Float[Array, "*tokens choices"], top: int) -> _TopKResult:
    """Select the `top` largest logits, and apply the softmax to these only.

    Source: Shazeer et al., arXiv 1701.06538, equations 3 and 5; so in Granite and GPT-OSS (arXiv 2508.10925,
    section 2.2).
    """
    values, selected = lax.top_k(logits.astype(jnp.float32), top)
    return jax.nn.softmax(values, axis=-1), selected


def sparse_mixer(logits: Float[Array, "*tokens choices"], jitter: float) -> _TopKResult:
    """Select the two largest logits, each weighted by its own softmax: the first by the softmax over the experts near
    it, the second over the experts near it except the first. An expert with logit s is near one with m unless

        (m - s) / max(|s|, m) > 2 jitter

    The two weights are not divided by their sum. Source: SparseMixer-v2 of GRIN (Liu et al., arXiv 2409.12136, section
    2.1), as at inference: in training it samples experts, and estimates the gradient of the sampling.
    """
    logits = logits.astype(jnp.float32)
    rest = logits
    weights = []
    selected = []
    for _ in range(2):
        highest = lax.stop_gradient(rest.max(-1, keepdims=True))
        magnitude = jnp.maximum(lax.stop_gradient(jnp.abs(logits)), highest)
        is_far = (highest - lax.stop_gradient(logits)) > 2 * jitter * magnitude
        near = jax.nn.softmax(jnp.where(is_far, -jnp.inf, rest), axis=-1)
        best = rest.argmax(-1, keepdims=True)
        weights.append(jnp.take_along_axis(near, best, axis=-1))
        selected.append(best)
        rest = jnp.where(jnp.arange(logits.shape[-1]) == best, -jnp.inf, rest)
    return jnp.concatenate(weights, -1), jnp.concatenate(selected, -1)


def biased_top_k(
    scores: Float[Array, "*tokens choices"],
    bias: Float[Array, "choices"],
    top: int,
    *,
    renormalize: bool = True,
    scale: float | int = 1.0,
    groups: int = 1,
    kept_groups: int = 1,
    smallest: float = 1e-20,
) -> _TopKResult:
    """Select the experts with the largest scores + bias, weighted by their scores without the bias.

    `scores` are not negative: sigmoid(logits) in DeepSeek-V3, softmax(logits) in ERNIE 4.5. `renormalize` divides by
    the sum of the selected scores plus `smallest`, against 0. The score of a group is the sum of its two best experts'.
    Source: Wang et al., arXiv 2408.15664, equation 3; DeepSeek-V3, arXiv 2412.19437, equations 13 to 16.
    """
    biased = lax.stop_gradient(scores) + bias
    allowed = is_in_top_groups(biased, groups, kept_groups, experts_per_group_score=2)
    _, selected = lax.top_k(jnp.where(allowed, biased, -jnp.inf), top)
    weights = jnp.take_along_axis(scores, selected, axis=-1)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdims=True) + smallest)
    return weights * scale, selected


def is_in_top_groups(
    scores: Float[Array, "*tokens choices"], groups: int, kept_groups: int, *, experts_per_group_score: int
) -> Bool[Array, "*tokens choices"]:
    """Return True for experts in the `kept_groups` best groups, scored by the sum of their best experts."""
    if kept_groups >= groups:
        return jnp.ones(scores.shape, bool)
    by_group = scores.reshape(*scores.shape[:-1], groups, -1)
    best = lax.top_k(by_group, min(experts_per_group_score, by_group.shape[-1]))[0].sum(-1)
    best_groups = lax.top_k(best, kept_groups)[1]
    allowed = (best_groups[..., None] == jnp.arange(groups)).any(-2)
    return jnp.repeat(allowed, by_group.shape[-1], axis=-1)
