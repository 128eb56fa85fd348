"""Models from scratch whose every layer is one recurrent mixer and a SwiGLU, each under the name it has in its paper.

All take what `Hybrid` takes and what their layer takes; the residual stream, norms and how weights start are those of
`Hybrid`, so that two models of these differ in their mixers and in nothing else.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from jaxtyping import Array, Key

from zoo import layers as mixers
from zoo.ops.rotary import Rotary
from zoo.parallel import Remat

from .decoder import Decoder
from .hybrid import Hybrid

Pattern = Callable[..., list[Callable[..., mixers.AbstractMixer]]]


def model_of(name: str, pattern: Pattern, about: str) -> Callable[..., Decoder]:
    """A maker of models whose mixers follow `pattern(heads=, layers=, embed=, **options)`, of this name."""

    def make(
        *,
        vocab: int,
        embed: int,
        layers: int,
        heads: int,
        mlp: int,
        tied: bool = True,
        dropout: float = 0.0,
        remat: Remat = "none",
        key: Key[Array, ""],
        **options: Any,
    ) -> Decoder:
        made = pattern(heads=heads, layers=layers, embed=embed, **options)
        shell = {"tied": tied, "dropout": dropout, "remat": remat}
        return Hybrid(vocab=vocab, embed=embed, layers=layers, pattern=made, mlp=mlp, **shell, key=key)

    make.__name__ = make.__qualname__ = name
    make.__doc__ = inspect.cleandoc(about) + "\n\nThe options are those of the layer; the rest is as in `Hybrid`."
    return make


def every(mixer: type[mixers.AbstractMixer]) -> Pattern:
    """The same mixer in every layer."""

    def pattern(*, heads: int, layers: int, embed: int, **options: Any) -> list[Callable[..., mixers.AbstractMixer]]:
        return [partial(mixer, heads=heads, **options)]

    return pattern


def by_depth(*, heads: int, layers: int, embed: int, **options: Any) -> list[Callable[..., mixers.AbstractMixer]]:
    """Lightning attention whose slopes shrink from the first layer to the last. Every layer is a kind of its own."""
    return [partial(mixers.Lightning, heads=heads, depth=i / max(layers - 1, 1), **options) for i in range(layers)]


def kimi(*, heads: int, layers: int, embed: int, **options: Any) -> list[Callable[..., mixers.AbstractMixer]]:
    """Three layers of KDA to one of attention, which has no positions."""
    recurrent = partial(mixers.KimiDeltaAttention, heads=heads, **options)
    return [recurrent, recurrent, recurrent, partial(mixers.Attention, heads=heads)]


def griffin(
    *, heads: int, layers: int, embed: int, window: int = 1024, **options: Any
) -> list[Callable[..., mixers.AbstractMixer]]:
    """Two recurrent layers to one of local attention with one head of keys."""
    local = partial(mixers.Attention, heads=heads, kv_heads=1, window=window, rotary=Rotary(embed // heads))
    recurrent = partial(mixers.RGLRU, heads=heads, **options)
    return [recurrent, recurrent, local]


LinearTransformer = model_of(
    "LinearTransformer",
    every(mixers.LinearAttention),
    "Linear attention (Katharopoulos et al., arXiv:2006.16236): see `zoo.layers.LinearAttention`.",
)
RetNet = model_of(
    "RetNet", every(mixers.Retention), "Retention (Sun et al., arXiv:2307.08621): see `zoo.layers.Retention`."
)
LightningTransformer = model_of(
    "LightningTransformer",
    by_depth,
    "Lightning attention, whose decays slow down with depth (Qin et al., arXiv:2307.14995): `zoo.layers.Lightning`.",
)
GLA = model_of(
    "GLA",
    every(mixers.GatedLinearAttention),
    "Gated linear attention (Yang et al., arXiv:2312.06635): see `zoo.layers.GatedLinearAttention`.",
)
HGRN2 = model_of("HGRN2", every(mixers.HGRN2), "HGRN2 (Qin et al., arXiv:2404.07904): see `zoo.layers.HGRN2`.")
XLSTM = model_of(
    "XLSTM",
    every(mixers.MLSTM),
    "xLSTM of mLSTM blocks alone, as xLSTM 7B (Beck et al., arXiv:2503.13427): see `zoo.layers.MLSTM`.",
)
DeltaNet = model_of(
    "DeltaNet", every(mixers.DeltaNet), "DeltaNet (Yang et al., arXiv:2406.06484): see `zoo.layers.DeltaNet`."
)
GatedDeltaNet = model_of(
    "GatedDeltaNet",
    every(mixers.GatedDeltaNet),
    "Gated DeltaNet (Yang et al., arXiv:2412.06464): see `zoo.layers.GatedDeltaNet`.",
)
GatedDeltaProduct = model_of(
    "GatedDeltaProduct",
    every(mixers.GatedDeltaProduct),
    "Gated DeltaProduct (Siems et al., arXiv:2502.10297): see `zoo.layers.GatedDeltaProduct`.",
)
KimiLinear = model_of(
    "KimiLinear",
    kimi,
    """Kimi Linear (arXiv:2510.26692): three layers of `zoo.layers.KimiDeltaAttention` to one of attention without
    positions. Its attention is plain here, latent in the paper, and its feed-forward layers are dense.""",
)
RWKV6 = model_of(
    "RWKV6",
    every(mixers.RWKV6),
    "The time mixing of RWKV-6 (Peng et al., arXiv:2404.05892), with SwiGLUs between: see `zoo.layers.RWKV6`.",
)
RWKV7 = model_of(
    "RWKV7",
    every(mixers.RWKV7),
    "The time mixing of RWKV-7 (Peng et al., arXiv:2503.14456), with SwiGLUs between: see `zoo.layers.RWKV7`.",
)
Griffin = model_of(
    "Griffin",
    griffin,
    "Griffin (De et al., arXiv:2402.19427): two layers of `zoo.layers.RGLRU` to one of attention in a `window`.",
)

MODELS = {
    make.__name__: make
    for make in (
        *(LinearTransformer, RetNet, LightningTransformer, GLA, HGRN2, XLSTM, DeltaNet, GatedDeltaNet),
        *(GatedDeltaProduct, KimiLinear, RWKV6, RWKV7, Griffin),
    )
}
