"""How routers of mixtures choose: from scores of all experts to the few that a token goes to, and their weights.

Every function takes `logits`, a score for each expert, and gives `(weights, chosen)`: the numbers of the `top` experts
of each token, and what their outputs are multiplied by. All is computed in float32. Of equal scores the expert with the
lower number goes first. Gradients flow through the weights, never through the choice.

A `scale` multiplies the weights. `groups` cuts the experts into so many groups, of which a token uses the best
`kept_groups` only: experts of one group lie close together, and a token's travels are few (DeepSeek-V2, arXiv
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
    """The largest of softmax(logits); with `renormalize`, divided by their sum.

    Source: Shazeer et al., arXiv 1701.06538, section 2.1, as in Switch (arXiv 2101.03961), Qwen and OLMoE; renormalized
    in Mixtral (arXiv 2401.04088, section 2.1), where it is the softmax over those chosen. A group is as good as its
    best expert (DeepSeek-V2).
    """
    scores = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    usable = is_in_top_groups(scores, groups, kept_groups, experts_per_group_score=1)
    weights, chosen = lax.top_k(jnp.where(usable, scores, 0), top)
    if renormalize:
        weights = weights / weights.sum(-1, keepdims=True)
    return weights * scale, chosen


def top_k_softmax(logits: Float[Array, "*tokens choices"], top: int) -> _TopKResult:
    """softmax over the `top` largest logits alone.

    Source: Shazeer et al., arXiv 1701.06538, equations 3 and 5; so in Granite and GPT-OSS (arXiv 2508.10925,
    section 2.2).
    """
    values, chosen = lax.top_k(logits.astype(jnp.float32), top)
    return jax.nn.softmax(values, axis=-1), chosen


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
    """The experts with the largest scores + bias, weighted by their scores: the bias chooses and does nothing else.

    `scores` are not negative: sigmoid(logits) in DeepSeek-V3, softmax(logits) in ERNIE 4.5. `renormalize` divides by
    the sum of those chosen, to which `smallest` is added against 0. A group is as good as the sum of its two best.
    Source: Wang et al., arXiv 2408.15664, equation 3; DeepSeek-V3, arXiv 2412.19437, equations 13 to 16.
    """
    biased = lax.stop_gradient(scores) + bias
    usable = is_in_top_groups(biased, groups, kept_groups, experts_per_group_score=2)
    _, chosen = lax.top_k(jnp.where(usable, biased, -jnp.inf), top)
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdims=True) + smallest)
    return weights * scale, chosen


def is_in_top_groups(
    scores: Float[Array, "*tokens choices"], groups: int, kept_groups: int, *, experts_per_group_score: int
) -> Bool[Array, "*tokens choices"]:
    """Which experts are in the `kept` best of so many groups; a group's score is the sum of its best experts'."""
    if kept_groups >= groups:
        return jnp.ones(scores.shape, bool)
    by_group = scores.reshape(*scores.shape[:-1], groups, -1)
    best = lax.top_k(by_group, min(experts_per_group_score, by_group.shape[-1]))[0].sum(-1)
    chosen = lax.top_k(best, kept_groups)[1]
    usable = (chosen[..., None] == jnp.arange(groups)).any(-2)
    return jnp.repeat(usable, by_group.shape[-1], axis=-1)
