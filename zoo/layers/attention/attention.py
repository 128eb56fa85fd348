"""Softmax attention with grouped-query heads, RoPE and a KV cache."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from zoo.ops.attention import ATTENTION, AttentionMask
from zoo.ops.rotary import Rotary
from zoo.parallel import Dim, full_precision, implementation_option
from zoo.shapes import HeadVectors, HiddenStates, KVHeads

from ..abstract import AbstractLinear, AbstractNorm
from ..heads import split_heads
from ..kv_cache import KeyValueCache
from ..token_info import TokenInfo
from .base import AbstractGroupedAttention, check_attention_sizes, make_projections, rotate


class Attention(AbstractGroupedAttention):
    """Causal grouped-query attention (Ainslie et al., arXiv:2305.13245): `heads` query heads share `kv_heads` key and
    value heads.

        q, k = rotate(clip(norm(W x))),    v = clip(W_v x)
        y = W_out softmax(q kᵀ scale + mask) v

    Optional: QK norm, over head_dim or over all heads together; a clip to ±`clip`; RoPE; a sliding `window` of w
    tokens, in which a token attends to itself and the w - 1 before it; `soft_cap` c, which bounds scores to c
    tanh(score / c) (Gemma 2, arXiv:2408.00118, section 2); a block-causal mask, in which a token also attends to the
    later tokens of its `block`, counted from position 0 of its document (block diffusion, arXiv:2503.09573, section
    3.2); attention `sinks`, one learned logit per head that joins the softmax and adds no value (GPT-OSS,
    arXiv:2508.10925, section 2.2). Sinks keep their dtype under `cast` and are used in float32; transformers rounds
    them, and all scores, to the compute dtype.

    Heads are sharded over `tensor`; one head is never divided. With fewer kv_heads than devices on that axis, keys and
    values are replicated and each device selects the KV heads of its queries. A sequence sharded over `context` is
    attended to as `Layout.context` says (`zoo.layers.attention.context`), and a KV cache sharded over it by a merge of
    the outputs over its shards (`zoo.layers.attention.cached`).
    """

    query: AbstractLinear
    key: AbstractLinear
    value: AbstractLinear
    out: AbstractLinear
    query_norm: AbstractNorm | None
    key_norm: AbstractNorm | None
    sinks: Float[Array, "heads"] | None = full_precision()

    head_dim: int = eqx.field(static=True)
    group: int = eqx.field(static=True)
    """Query heads per KV head."""
    rotary: Rotary | None = eqx.field(static=True)
    window: int | None = eqx.field(static=True)
    block: int | None = eqx.field(static=True)
    soft_cap: float | None = eqx.field(static=True)
    scale: float | None = eqx.field(static=True)
    clip: float | None = eqx.field(static=True)
    norm_over_heads: bool = eqx.field(static=True)
    implementation: str | Callable = implementation_option(ATTENTION)

    def __init__(
        self,
        embed: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        rotary: Rotary | None = None,
        qk_norm: Callable[[], AbstractNorm] | None = None,
        norm_over_heads: Callable[..., AbstractNorm] | None = None,
        bias: bool = False,
        out_bias: bool = False,
        window: int | None = None,
        block: int | None = None,
        soft_cap: float | None = None,
        scale: float | None = None,
        clip: float | int | None = None,
        sinks: bool = False,
        out_embed: int | None = None,
        implementation: str | Callable = "auto",
        out_scale: float = 1.0,
        key: Key[Array, ""],
    ):
        """- `kv_heads`: `heads` by default. `head_dim`: `embed / heads` by default.
        - `qk_norm`: factory of a norm over head_dim, called once for queries and once for keys.
        - `norm_over_heads`: instead, factory of a norm over all heads together (OLMoE, arXiv:2409.02060), called with
          their number of features and `features=`.
        - `block`: tokens of a block of a block-causal mask. It allows no KV cache: a step of a denoiser calls the model
          on the text so far.
        - `scale`: of the scores, head_dim ** -0.5 by default.
        - `sinks`: add attention sinks, initialized to 0.
        - `out_embed`: channels of the output, if they are not as many as those of the input.
        - `implementation`: a name in `zoo.ops.attention.ATTENTION`, or a function with the arguments of
          `reference_attention`.

        **Raises** `ValueError` if kv_heads does not divide heads or heads does not divide embed, for an empty window, a
        block below 1 or longer than the window, a clip that is not above 0, or both norms.
        """
        kv_heads, head_dim = check_attention_sizes(embed, heads, kv_heads, head_dim, window)
        AttentionMask(True, window, block=block)  # raises for a block that does not fit
        if clip is not None and clip <= 0:
            raise ValueError(f"a clip bounds values to more than 0, not to {clip}")
        if qk_norm is not None and norm_over_heads is not None:
            raise ValueError("queries and keys have one norm: qk_norm, over head_dim, or norm_over_heads")
        options = {"bias": bias, "out_bias": out_bias, "out_scale": out_scale, "out_embed": out_embed}
        projections = make_projections(embed, heads, kv_heads, head_dim, **options, key=key)
        self.query, self.key, self.value, self.out = projections
        self.query_norm = None if qk_norm is None else qk_norm()
        self.key_norm = None if qk_norm is None else qk_norm()
        if norm_over_heads is not None:
            self.query_norm = norm_over_heads(heads * head_dim, features=Dim("heads", head_dim))
            self.key_norm = norm_over_heads(kv_heads * head_dim, features=Dim("kv_heads", head_dim))
        self.norm_over_heads = norm_over_heads is not None
        self.sinks = jnp.zeros(heads, jnp.float32) if sinks else None
        self.head_dim = head_dim
        self.group = heads // kv_heads
        self.rotary = rotary
        self.window = window
        self.block = block
        self.soft_cap = soft_cap
        self.scale = scale
        self.clip = None if clip is None else float(clip)
        self.implementation = implementation

    def project(
        self, x: HiddenStates, info: TokenInfo, state: KeyValueCache | None
    ) -> tuple[HeadVectors, KVHeads, KVHeads]:
        query = self._split_heads(self.query(x), self.query_norm)
        key = self._split_heads(self.key(x), self.key_norm)
        value = self._split_heads(self.value(x), None)
        query, key = rotate(query, key, self.rotary, x, info, state)
        return query, key, value

    def score_options(self) -> dict[str, Any]:
        options = {"scale": self.scale, "soft_cap": self.soft_cap, "sinks": self.sinks}
        if self.block is not None:
            options["block"] = self.block
        return options

    def _split_heads(
        self, x: Float[Array, "batch seq _"], norm: AbstractNorm | None
    ) -> Float[Array, "batch seq _ head_dim"]:
        """Reshape features to heads, with QK norm and clip."""
        if norm is not None and self.norm_over_heads:
            x = norm(x)
            norm = None
        x = split_heads(x, self.head_dim, norm)
        if self.clip is None:
            return x
        return jnp.clip(x, -self.clip, self.clip)
