"""Forgetting attention: softmax attention whose forget gates lower the scores of earlier keys.

Lin et al., arXiv:2503.02130, section 3.1. With a forget gate f between 0 and 1 for each token and head, the score of
query t and key j has the log decays of the tokens in (j, t]:

    score = scale * query_t . key_j + log f_{j+1} + ... + log f_t
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

from ..implementations import AUTO
from .decays import append_decay_sums, sum_log_decays
from .grouped import group_size
from .mask import AttentionMask
from .select import attention


def forgetting_attention(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq kv_heads head_dim"],
    value: Float[Array, "batch seq kv_heads value_dim"],
    log_forget: Float[Array, "batch seq kv_heads"],
    attention_mask: AttentionMask,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    implementation: str | Callable = AUTO,
) -> Float[Array, "batch seq heads value_dim"]:
    """Compute forgetting attention within sequences. The query heads of a key head share its gates, `log_forget`, the
    logarithms of f.

    **Raises** `ValueError` as `attention` does; implementations without `decay_channels` are refused by name.
    """
    sums = sum_log_decays(log_forget)
    query_sums = jnp.repeat(sums, group_size(query, key), axis=2)
    return attention(
        append_decay_sums(query, query_sums),
        append_decay_sums(key, sums),
        value,
        attention_mask,
        scale=scale,
        soft_cap=soft_cap,
        decay_channels=True,
        implementation=implementation,
    )
