"""Decoder-only Transformer, initialized from scratch."""

from collections.abc import Callable, Sequence
from functools import partial

import jax
from jaxtyping import Array, Key

from zoo._checks import wrap_key
from zoo._keywords import check_keywords
from zoo.layers import AbstractMixer, GatedMLP, RMSNorm
from zoo.ops.rotary import Rotary
from zoo.parallel.remat import Remat

from ..build import build_decoder
from ..decoder import Decoder
from ..hyper_connections import make_hyper_connections
from ..loop import Loop
from ..segment import check_order
from .mixers import make_mixer_pattern


@check_keywords
def Transformer(
    *,
    vocab: int,
    embed: int,
    layers: int,
    heads: int,
    mlp: int,
    mixer: Callable[..., AbstractMixer] | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    rotary: Rotary | None = None,
    qk_norm: bool = False,
    windows: Sequence[int | None] = (None,),
    soft_cap: float | None = None,
    streams: int = 1,
    order: Sequence[int] | None = None,
    tied: bool = True,
    dropout: float = 0.0,
    remat: Remat = "none",
    loop: Loop = "auto",
    implementation: str | Callable = "auto",
    key: Key[Array, ""],
) -> Decoder:
    """Build a decoder-only Transformer (Vaswani et al., arXiv:1706.03762) as in LLaMA (arXiv:2302.13971): RMSNorm
    before each sublayer, RoPE, SwiGLU, no biases.

    - `vocab`, `embed`, `layers`, `heads`, `mlp`: sizes. With fewer `kv_heads` than `heads`, grouped-query attention;
      `head_dim` defaults to `embed / heads`.
    - `mixer`: a class of `zoo.layers`, a class of your own, or `functools.partial` of one, instead of `Attention`. It
      is called with `embed`, `key=` and, if it takes them, `heads=` and `out_scale=`. Excludes the options of
      `Attention`. `Hybrid` takes a pattern of several.
    - `rotary`: RoPE; over all of `head_dim` with base 10,000 by default.
    - `qk_norm`: RMSNorm of queries and keys, per head.
    - `windows`: a pattern of sliding windows that repeats over the layers; None is full attention.
      `(512, 512, None)` has two local layers per global one.
    - `soft_cap`: c tanh(scores / c) before the softmax.
    - `streams`: residual streams. With several, layers read, mix and write them by hyper-connections (mHC,
      arXiv:2512.24880; `zoo.models.hyper_connections`).
    - `order`: numbers of the layers in the order in which they run, if some of them run several times: see `Looped`.
    - `tied`: tie the head to the embedding.
    - `remat`: what the backward pass rematerializes, from least to most: "none", "elementwise" (all but matrix
      products), "dots" (attention's products too), "full".
    - `loop`: over layers. "scan" compiles a pattern of layers once, a number puts that many of its repeats into one
      iteration, "plain" compiles every layer; "auto" is "plain" on a CPU where that is faster.
    - `implementation`: of attention, a name in `zoo.ops.attention.ATTENTION` or a function.

    Initialization: matrices have standard deviation 1 / sqrt(inputs); matrices that write to the residual stream are
    divided by sqrt(2 layers), so that its variance does not grow with depth (GPT-2, section 2.3). A layer counts as
    often as it runs.

    **Raises** `ValueError` for sizes that do not fit together, and for options of `Attention` together with a `mixer`;
    `TypeError` for a `mixer` that cannot be called so.
    """
    if layers < 1:
        raise ValueError(f"a Transformer has at least 1 layer, not {layers}")
    norm = partial(RMSNorm, embed)
    wiring = {}
    if streams != 1:
        # build_decoder splits the key in three, which are fold_in(key, 0) to fold_in(key, 2)
        wiring = make_hyper_connections(embed, streams, norm, key=jax.random.fold_in(wrap_key(key), 3))
    order = check_order(order, layers)
    out_scale = (2 * len(order)) ** -0.5
    mixers = make_mixer_pattern(
        mixer,
        embed,
        heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rotary=rotary,
        qk_norm=qk_norm,
        windows=windows,
        soft_cap=soft_cap,
        implementation=implementation,
        out_scale=out_scale,
    )
    ffn = partial(GatedMLP, embed, mlp, out_scale=out_scale)
    return build_decoder(
        vocab=vocab,
        embed=embed,
        layers=[(mixers[i % len(mixers)], ffn) for i in range(layers)],
        norm=norm,
        order=order,
        tied=tied,
        dropout=dropout,
        remat=remat,
        loop=loop,
        **wiring,
        key=key,
    )
