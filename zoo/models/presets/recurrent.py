"""Models from scratch whose layers are recurrent mixers and SwiGLUs, each under the name it has in its paper.

All take `vocab`, `embed`, `layers`, `mlp`, `key` and the other options of `Hybrid` but its pattern; further options are
those of their layer. The residual stream, the norms and how weights start are `Hybrid`'s, so that two models of these
differ in their mixers and in nothing else.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from zoo import layers as mixers
from zoo.ops.rotary import Rotary

from ..decoder import Decoder
from .hybrid import Hybrid, MixerFactory

_HYBRID_OPTIONS = frozenset(inspect.signature(Hybrid).parameters) - {"pattern"}


def _build_hybrid(pattern: Callable[..., list[MixerFactory]], options: dict[str, Any]) -> Decoder:
    """A `Hybrid` of the mixers that `pattern` makes of those of the options that are not `Hybrid`'s own."""
    shell = {name: value for name, value in options.items() if name in _HYBRID_OPTIONS}
    own = {name: value for name, value in options.items() if name not in _HYBRID_OPTIONS}
    return Hybrid(**shell, pattern=pattern(**own))


def _build_uniform_hybrid(mixer: MixerFactory, heads: int, options: dict[str, Any]) -> Decoder:
    """A `Hybrid` of one mixer."""
    return _build_hybrid(lambda **own: [partial(mixer, heads=heads, **own)], options)


def LinearTransformer(*, heads: int, **options: Any) -> Decoder:
    """Linear attention (Katharopoulos et al., arXiv:2006.16236): see `zoo.layers.LinearAttention`."""
    return _build_uniform_hybrid(mixers.LinearAttention, heads, options)


def RetNet(*, heads: int, **options: Any) -> Decoder:
    """Retention (Sun et al., arXiv:2307.08621): see `zoo.layers.Retention`."""
    return _build_uniform_hybrid(mixers.Retention, heads, options)


def LightningTransformer(*, heads: int, **options: Any) -> Decoder:
    """Lightning attention (Qin et al., arXiv:2307.14995): see `zoo.layers.Lightning`. Decays slow down with depth, so
    that every layer is a kind of its own."""
    depth = options.get("layers", 0)

    def pattern(**own: Any) -> list[MixerFactory]:
        return [partial(mixers.Lightning, heads=heads, depth=i / max(depth - 1, 1), **own) for i in range(depth)]

    return _build_hybrid(pattern, options)


def GLA(*, heads: int, **options: Any) -> Decoder:
    """Gated linear attention (Yang et al., arXiv:2312.06635): see `zoo.layers.GatedLinearAttention`."""
    return _build_uniform_hybrid(mixers.GatedLinearAttention, heads, options)


def HGRN2(*, heads: int, **options: Any) -> Decoder:
    """HGRN2 (Qin et al., arXiv:2404.07904): see `zoo.layers.HGRN2`."""
    return _build_uniform_hybrid(mixers.HGRN2, heads, options)


def XLSTM(*, heads: int, **options: Any) -> Decoder:
    """xLSTM of mLSTM blocks alone, as xLSTM 7B (Beck et al., arXiv:2503.13427): see `zoo.layers.MLSTM`."""
    return _build_uniform_hybrid(mixers.MLSTM, heads, options)


def DeltaNet(*, heads: int, **options: Any) -> Decoder:
    """DeltaNet (Yang et al., arXiv:2406.06484): see `zoo.layers.DeltaNet`."""
    return _build_uniform_hybrid(mixers.DeltaNet, heads, options)


def GatedDeltaNet(*, heads: int, **options: Any) -> Decoder:
    """Gated DeltaNet (Yang et al., arXiv:2412.06464): see `zoo.layers.GatedDeltaNet`."""
    return _build_uniform_hybrid(mixers.GatedDeltaNet, heads, options)


def GatedDeltaProduct(*, heads: int, **options: Any) -> Decoder:
    """Gated DeltaProduct (Siems et al., arXiv:2502.10297): see `zoo.layers.GatedDeltaProduct`."""
    return _build_uniform_hybrid(mixers.GatedDeltaProduct, heads, options)


def KimiLinear(*, heads: int, **options: Any) -> Decoder:
    """Kimi Linear (arXiv:2510.26692): three layers of `zoo.layers.KimiDeltaAttention` to one of attention without
    positions. Its attention is plain here, latent in the paper, and its feed-forward layers are dense."""

    def pattern(**own: Any) -> list[MixerFactory]:
        recurrent = partial(mixers.KimiDeltaAttention, heads=heads, **own)
        return [recurrent, recurrent, recurrent, partial(mixers.Attention, heads=heads)]

    return _build_hybrid(pattern, options)


def RWKV6(*, heads: int, **options: Any) -> Decoder:
    """The time mixing of RWKV-6 (Peng et al., arXiv:2404.05892), with SwiGLUs between: see `zoo.layers.RWKV6`."""
    return _build_uniform_hybrid(mixers.RWKV6, heads, options)


def RWKV7(*, heads: int, **options: Any) -> Decoder:
    """The time mixing of RWKV-7 (Peng et al., arXiv:2503.14456), with SwiGLUs between: see `zoo.layers.RWKV7`."""
    return _build_uniform_hybrid(mixers.RWKV7, heads, options)


def Griffin(*, heads: int, window: int = 1024, **options: Any) -> Decoder:
    """Griffin (De et al., arXiv:2402.19427): two layers of `zoo.layers.RGLRU` to one of attention that sees `window`
    tokens and has one head of keys."""

    def pattern(**own: Any) -> list[MixerFactory]:
        recurrent = partial(mixers.RGLRU, heads=heads, **own)
        rotary = Rotary(options.get("embed", 0) // heads)
        return [recurrent, recurrent, partial(mixers.Attention, heads=heads, kv_heads=1, window=window, rotary=rotary)]

    return _build_hybrid(pattern, options)
