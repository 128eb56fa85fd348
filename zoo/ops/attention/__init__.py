"""Softmax attention: `attention` chooses one of several implementations, which agree with `reference_attention`.

    scores  = soft_cap * tanh(scale * query . key / soft_cap)       without soft_cap: scale * query . key
    weights = softmax(scores) over the keys that the attention mask allows
    output  = sum(weights * value)

Attention sinks add one score s per head to the softmax denominator:

    weights = exp(scores) / (exp(s) + sum(exp(scores)))

With `decay_channels`, queries and keys hold running sums c of log decays in their last channels, and c_query - c_key is
added to the scores, after the cap: `forgetting_attention`, by implementations in plain JAX.

All implementations take the same arguments (Vaswani et al., arXiv 1706.03762, section 3.2; grouped queries: Ainslie et
al., arXiv 2305.13245; windows: Beltagy et al., arXiv 2004.05150, section 3.1; the cap: Gemma 2, arXiv 2408.00118,
section 2; sinks: GPT-OSS, arXiv 2508.10925, section 2.2, after StreamingLLM, arXiv 2309.17453, section 3; with s = 0
"softmax off by one"):

- `query` head i attends to key and value head i // (heads // kv_heads).
- `attention_mask` is an `AttentionMask`. A fully masked query returns zeros and gets no gradient.
- `scale` is head_dim ** -0.5 by default.
- The softmax is computed in float32, including the sinks. The result has the dtype of `value`.

**Raises** `ValueError` where kv_heads does not divide heads, where the mask does not fit the arrays, and where an
implementation does not support an argument. In einsums b is batch, q query_seq, k key_seq, h heads, n kv_heads, r the
rows of a key head (its query heads times query_seq), d head_dim.
"""

from .blockwise import blockwise_attention
from .forgetting import forgetting_attention
from .fused import fused_attention
from .grouped import grouped_query_attention
from .mask import AttentionMask
from .reference import reference_attention
from .select import ATTENTION, attention
from .splash import splash_attention

__all__ = [
    "ATTENTION",
    "AttentionMask",
    "attention",
    "blockwise_attention",
    "forgetting_attention",
    "fused_attention",
    "grouped_query_attention",
    "reference_attention",
    "splash_attention",
]
