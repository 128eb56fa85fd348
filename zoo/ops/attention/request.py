"""Description of a call of attention, which the choice of its implementation depends on."""

import dataclasses
from typing import Any

from jaxtyping import Array

from .mask import AttentionMask


@dataclasses.dataclass(frozen=True)
class AttentionRequest:
    """Platform-independent facts of a call, which the choice of an implementation depends on."""

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
    block: int | None = None
    """Tokens of a block of a block-causal mask."""
    has_segments: bool = False
    has_positions: bool = False
    has_selection: bool = False
    """True if each query has a selection of keys."""
    soft_cap: float | None = None
    has_sinks: bool = False
    has_decays: bool = False
    """True if queries and keys hold sums of log decays."""
    has_shared_segments: bool = False
    """True if queries and keys share one array of segments: each token then attends to itself."""
    has_one_dtype: bool = True
    """True if queries, keys and values have one dtype."""

    @property
    def is_structural(self) -> bool:
        """True if the mask depends only on causality and the window: it is known when the program is traced."""
        return not (self.has_segments or self.has_positions or self.has_selection or self.block is not None)

    @classmethod
    def from_arrays(
        cls,
        query: Array,
        key: Array,
        value: Array,
        attention_mask: AttentionMask,
        soft_cap: float | None,
        sinks: Any,
        decay_channels: bool = False,
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
            block=attention_mask.block,
            has_segments=attention_mask.query_segments is not None,
            has_positions=attention_mask.query_positions is not None,
            has_selection=attention_mask.selected is not None,
            soft_cap=soft_cap,
            has_sinks=sinks is not None,
            has_decays=decay_channels,
            has_shared_segments=(
                attention_mask.query_segments is not None
                and attention_mask.query_segments is attention_mask.key_segments
            ),
            has_one_dtype=query.dtype == key.dtype == value.dtype,
        )
