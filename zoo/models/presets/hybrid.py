"""Hybrid models: any mixers in a repeating pattern, initialized from scratch."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from jaxtyping import Array, Key

from zoo._keywords import check_keywords
from zoo.layers import GatedMLP, RMSNorm
from zoo.parallel.remat import Remat

from ..build import FeedForwardFactory, MixerFactory, build_decoder
from ..decoder import Decoder
from ..factories import bind_factory
from ..loop import Loop


@check_keywords
def Hybrid(
    *,
    vocab: int,
    embed: int,
    layers: int,
    pattern: Sequence[MixerFactory],
    mlp: int | None = None,
    ffns: Sequence[FeedForwardFactory | None] = (None,),
    tied: bool = True,
    dropout: float = 0.0,
    epsilon: float = 1e-6,
    remat: Remat = "none",
    loop: Loop = "auto",
    key: Key[Array, ""],
) -> Decoder:
    """Build a decoder whose mixers follow a repeating pattern, as in Jamba (arXiv:2403.19887), Griffin
    (arXiv:2402.19427) and Qwen3-Next:

        zoo.models.Hybrid(
            vocab=256, embed=64, layers=8, mlp=192, key=key,
            pattern=[partial(GatedDeltaNet, heads=4)] * 3 + [partial(Attention, heads=4, rotary=Rotary(16))],
        )

    - `pattern`: mixer factories, repeated over the layers: classes of `zoo.layers`, classes of your own, or
      `functools.partial` of one, called with `embed`, `key=` and, if they take it, `out_scale=`. Layers with the same
      factory object are compiled once.
    - `mlp`: width of a SwiGLU after every mixer. Without it, `ffns` is a pattern of feed-forward factories, called in
      the same way; None for a layer that is only a mixer, as in Mamba.
    - `tied`: tie the head to the embedding.
    - `epsilon`: of the RMSNorm before each sublayer.
    - `remat`, `loop`: as in `Transformer`.

    Initialization: matrices that write to the residual stream are divided by the square root of how many they are, as
    in `Transformer`. A factory takes that factor as `out_scale`; one that does not is left as it is.

    **Raises** `ValueError` for an empty pattern, for no layers, and for `ffns` together with `mlp`; `TypeError` for a
    factory that cannot be called so.
    """
    if layers < 1 or not pattern or not ffns:
        raise ValueError(
            f"a Hybrid has at least 1 layer and patterns of at least 1 part: {layers=}, {pattern=}, {ffns=}"
        )
    if mlp is not None:
        if list(ffns) != [None]:
            raise ValueError("mlp says that every layer has a SwiGLU, and ffns were given: say one of the two")
        ffns = (partial(GatedMLP, mlp=mlp),)
    parts = [(pattern[i % len(pattern)], ffns[i % len(ffns)]) for i in range(layers)]
    out_scale = (layers + sum(ffn is not None for _, ffn in parts)) ** -0.5
    sized_mixers = {mixer: bind_factory("pattern", mixer, embed, out_scale=out_scale) for mixer in pattern}
    sized_ffns: dict[Any, Any] = {None: None}
    for ffn in ffns:
        if ffn is not None:
            sized_ffns[ffn] = bind_factory("ffns", ffn, embed, out_scale=out_scale)
    return build_decoder(
        vocab=vocab,
        embed=embed,
        layers=[(sized_mixers[mixer], sized_ffns[ffn]) for mixer, ffn in parts],
        norm=partial(RMSNorm, embed, epsilon=epsilon),
        tied=tied,
        dropout=dropout,
        remat=remat,
        loop=loop,
        key=key,
    )
