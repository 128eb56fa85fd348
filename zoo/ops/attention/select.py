"""The choice of an implementation of attention, by platform, shapes and options."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ..implementations import AUTO, Implementation, Operation, always_holds
from ..platform import current_platform, stand_in_platform
from ..tokamax import UNMEASURED
from .blockwise import blockwise_attention, blockwise_attention_with_lse
from .fused import find_cudnn_obstacle, fused_attention
from .grouped import grouped_query_attention, grouped_query_attention_with_lse
from .mask import AttentionMask
from .reference import reference_attention
from .request import AttentionRequest
from .splash import find_splash_drawback, find_splash_obstacle, splash_attention
from .tokamax_attention import find_tokamax_attention_obstacle, tokamax_attention


def attention(
    query: Float[Array, "batch query_seq heads head_dim"],
    key: Float[Array, "batch key_seq kv_heads head_dim"],
    value: Float[Array, "batch key_seq kv_heads value_dim"],
    attention_mask: AttentionMask,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "heads"] | None = None,
    decay_channels: bool = False,
    implementation: str | Callable = AUTO,
) -> Float[Array, "batch query_seq heads value_dim"]:
    """Compute attention by an implementation of `ATTENTION`, or by a function of the same arguments. A function needs
    `decay_channels` only for layers that use them.

    **Raises** `ValueError` for an unknown name, and for an implementation that cannot compute this, with the reason.
    """
    request = AttentionRequest.from_arrays(query, key, value, attention_mask, soft_cap, sinks, decay_channels)
    run = ATTENTION.select(implementation, request).function
    options: dict[str, Any] = {"scale": scale, "soft_cap": soft_cap, "sinks": sinks}
    if decay_channels:
        options["decay_channels"] = True
    return run(query, key, value, attention_mask, **options)


def attention_with_lse(
    query: Float[Array, "batch query_seq heads head_dim"],
    key: Float[Array, "batch key_seq kv_heads head_dim"],
    value: Float[Array, "batch key_seq kv_heads value_dim"],
    attention_mask: AttentionMask,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    decay_channels: bool = False,
    implementation: str | Callable = AUTO,
) -> tuple[Float[Array, "batch query_seq heads value_dim"], Float[Array, "batch query_seq heads"]]:
    """Compute attention to some of the keys, and the log-sum-exp of their scores, by an implementation of
    `ATTENTION_WITH_LSE`. The log-sum-exps merge the outputs over several such sets of keys.

    **Raises** `ValueError` for any other name and for a function, whose log-sum-exp is not known.
    """
    if not isinstance(implementation, str):
        name = getattr(implementation, "__name__", type(implementation).__name__)
        names = ", ".join(ATTENTION_WITH_LSE.names)
        raise ValueError(f"{ATTENTION_WITH_LSE.name} needs the log-sum-exp, which {name} does not return: use {names}")
    request = AttentionRequest.from_arrays(query, key, value, attention_mask, soft_cap, None, decay_channels)
    run = ATTENTION_WITH_LSE.select(implementation, request).function
    options = {"scale": scale, "soft_cap": soft_cap, "decay_channels": decay_channels}
    return run(query, key, value, attention_mask, **options)


def merge_attention(
    parts: Sequence[tuple[Float[Array, "batch query_seq heads value_dim"], Float[Array, "batch query_seq heads"]]],
    sinks: Float[Array, "heads"],
) -> Float[Array, "batch query_seq heads value_dim"]:
    """Return attention to several sets of keys, and to `sinks`, from the output and log-sum-exp L of each set:

        sum_i exp(L_i) output_i / (exp(sink) + sum_i exp(L_i))

    Computed in float32. A query without keys in a set has a log-sum-exp of about -1e30, and no weight there.
    """
    sinks = sinks.astype(jnp.float32)
    highest = functools.reduce(jnp.maximum, [lse for _, lse in parts], sinks)
    highest = lax.stop_gradient(highest)
    total = jnp.exp(sinks - highest)
    mixed = jnp.zeros((), jnp.float32)
    for output, lse in parts:
        weight = jnp.exp(lse - highest)
        total = total + weight
        mixed = mixed + weight[..., None] * output.astype(jnp.float32)
    return (mixed / total[..., None]).astype(parts[0][0].dtype)


def _find_grouped_drawback(request: AttentionRequest) -> str | None:
    # On two cores of a CPU grouped attention is faster for 1,024 queries and keys (11 ms instead of 16, for two rows
    # with 4 heads of 64), as fast for 256 queries of 4,096 keys, and slower beyond, unless there are few queries, as in
    # decoding. With positions it multiplies the empty slots of a cache too: a prompt of 2,048 tokens took 1.6 times as
    # long.
    if stand_in_platform.value == "cpu":  # traced in shapes to count products: grouped attention has no loop
        return None
    pairs = 2**18 if request.has_positions and current_platform() == "cpu" else 2**20
    if not always_holds(lambda: request.query_seq >= 128 and request.query_seq * request.key_seq > pairs):
        return None
    return f"it holds the scores of {request.query_seq} queries and {request.key_seq} keys"


def _find_blockwise_obstacle(request: AttentionRequest) -> str | None:
    if request.has_selection:
        return "queries select their keys, and it knows positions and segments only"
    return None


ATTENTION = Operation[AttentionRequest](
    "attention",
    (
        Implementation(
            "cudnn", functools.partial(fused_attention, implementation="cudnn"), find_obstacle=find_cudnn_obstacle
        ),
        Implementation("splash", splash_attention, find_splash_obstacle, find_splash_drawback),
        Implementation("tokamax", tokamax_attention, find_tokamax_attention_obstacle, lambda _: UNMEASURED),
        Implementation("grouped", grouped_query_attention, find_drawback=_find_grouped_drawback),
        Implementation("blockwise", blockwise_attention, _find_blockwise_obstacle),
        Implementation("reference", reference_attention, find_drawback=lambda _: "it is slow, for tests"),
    ),
    kind="attention",
)
"""Implementations of attention, in the order in which `"auto"` tries them."""

ATTENTION_WITH_LSE = Operation[AttentionRequest](
    "attention to some of the keys",
    (
        Implementation("grouped", grouped_query_attention_with_lse, find_drawback=_find_grouped_drawback),
        Implementation("blockwise", blockwise_attention_with_lse, _find_blockwise_obstacle),
    ),
    kind="attention",
)
"""The implementations that also return the log-sum-exp."""
