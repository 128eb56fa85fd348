"""Transformers from scratch."""

from collections.abc import Callable, Sequence
from functools import partial

from jaxtyping import Array, Key

from zoo.layers import AbstractFeedForward, AbstractMixer, Attention, GatedMLP, RMSNorm
from zoo.layers.linear import resolve_head_dim
from zoo.ops.attention import grouped_query_attention
from zoo.ops.rotary import Rotary
from zoo.parallel import Dim, Remat

from ..blocks import Block
from ..build import build_decoder, make_block_factory, share_factories
from ..decoder import Decoder


def Transformer(
    *,
    vocab: int,
    embed: int,
    layers: int,
    heads: int,
    mlp: int,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    rotary: Rotary | None = None,
    qk_norm: bool = False,
    windows: Sequence[int | None] = (None,),
    soft_cap: float | None = None,
    tied: bool = True,
    dropout: float = 0.0,
    remat: Remat = "none",
    implementation: Callable = grouped_query_attention,
    key: Key[Array, ""],
) -> Decoder:
    """A decoder-only Transformer (Vaswani et al., arXiv:1706.03762) as built since LLaMA (arXiv:2302.13971): RMS norms
    before each sublayer, rotary positions, SwiGLU, no biases.

    - `vocab`, `embed`, `layers`, `heads`, `mlp`: sizes; `kv_heads` fewer than `heads` share keys and values;
      `head_dim` is `embed / heads` unless given.
    - `rotary`: of positions; over all of `head_dim` with base 10,000 unless given.
    - `windows`: a pattern of attention windows that repeats over the layers; None sees everything. `(512, 512, None)`
      has two local layers to a global one.
    - `tied`: the head is the embedding's table.
    - `remat`: what the backward pass computes again, from least to most: "none", "elementwise" (all but matrix
      products), "dots" (attention's products too), "full".
    - `form`: how attention is computed, a function of `zoo.ops.attention`.

    Matrices start with a standard deviation of 1 / sqrt(inputs); those that write to the residual stream are divided by
    sqrt(2 layers) more, so that the stream's variance does not grow with depth (GPT-2, section 2.3).
    """
    if layers < 1:
        raise ValueError(f"a Transformer has at least 1 layer, not {layers}")
    options = {"kv_heads": kv_heads, "head_dim": head_dim, "rotary": rotary, "qk_norm": qk_norm}
    options |= {"windows": windows, "soft_cap": soft_cap, "implementation": implementation}
    return build_transformer(
        vocab=vocab,
        embed=embed,
        mixers=make_attention_factories(embed, heads, layers, **options),
        ffns=[partial(GatedMLP, embed, mlp, out_scale=(2 * layers) ** -0.5)] * layers,
        tied=tied,
        dropout=dropout,
        remat=remat,
        key=key,
    )


def make_attention_factories(
    embed: int,
    heads: int,
    layers: int,
    *,
    kv_heads: int | None,
    head_dim: int | None,
    rotary: Rotary | None,
    qk_norm: bool,
    windows: Sequence[int | None],
    soft_cap: float | None,
    implementation: Callable,
) -> list[Callable[..., Attention]]:
    """A maker of attention for each layer: one object for each window."""
    head_dim = resolve_head_dim(embed, heads, head_dim)
    made = partial(
        Attention,
        embed,
        heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rotary=Rotary(head_dim) if rotary is None else rotary,
        qk_norm=partial(RMSNorm, head_dim, features=Dim("head_dim")) if qk_norm else None,
        soft_cap=soft_cap,
        implementation=implementation,
        out_scale=(2 * layers) ** -0.5,
    )
    by_window = {window: partial(made, window=window) for window in windows}
    return [by_window[windows[i % len(windows)]] for i in range(layers)]


def build_transformer(
    *,
    vocab: int,
    embed: int,
    mixers: Sequence[Callable[..., AbstractMixer]],
    ffns: Sequence[Callable[..., AbstractFeedForward]],
    tied: bool,
    dropout: float,
    remat: Remat,
    key: Key[Array, ""],
) -> Decoder:
    """A decoder of these mixers and feed-forward layers, a maker for each layer. Equal makers are one object."""
    norm = partial(RMSNorm, embed)
    kind = lambda parts: make_block_factory(Block, norm=norm, mixer=parts[0], ffn=parts[1], dropout=dropout)
    return build_decoder(
        vocab=vocab,
        embed=embed,
        factories=share_factories(zip(mixers, ffns, strict=True), kind),
        norm=norm,
        tied=tied,
        dropout=dropout,
        remat=remat,
        key=key,
    )
