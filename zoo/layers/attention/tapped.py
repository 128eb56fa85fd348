"""Attention whose queries, keys, values and probabilities can be read and edited by name (`zoo.capture`, `zoo.patch`).

Queries, keys and values are those that are multiplied: with RoPE, QK norm and biases. While decoding they are those of
the new tokens; an edited key goes into the cache. Probabilities exist only where they are asked for, in a layer that
then computes attention by its definition.
"""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float

from zoo.ops.attention import AttentionMask, attention
from zoo.ops.attention.reference import attention_probabilities, average_values
from zoo.ops.implementations import AUTO
from zoo.parallel.scope import asks_for, tap_value
from zoo.shapes import HeadVectors

PROBABILITIES = "probabilities"
"""Name of the probabilities of an attention layer."""
VALUE_NAMES = ("queries", "keys", "values", PROBABILITIES)
"""Names of the values of an attention layer, besides those that modules take and return."""


def tap_heads(
    query: HeadVectors,
    key: Float[Array, "batch key_seq kv_heads head_dim"],
    value: Float[Array, "batch key_seq kv_heads value_dim"],
) -> tuple[HeadVectors, Array, Array]:
    """Pass the queries, keys and values of tokens through the taps of the layer. In cross-attention the keys and values
    are of a source."""
    dims = ("batch", "seq", "heads", "head_dim"), ("batch", "seq", "kv_heads", "head_dim")
    query = tap_value("queries", query, dims[0])
    key = tap_value("keys", key, dims[1])
    return query, key, tap_value("values", value, (*dims[1][:3], "value_dim"))


def select_attention() -> Callable[..., HeadVectors]:
    """Return `zoo.ops.attention.attention`; or attention by its definition, in a layer whose probabilities are asked
    for."""
    return _attend_by_definition if asks_for(PROBABILITIES) else attention


def _attend_by_definition(
    query: HeadVectors,
    key: Float[Array, "batch key_seq kv_heads _"],
    value: Float[Array, "batch key_seq kv_heads _"],
    mask: AttentionMask,
    *,
    implementation: str | Callable = AUTO,
    **options: Any,
) -> HeadVectors:
    """Attend as `attention` does, in whatever `implementation`, and pass the probabilities through the taps."""
    probabilities = attention_probabilities(query, key, mask, **options)
    return average_values(tap_value(PROBABILITIES, probabilities, ("batch", "heads", "seq", "key_seq")), value)


def refuse_probabilities(reason: str) -> None:
    """**Raises** `NotImplementedError` if the probabilities of the layer are read or edited."""
    if asks_for(PROBABILITIES):
        raise NotImplementedError(f"{PROBABILITIES} of attention: {reason}")
