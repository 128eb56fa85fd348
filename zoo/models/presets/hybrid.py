"""Models of any mixers in any repeating pattern, from scratch."""

from collections.abc import Callable, Sequence
from functools import partial

from jaxtyping import Array, Key

from zoo.layers import AbstractFeedForward, AbstractMixer, GatedMLP, RMSNorm
from zoo.parallel import Remat

from ..blocks import Block, MixerBlock
from ..build import build_decoder, make_block_factory, share_factories
from ..decoder import Decoder

MixerFactory = Callable[..., AbstractMixer]
_FeedForwardFactory = Callable[..., AbstractFeedForward]


def Hybrid(
    *,
    vocab: int,
    embed: int,
    layers: int,
    pattern: Sequence[MixerFactory],
    mlp: int | None = None,
    ffns: Sequence[_FeedForwardFactory | None] = (None,),
    tied: bool = True,
    dropout: float = 0.0,
    epsilon: float = 1e-6,
    remat: Remat = "none",
    key: Key[Array, ""],
) -> Decoder:
    """A decoder whose layers' mixers follow a pattern, as Jamba's (arXiv:2403.19887), Griffin's (arXiv:2402.19427) and
    Qwen3-Next's do:

        zoo.models.Hybrid(
            vocab=256, embed=64, layers=8, mlp=192, key=key,
            pattern=[partial(GatedDeltaNet, heads=4)] * 3 + [partial(Attention, heads=4, rotary=Rotary(16))],
        )

    - `pattern`: makers of mixers, which repeat over the layers: classes of `zoo.layers`, or `functools.partial` of one,
      called with `embed`, `out_scale=` and `key=`. The same object twice is one kind of layer, compiled once.
    - `mlp`: every layer has a SwiGLU of this width after its mixer. Without it `ffns` says what follows, a pattern of
      its own: makers called with `embed`, `out_scale=` and `key=`, or None where the mixer is the whole layer, as in
      Mamba.
    - `tied`: the head is the embedding's table.
    - `epsilon`: of the RMS norms before each part.
    - `remat`: as in `Transformer`.

    Matrices that write to the residual stream start smaller by the square root of how many there are, as in
    `Transformer`.

    **Raises** `ValueError` for an empty pattern, for no layers, and for `ffns` beside an `mlp`.
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
    writers = layers + sum(ffn is not None for _, ffn in parts)
    norm = partial(RMSNorm, embed, epsilon=epsilon)

    def kind(parts: tuple[MixerFactory, _FeedForwardFactory | None]):
        own, after = parts
        mixer = partial(own, embed, out_scale=writers**-0.5)
        ffn = None if after is None else partial(after, embed, out_scale=writers**-0.5)
        return make_block_factory(
            MixerBlock if ffn is None else Block, norm=norm, mixer=mixer, ffn=ffn, dropout=dropout
        )

    return build_decoder(
        vocab=vocab,
        embed=embed,
        factories=share_factories(parts, kind),
        norm=norm,
        tied=tied,
        dropout=dropout,
        remat=remat,
        key=key,
    )
