"""Attention to a KV cache whose slots may be sharded over devices: the `context` axis of a mesh in generation.

Each of n devices holds 1/n of the slots. Every query attends on every device to the slots of that device, and outputs o
with log-sum-exps L merge:

    M = pmax(L),    w = exp(L - M),    output = psum(w o) / psum(w)

Sinks of score z join once: M = max(pmax(L), z), and exp(z - M) is added to psum(w). Per layer and device, for T new
tokens, H query heads of D features and values of V features, whatever the length of the cache:

    decoding           4 T H (V + 2)     bytes of all-reduces: the sums in float32, and M
    pieces of prompts  4 T H (V + 2)     the same, but the sums are reduce-scattered: each device receives its tokens
                       T (q + k)         bytes of all-gathers: a token's query, and its key and value (or latent)

The tokens of a piece are sharded as in training. Keys and values are all-gathered because the number of a slot, not of
a token, determines its device: a cache is then the same array on any mesh.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from zoo.ops.attention import AttentionMask
from zoo.ops.attention.select import attention_with_lse
from zoo.ops.implementations import AUTO
from zoo.parallel import all_gather, reduce
from zoo.parallel.collectives import sharded_axes
from zoo.shapes import HeadVectors

from .tapped import refuse_probabilities, select_attention


def cached_attention(
    query: HeadVectors,
    key: Float[Array, "batch key_seq kv_heads _"],
    value: Float[Array, "batch key_seq kv_heads _"],
    mask: AttentionMask,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "heads"] | None = None,
    decay_channels: bool = False,
    implementation: str | Callable = AUTO,
) -> HeadVectors:
    """Attend to the slots of a cache, whose positions are the key positions of `mask`. Where slots are sharded, a
    selection of keys in the mask covers all new queries, and the slots of this device.

    **Raises** `ValueError` where slots are sharded, for an implementation that returns no log-sum-exp.
    """
    options: dict[str, Any] = {"scale": scale, "soft_cap": soft_cap, "implementation": implementation}
    options["decay_channels"] = decay_channels
    if mask.key_positions is None or not (axes := sharded_axes(mask.key_positions, "slots")):
        return select_attention()(query, key, value, mask, sinks=sinks, **options)
    refuse_probabilities(f"no device has them where {' x '.join(axes)} shards the slots of a cache: leave it at 1")
    assert mask.query_positions is not None  # there are key positions
    into = "seq" if sharded_axes(query, "seq") else None
    places = {"query_positions": mask.query_positions, "query_segments": mask.query_segments}
    places = jax.tree.map(lambda x: all_gather(x, "seq", axis=1), places)
    query = all_gather(query, "seq", axis=1)
    mask = dataclasses.replace(mask, **places)
    output, lse = attention_with_lse(query, key, value, mask, **options)
    highest = lax.pmax(lse, axes)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32)
        highest = jnp.maximum(highest, sinks)
    weight = jnp.exp(lse - highest)[..., None]
    sums = jnp.concatenate([weight * output.astype(jnp.float32), weight], axis=-1)
    if sinks is not None:  # once: on the first device
        share = jnp.where(lax.axis_index(axes) == 0, jnp.exp(sinks - highest), 0)
        sums = sums.at[..., -1].add(share)
    sums = reduce(sums, over="slots", into=into)
    return (sums[..., :-1] / sums[..., -1:]).astype(value.dtype)
