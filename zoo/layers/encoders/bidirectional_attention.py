"""Softmax attention in which each token attends to those before and after it, for encoders."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Key

from zoo.ops.attention import ATTENTION, AttentionMask
from zoo.ops.axial_rotary import AxialRotary
from zoo.ops.rotary import Rotary
from zoo.parallel import all_gather, implementation_option
from zoo.parallel.collectives import sharded_axes
from zoo.shapes import HiddenStates, ResidualStream

from ..abstract import AbstractLinear, AbstractMixer, AbstractNorm
from ..attention.base import check_attention_sizes, make_projections
from ..attention.context import find_places
from ..attention.tapped import VALUE_NAMES, select_attention, tap_heads
from ..heads import select_kv_heads, split_heads
from ..rotary import compute_cos_sin, rotate_heads
from ..token_info import TokenInfo


class BidirectionalAttention(AbstractMixer):
    """Grouped-query attention without a causal mask: y = W_out softmax(q kᵀ scale) v, with q and k turned by RoPE if
    there is one, over all tokens of a segment, or those within a window (Vaswani et al., arXiv:1706.03762,
    section 3.2; Devlin et al., arXiv:1810.04805). Scores may have a soft cap, and queries, keys and values a norm over
    head_dim, as in `Attention`.

    With `within_windows`, the segments are `TokenInfo.windows` of an image.

    Heads are sharded over `tensor`, as in `Attention`. Where `context` shards the sequence, keys and values are
    all-gathered, and each device attends with the queries of its own tokens.
    """

    shards_sequence = True
    value_names = VALUE_NAMES

    query: AbstractLinear
    key: AbstractLinear
    value: AbstractLinear
    out: AbstractLinear
    query_norm: AbstractNorm | None
    key_norm: AbstractNorm | None
    value_norm: AbstractNorm | None

    head_dim: int = eqx.field(static=True)
    group: int = eqx.field(static=True)
    """Query heads per KV head."""
    rotary: Rotary | AxialRotary | None = eqx.field(static=True)
    window: int | None = eqx.field(static=True)
    scale: float | None = eqx.field(static=True)
    soft_cap: float | None = eqx.field(static=True)
    within_windows: bool = eqx.field(static=True)
    implementation: str | Callable = implementation_option(ATTENTION)

    def __init__(
        self,
        embed: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        rotary: Rotary | AxialRotary | None = None,
        window: int | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
        within_windows: bool = False,
        qk_norm: Callable[[], AbstractNorm] | None = None,
        value_norm: Callable[[], AbstractNorm] | None = None,
        bias: bool = False,
        out_bias: bool = False,
        implementation: str | Callable = "auto",
        out_scale: float = 1.0,
        key: Key[Array, ""],
    ):
        """- `kv_heads`: `heads` by default. `head_dim`: `embed / heads` by default.
        - `window`: a token attends to itself and to `window - 1` tokens on each side; None to all.
        - `qk_norm`: factory of a norm over head_dim, called once for queries and once for keys; `value_norm` of one of
          values.
        - `implementation`: a name in `zoo.ops.attention.ATTENTION`, or a function with the arguments of
          `reference_attention`.

        **Raises** `ValueError` if kv_heads does not divide heads, or heads does not divide embed, and for an empty
        window.
        """
        kv_heads, head_dim = check_attention_sizes(embed, heads, kv_heads, head_dim, window)
        options = {"bias": bias, "out_bias": out_bias, "out_scale": out_scale}
        projections = make_projections(embed, heads, kv_heads, head_dim, key=key, **options)
        self.query, self.key, self.value, self.out = projections
        self.query_norm = None if qk_norm is None else qk_norm()
        self.key_norm = None if qk_norm is None else qk_norm()
        self.value_norm = None if value_norm is None else value_norm()
        self.head_dim = head_dim
        self.group = heads // kv_heads
        self.rotary = rotary
        self.window = window
        self.scale = scale
        self.soft_cap = soft_cap
        self.within_windows = within_windows
        self.implementation = implementation

    def __call__(self, x: HiddenStates, info: TokenInfo, state: None = None) -> tuple[ResidualStream, None]:
        """**Raises** `ValueError` for tokens without windows, or without coordinates, that the layer needs."""
        query = split_heads(self.query(x), self.head_dim, self.query_norm)
        key = split_heads(self.key(x), self.head_dim, self.key_norm)
        value = split_heads(self.value(x), self.head_dim, self.value_norm)
        if self.rotary is not None:
            cos, sin = compute_cos_sin(self.rotary, x, info)
            query = rotate_heads(query, self.rotary, cos, sin)
            key = rotate_heads(key, self.rotary, cos, sin)
        query, key, value = map(checkpoint_name, tap_heads(query, key, value), ("query", "key", "value"))
        key, value = (select_kv_heads(x, query, self.group) for x in (key, value))
        segments = info.segment_ids
        if self.within_windows:
            segments = info.windows
            if segments is None:
                raise ValueError("this layer attends within windows, and the tokens have none in TokenInfo.windows")
        places = ()
        if segments is None and info.positions is not None and self.window is None:
            places = (info.positions, info.positions)  # negative ones are seen by no token, and see the others
        mask = AttentionMask(False, self.window, segments, segments, *places)
        if sharded_axes(query, "seq"):
            key, value = (all_gather(x, "seq", axis=1) for x in (key, value))
            every = None if segments is None else all_gather(segments, "seq", axis=1)
            mask = AttentionMask(False, self.window, segments, every, *find_places(query, key.shape[1]))
        options = {"scale": self.scale, "soft_cap": self.soft_cap, "implementation": self.implementation}
        mixed = select_attention()(query, key, value, mask, **options)
        return self.out(checkpoint_name(mixed, "attention").reshape(*mixed.shape[:2], -1)), None

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> Any:
        """**Raises** `NotImplementedError`: a token attends to later ones, so none can be decoded before them."""
        raise NotImplementedError("attention in both directions has no KV cache: a token attends to those after it")
