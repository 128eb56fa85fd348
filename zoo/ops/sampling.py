"""Sampling the next token from logits: penalties, temperature, top-k, top-p, min-p, and the draw.

Pure functions of a batch of logits. In the order of this file they match the logits processors of transformers, except
for ties, where the lower token id comes first here. Options may be traced, so neither setting nor changing one
recompiles: each has a neutral value.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

_Number = float | int | Float[Array, ""] | Int[Array, ""]


def penalize_repetition(
    logits: Float[Array, "batch vocab"], seen: Bool[Array, "batch vocab"], penalty: _Number
) -> Float[Array, "batch vocab"]:
    """Apply the repetition penalty to seen tokens: logit / penalty if positive, else logit * penalty.

    A penalty of 1 changes nothing; below 1 repetition gets likelier. Source: Keskar et al., CTRL, arXiv 1909.05858,
    section 4.1, which divides; negative logits are multiplied, because dividing would make them likelier.
    """
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def penalize_presence(
    logits: Float[Array, "batch vocab"], counts: Int[Array, "batch vocab"], penalty: _Number
) -> Float[Array, "batch vocab"]:
    """Subtract the presence penalty from the logit of each token that has a count. 0 changes nothing; below 0 such
    tokens get likelier. Source: OpenAI, API reference, "Frequency and presence penalties"."""
    return logits - penalty * (counts > 0)


def penalize_frequency(
    logits: Float[Array, "batch vocab"], counts: Int[Array, "batch vocab"], penalty: _Number
) -> Float[Array, "batch vocab"]:
    """Subtract the frequency penalty from the logit of each token as many times as it is counted. 0 changes nothing.
    Source: as `penalize_presence`."""
    return logits - penalty * counts


def apply_temperature(logits: Float[Array, "batch vocab"], temperature: _Number) -> Float[Array, "batch vocab"]:
    """Divide logits by the temperature, shifted so that the largest is 0 and low temperatures do not overflow."""
    return (logits - logits.max(-1, keepdims=True)) / jnp.maximum(temperature, jnp.finfo(logits.dtype).tiny)


def filter_logits(
    logits: Float[Array, "batch vocab"],
    *,
    top_k: _Number | None = None,
    top_p: _Number | None = None,
    min_p: _Number | None = None,
) -> Float[Array, "batch vocab"]:
    """Apply top-k, top-p and min-p filtering: set the logits of excluded tokens to -inf. The likeliest always stays.

    - `top_k`: keep the k largest and all equal to the k-th (Fan et al., arXiv 1805.04833, section 5.4); keep all if
      there are fewer.
    - `top_p`: of these, keep the nucleus, the fewest largest whose probabilities sum to at least p (Holtzman et al.,
      arXiv 1904.09751, section 3.1).
    - `min_p`: of these, keep tokens at least min_p times as probable as the likeliest (Nguyen et al., arXiv 2407.01082,
      section 3).

    The size of the vocabulary, 1 and 0 keep every token, as None does. Sorts once if `top_k` or `top_p` excludes
    tokens, decided when the program runs, and not at all for `min_p`.
    """
    if top_k is None:
        top_k = logits.shape[1]
    if top_p is None:
        top_p = 1.0
    excludes = jnp.logical_or(top_k < logits.shape[1], top_p < 1)
    keep = lax.cond(excludes, _keep_top, _keep_all, logits, top_k, top_p)
    if min_p is not None:
        keep &= logits >= logits.max(-1, keepdims=True) + jnp.log(min_p)
    return jnp.where(keep, logits, -jnp.inf)


def _keep_top(logits: Float[Array, "batch vocab"], top_k: _Number, top_p: _Number) -> Bool[Array, "batch vocab"]:
    descending = -lax.sort(-logits)
    kth = lax.dynamic_slice_in_dim(descending, jnp.clip(top_k, 1, logits.shape[1]) - 1, 1, axis=1)
    descending = jnp.where(descending >= kth, descending, -jnp.inf)
    # Summed from the small end: a sum from the large end would lose the tail to rounding.
    tail = lax.cumsum(jax.nn.softmax(descending), axis=1, reverse=True)
    is_kept = ((tail > 1 - top_p) | (top_p >= 1)) & (descending > -jnp.inf)
    count = jnp.maximum(is_kept.sum(-1, keepdims=True), 1)
    last = jnp.take_along_axis(descending, count - 1, axis=1)
    is_larger = logits > last
    is_tied = logits == last
    ties = count - is_larger.sum(-1, keepdims=True)  # that many stay, the lower ids
    return is_larger | (is_tied & (lax.cumsum(is_tied.astype(jnp.int32), axis=1) <= ties))


def _keep_all(logits: Float[Array, "batch vocab"], top_k: _Number, top_p: _Number) -> Bool[Array, "batch vocab"]:
    return jnp.ones_like(logits, bool)


def sample_tokens(logits: Float[Array, "batch vocab"], keys: Key[Array, "batch"]) -> Int[Array, "batch"]:
    """Sample one token per row from softmax(logits), with one key per row: rows do not affect each other."""
    return jax.vmap(jax.random.categorical)(keys, logits)
