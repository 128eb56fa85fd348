"""The choice of an implementation of attention, by platform, shapes and options."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float

from ..implementations import AUTO, Implementation, Operation, refuse_other_platforms
from .fused import fused_attention
from .grouped import grouped_query_attention
from .mask import AttentionMask
from .reference import reference_attention


@dataclasses.dataclass(frozen=True)
class AttentionRequest:
    """Platform-independent facts of a call, by which an implementation is chosen."""

    batch: int
    query_seq: int
    key_seq: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: Any
    causal: bool
    window: int | None = None
    has_segments: bool = False
    has_positions: bool = False
    soft_cap: float | None = None
    has_sinks: bool = False

    @classmethod
    def from_arrays(
        cls, query: Array, key: Array, value: Array, attention_mask: AttentionMask, soft_cap: float | None, sinks: Any
    ) -> "AttentionRequest":
        """Describe a call of `attention`."""
        return cls(
            batch=query.shape[0],
            query_seq=query.shape[1],
            key_seq=key.shape[1],
            heads=query.shape[2],
            kv_heads=key.shape[2],
            head_dim=query.shape[3],
            value_dim=value.shape[3],
            dtype=query.dtype,
            causal=attention_mask.causal,
            window=attention_mask.window,
            has_segments=attention_mask.query_segments is not None,
            has_positions=attention_mask.query_positions is not None,
            soft_cap=soft_cap,
            has_sinks=sinks is not None,
        )


def attention(
    query: Float[Array, "batch query_seq heads head_dim"],
    key: Float[Array, "batch key_seq kv_heads head_dim"],
    value: Float[Array, "batch key_seq kv_heads value_dim"],
    attention_mask: AttentionMask,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "heads"] | None = None,
    implementation: str | Callable = AUTO,
) -> Float[Array, "batch query_seq heads value_dim"]:
    """Compute attention by an implementation of `ATTENTION`, or by a function of the same arguments.

    **Raises** `ValueError` for an unknown name, and for an implementation that cannot compute this, with the reason.
    """
    request = AttentionRequest.from_arrays(query, key, value, attention_mask, soft_cap, sinks)
    run = ATTENTION.select(implementation, request).function
    return run(query, key, value, attention_mask, scale=scale, soft_cap=soft_cap, sinks=sinks)


def _find_cudnn_obstacle(request: AttentionRequest) -> str | None:
    if reason := refuse_other_platforms("gpu"):
        return reason
    if request.soft_cap is not None:
        return "scores have a soft cap"
    if request.has_sinks:
        return "there are attention sinks"
    if request.value_dim != request.head_dim:
        return f"values are {request.value_dim} wide and keys {request.head_dim}"
    return None


ATTENTION = Operation[AttentionRequest](
    "attention",
    (
        Implementation(
            "cudnn", functools.partial(fused_attention, implementation="cudnn"), find_obstacle=_find_cudnn_obstacle
        ),
        Implementation("grouped", grouped_query_attention),
        Implementation("reference", reference_attention, find_drawback=lambda _: "it is slow, for tests"),
    ),
    kind="attention",
)
"""Implementations of attention, in the order in which `"auto"` tries them."""
