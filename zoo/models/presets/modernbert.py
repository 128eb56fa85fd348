"""Bidirectional Transformer for masked language modeling, initialized from scratch."""

from collections.abc import Callable, Sequence
from functools import partial

from jaxtyping import Array, Key

from zoo._keywords import check_keywords
from zoo.layers import GatedMLP, LayerNorm
from zoo.layers.encoders.bidirectional_attention import BidirectionalAttention
from zoo.layers.linear import resolve_head_dim
from zoo.ops.activations import gelu
from zoo.ops.rotary import Rotary
from zoo.parallel.remat import Remat

from ..blocks import make_unnormalized_block
from ..decoder import Block
from ..encoders.heads import DenseTransform, MaskedLMHead
from ..encoders.text import Encoder, build_encoder
from ..loop import Loop


@check_keywords
def ModernBERT(
    *,
    vocab: int,
    embed: int,
    layers: int,
    heads: int,
    mlp: int,
    rotary: Rotary | None = None,
    windows: Sequence[int | None] = (None,),
    tied: bool = True,
    dropout: float = 0.0,
    remat: Remat = "none",
    loop: Loop = "auto",
    implementation: str | Callable = "auto",
    key: Key[Array, ""],
) -> Encoder:
    """Build a masked language model (BERT, Devlin et al., arXiv:1810.04805) of ModernBERT's layers (Warner et al.,
    arXiv:2412.13663): LayerNorm before each sublayer and after the embedding, RoPE, GeGLU, no biases but the logits'.

    - `vocab`, `embed`, `layers`, `heads`, `mlp`, `tied`, `dropout`, `remat`, `loop`, `implementation`: as for
      `Transformer`.
    - `rotary`: RoPE of all layers; over all of a head with base 10,000 by default.
    - `windows`: a pattern that repeats over the layers; a token attends to itself and to window - 1 tokens on each
      side, None to all. The published models have `(None, 65, 65)`.

    Initialization is as in `Transformer`. The loss is `zoo.cross_entropy`, whose targets are the tokens before masking,
    and negative where none was masked.

    **Raises** `ValueError` for no layers.
    """
    if layers < 1:
        raise ValueError(f"a ModernBERT has at least 1 layer, not {layers}")
    if rotary is None:
        rotary = Rotary(resolve_head_dim(embed, heads, None))
    out_scale = (2 * layers) ** -0.5
    norm = partial(LayerNorm, embed, bias=False)
    options = {"rotary": rotary, "out_scale": out_scale, "implementation": implementation}
    mixers = {window: partial(BidirectionalAttention, embed, heads, window=window, **options) for window in windows}
    ffn = partial(GatedMLP, embed, mlp, activation=gelu, out_scale=out_scale)
    transform = partial(DenseTransform, embed, activation=gelu, norm=norm, bias=False)
    return build_encoder(
        vocab=vocab,
        embed=embed,
        layers=[(mixers[windows[i % len(windows)]], ffn) for i in range(layers)],
        block=[make_unnormalized_block, *[Block] * (layers - 1)],
        norm=norm,
        embedding_norm=norm,
        final_norm=norm,
        head=partial(MaskedLMHead, embed, vocab, transform=transform, tied=tied),
        dropout=dropout,
        remat=remat,
        loop=loop,
        key=key,
    )
