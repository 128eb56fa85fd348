"""Attention whose queries, keys, values and probabilities can be read and edited by name (`zoo.capture`, `zoo.patch`).

Queries, keys and values are those that are multiplied: with RoPE, QK norm and biases. While decoding they are those of
the new tokens; an edited key goes into the cache. Probabilities exist only where they are asked for, in a layer that
then computes attention by its definition.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from zoo.ops.attention import AttentionMask, attention, attention_probabilities, average_values
from zoo.ops.implementations import AUTO
from zoo.ops.varying import vary, varying
from zoo.parallel.scope import asks_for, tap_value
from zoo.shapes import HeadVectors, KVHeads, ValueHeads

PROBABILITIES = "probabilities"
"""Name of the value of `tapped_attention`."""
VALUE_NAMES = ("queries", "keys", "values", PROBABILITIES)
"""Names of the values of an attention layer, besides those that modules take and return."""


def tap_heads(query: HeadVectors, key: KVHeads, value: ValueHeads) -> tuple[HeadVectors, KVHeads, ValueHeads]:
    """Pass the queries, keys and values of tokens through the taps of the layer."""
    dims = ("batch", "seq", "heads", "head_dim"), ("batch", "seq", "kv_heads", "head_dim")
    query = tap_value("queries", query, dims[0])
    key = tap_value("keys", key, dims[1])
    return query, key, tap_value("values", value, (*dims[1][:3], "value_dim"))


def tapped_attention(
    query: HeadVectors,
    key: Float[Array, "batch key_seq kv_heads _"],
    value: Float[Array, "batch key_seq kv_heads _"],
    mask: AttentionMask,
    *,
    implementation: str | Callable = AUTO,
    **options: Any,
) -> HeadVectors:
    """Attend as `zoo.ops.attention.attention` does, by the definition where the probabilities are asked for."""
    is_asked = asks_for(PROBABILITIES)
    dims = ("batch", "heads", "seq", "key_seq")
    attend_fast = lambda: attention(query, key, value, mask, implementation=implementation, **options)
    compute = lambda: attention_probabilities(query, key, mask, **options)
    if is_asked is False:
        return attend_fast()
    if is_asked is True:
        return average_values(tap_value(PROBABILITIES, compute(), dims), value)
    shape = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    axes = varying(query) | varying(key)
    probabilities = lax.cond(is_asked, compute, lambda: vary(jnp.zeros(shape), axes))
    probabilities = tap_value(PROBABILITIES, probabilities, dims)
    return lax.cond(is_asked, lambda: average_values(probabilities, value), attend_fast)


def refuse_probabilities(reason: str) -> None:
    """**Raises** `NotImplementedError` if the probabilities of the layer are read or edited."""
    if asks_for(PROBABILITIES) is not False:
        raise NotImplementedError(f"{PROBABILITIES} of attention: {reason}")
