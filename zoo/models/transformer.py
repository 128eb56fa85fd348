"""Transformers from scratch."""

from collections.abc import Callable, Sequence
from functools import partial

from jaxtyping import Array, Key

from zoo.layers import Attention, GatedMLP, RMSNorm
from zoo.ops.attention import grouped
from zoo.ops.rotary import Rotary
from zoo.parallel import Dim, Remat

from .assemble import assemble, kinds_of, layer
from .blocks import Block
from .decoder import Decoder
from .stack import Kind


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
    form: Callable = grouped,
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
    if head_dim is None and embed % heads:
        raise ValueError(f"embed={embed} does not share out over {heads} heads: give head_dim")
    head_dim = embed // heads if head_dim is None else head_dim
    rotary = Rotary(head_dim) if rotary is None else rotary
    out_scale = (2 * layers) ** -0.5

    norm = partial(RMSNorm, embed)

    def kind(window: int | None) -> Kind:
        mixer = partial(
            Attention,
            embed,
            heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rotary=rotary,
            qk_norm=partial(RMSNorm, head_dim, features=Dim("head_dim")) if qk_norm else None,
            window=window,
            soft_cap=soft_cap,
            form=form,
            out_scale=out_scale,
        )

        ffn = partial(GatedMLP, embed, mlp, out_scale=out_scale)
        return layer(Block, norm=norm, mixer=mixer, ffn=ffn, dropout=dropout)

    return assemble(
        vocab=vocab,
        embed=embed,
        kinds=kinds_of((windows[i % len(windows)] for i in range(layers)), kind),
        norm=norm,
        tied=tied,
        dropout=dropout,
        remat=remat,
        key=key,
    )
