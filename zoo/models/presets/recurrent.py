"""Models of recurrent mixers and SwiGLUs, initialized from scratch, each named as in its paper.

All take `vocab`, `embed`, `layers`, `mlp`, `key` and the other options of `Hybrid` except `pattern`; further options go
to their mixer. Residual stream, norms and initialization are as in `Hybrid`, so two of these models differ only in
their mixers.
"""

import inspect
from functools import partial
from typing import Any

from zoo import layers as mixers
from zoo.ops.rotary import Rotary

from ..build import MixerFactory
from ..decoder import Decoder
from .hybrid import Hybrid

_HYBRID_OPTIONS = frozenset(inspect.signature(Hybrid).parameters) - {"pattern"}


def _build_uniform_hybrid(mixer: MixerFactory, heads: int, options: dict[str, Any]) -> Decoder:
    """Build a `Hybrid` of one mixer."""
    hybrid_options, mixer_options = _split_options(options)
    return Hybrid(**hybrid_options, pattern=[partial(mixer, heads=heads, **mixer_options)])


def _split_options(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split options into options of `Hybrid` and options of the mixer."""
    hybrid_options = {name: value for name, value in options.items() if name in _HYBRID_OPTIONS}
    return hybrid_options, {name: value for name, value in options.items() if name not in _HYBRID_OPTIONS}


def LinearTransformer(*, heads: int, **options: Any) -> Decoder:
    """Linear attention (Katharopoulos et al., arXiv:2006.16236): see `zoo.layers.LinearAttention`."""
    return _build_uniform_hybrid(mixers.LinearAttention, heads, options)


def RetNet(*, heads: int, **options: Any) -> Decoder:
    """Retention (Sun et al., arXiv:2307.08621): see `zoo.layers.Retention`."""
    return _build_uniform_hybrid(mixers.Retention, heads, options)


def LightningTransformer(*, heads: int, **options: Any) -> Decoder:
    """Lightning attention (Qin et al., arXiv:2307.14995): see `zoo.layers.Lightning`. Decays depend on the layer, so
    that every layer is compiled by itself."""
    hybrid_options, mixer_options = _split_options(options)
    layers = options.get("layers", 0)
    depths = [i / max(layers - 1, 1) for i in range(layers)]
    pattern = [partial(mixers.Lightning, heads=heads, depth=depth, **mixer_options) for depth in depths]
    return Hybrid(**hybrid_options, pattern=pattern)


def GLA(*, heads: int, **options: Any) -> Decoder:
    """Gated linear attention (Yang et al., arXiv:2312.06635): see `zoo.layers.GatedLinearAttention`."""
    return _build_uniform_hybrid(mixers.GatedLinearAttention, heads, options)


def HGRN2(*, heads: int, **options: Any) -> Decoder:
    """HGRN2 (Qin et al., arXiv:2404.07904): see `zoo.layers.HGRN2`."""
    return _build_uniform_hybrid(mixers.HGRN2, heads, options)


def XLSTM(*, heads: int, **options: Any) -> Decoder:
    """xLSTM with mLSTM blocks only, as in xLSTM 7B (Beck et al., arXiv:2503.13427): see `zoo.layers.MLSTM`."""
    return _build_uniform_hybrid(mixers.MLSTM, heads, options)


def Mamba3(*, heads: int | None = None, **options: Any) -> Decoder:
    """Mamba-3 (Lahoti et al., arXiv:2603.15569), `rank=` for several inputs and outputs: see `zoo.layers.Mamba3`."""
    hybrid_options, mixer_options = _split_options(options)
    return Hybrid(**hybrid_options, pattern=[partial(mixers.Mamba3, heads=heads, **mixer_options)])


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
    """Kimi Linear (arXiv:2510.26692): three layers of `zoo.layers.KimiDeltaAttention` per layer of attention without
    positions. Here attention is multi-head, in the paper latent, and feed-forward layers are dense."""
    hybrid_options, mixer_options = _split_options(options)
    recurrent = partial(mixers.KimiDeltaAttention, heads=heads, **mixer_options)
    return Hybrid(**hybrid_options, pattern=[recurrent] * 3 + [partial(mixers.Attention, heads=heads)])


def RWKV6(*, heads: int, **options: Any) -> Decoder:
    """The time mixing of RWKV-6 (Peng et al., arXiv:2404.05892), with SwiGLUs: see `zoo.layers.RWKV6`."""
    return _build_uniform_hybrid(mixers.RWKV6, heads, options)


def RWKV7(*, heads: int, **options: Any) -> Decoder:
    """The time mixing of RWKV-7 (Peng et al., arXiv:2503.14456), with SwiGLUs: see `zoo.layers.RWKV7`."""
    return _build_uniform_hybrid(mixers.RWKV7, heads, options)


def Griffin(*, heads: int, window: int = 1024, **options: Any) -> Decoder:
    """Griffin (De et al., arXiv:2402.19427): two layers of `zoo.layers.RGLRU` per layer of multi-query attention with a
    sliding window."""
    hybrid_options, mixer_options = _split_options(options)
    recurrent = partial(mixers.RGLRU, heads=heads, **mixer_options)
    rotary = Rotary(options.get("embed", 0) // heads)
    local_attention = partial(mixers.Attention, heads=heads, kv_heads=1, window=window, rotary=rotary)
    return Hybrid(**hybrid_options, pattern=[recurrent, recurrent, local_attention])
