"""From logits to the next token: what is made less likely, what is cut off, and the draw.

Pure functions of a batch of logits. Taken in the order of this file (`penalize`, `cool`, `truncate`, `draw`) they do
what the logits processors of transformers do, ties apart, where a sort has to choose: here the lower id comes first.
Numbers may be traced, so that another temperature is no other program.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

_Number = float | int | Float[Array, ""] | Int[Array, ""]


def penalize_repetition(
    logits: Float[Array, "batch vocab"], seen: Bool[Array, "batch vocab"], penalty: _Number
) -> Float[Array, "batch vocab"]:
    """Tokens already seen made less likely: logit / penalty where it is positive, logit * penalty where it is not.

    A penalty of 1 changes nothing, one below 1 makes repeats likelier. Source: Keskar et al., CTRL, arXiv 1909.05858,
    section 4.1, which divides; negative logits are multiplied since a quotient would make them likelier.
    """
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def apply_temperature(logits: Float[Array, "batch vocab"], temperature: _Number) -> Float[Array, "batch vocab"]:
    """logits / temperature, shifted so that the largest is 0: no temperature above 0, however low, overflows."""
    return (logits - logits.max(-1, keepdims=True)) / jnp.maximum(temperature, jnp.finfo(logits.dtype).tiny)


def filter_logits(
    logits: Float[Array, "batch vocab"],
    *,
    top_k: _Number | None = None,
    top_p: _Number | None = None,
    min_p: _Number | None = None,
) -> Float[Array, "batch vocab"]:
    """The logits with -inf for tokens that are not to be drawn; the likeliest always stays.

    - `top_k`: the k largest stay, and what equals the k-th (Fan et al., arXiv 1805.04833, section 5.4). All stay
      where there are fewer.
    - `top_p`: of what `top_k` left, the fewest largest whose probabilities sum to p or more, hence with the one that
      crosses p: a nucleus (Holtzman et al., arXiv 1904.09751, section 3.1).
    - `min_p`: of what is left, those at least min_p times as probable as the likeliest (Nguyen et al., arXiv
      2407.01082, section 3).

    Sorts once for `top_k` and `top_p` together, and not at all for `min_p`.
    """
    kept = jnp.ones_like(logits, bool)
    if top_p is not None:
        ids = jnp.broadcast_to(jnp.arange(logits.shape[1]), logits.shape)
        rising, sorted_ids = lax.sort((-logits, ids), num_keys=1, is_stable=True)  # of the negative: largest first
        falling = -rising if top_k is None else jnp.where(-rising >= _kth_largest(-rising, top_k), -rising, -jnp.inf)
        # Summed from the small end: the tail that is cut would be lost to rounding in a sum from the large end.
        tail = lax.cumsum(jax.nn.softmax(falling), axis=1, reverse=True)
        count = jnp.maximum((tail > 1 - top_p).sum(-1, keepdims=True), 1)
        last, last_id = (jnp.take_along_axis(x, count - 1, axis=1) for x in (falling, sorted_ids))
        kept = (logits > last) | ((logits == last) & (ids <= last_id))
    elif top_k is not None:
        kept = logits >= _kth_largest(-lax.sort(-logits), top_k)
    if min_p is not None:
        kept &= logits >= logits.max(-1, keepdims=True) + jnp.log(min_p)
    return jnp.where(kept, logits, -jnp.inf)


def _kth_largest(sorted_logits: Float[Array, "batch vocab"], k: _Number) -> Float[Array, "batch 1"]:
    """The k-th largest of each row, or the last where there are fewer."""
    return lax.dynamic_slice_in_dim(sorted_logits, jnp.clip(k, 1, sorted_logits.shape[1]) - 1, 1, axis=1)


def sample_tokens(logits: Float[Array, "batch vocab"], keys: Key[Array, "batch"]) -> Int[Array, "batch"]:
    """A token for each row from softmax(logits), by the row's own key: other rows do not matter."""
    return jax.vmap(jax.random.categorical)(keys, logits)
