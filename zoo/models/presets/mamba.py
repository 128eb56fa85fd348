"""Mamba and Mamba-2 from scratch."""

from collections.abc import Callable
from functools import partial

from jaxtyping import Array, Key

from zoo.layers import AbstractMixer, RMSNorm
from zoo.layers import Mamba as MambaLayer
from zoo.layers import Mamba2 as Mamba2Layer
from zoo.ops.recurrence.chunks import RecurrenceMode
from zoo.parallel import Remat

from ..blocks import MixerBlock
from ..build import build_decoder, make_block_factory
from ..decoder import Decoder


def Mamba(
    *,
    vocab: int,
    embed: int,
    layers: int,
    state_dim: int = 16,
    expand: int = 2,
    conv_width: int = 4,
    rank: int | None = None,
    tied: bool = True,
    dropout: float = 0.0,
    epsilon: float = 1e-5,
    remat: Remat = "none",
    mode: RecurrenceMode = "chunked",
    key: Key[Array, ""],
) -> Decoder:
    """A decoder of Mamba blocks and nothing else (Gu & Dao, arXiv:2312.00752): what it remembers of a text is as large
    after a million tokens as after one.

    - `vocab`, `embed`, `layers`: sizes; a layer has `expand * embed` channels, each of which remembers `state` numbers.
    - `width`: of the convolutions. `rank`: of the matrix that makes steps, `embed / 16` rounded up unless given.
    - `tied`: the head is the embedding's table.
    - `epsilon`: of the RMS norms.
    - `remat`: as in `Transformer`.
    - `form`: how the recurrence is computed, "chunked" or "recurrent".

    Matrices start with a standard deviation of 1 / sqrt(inputs); those that write to the residual stream, one a layer,
    are divided by sqrt(layers) more (the paper's code, after GPT-2, section 2.3). The rest is `zoo.layers.Mamba`'s.

    **Raises** `ValueError` for sizes below 1.
    """
    mixer = partial(
        MambaLayer, embed, inner=expand * embed, state_dim=state_dim, rank=rank, conv_width=conv_width, mode=mode
    )
    parts = {"tied": tied, "dropout": dropout, "epsilon": epsilon, "remat": remat}
    return _build_mixer_only_decoder(mixer, vocab=vocab, embed=embed, layers=layers, **parts, key=key)


def Mamba2(
    *,
    vocab: int,
    embed: int,
    layers: int,
    head_dim: int = 64,
    groups: int = 1,
    state_dim: int = 128,
    expand: int = 2,
    conv_width: int = 4,
    tied: bool = True,
    dropout: float = 0.0,
    epsilon: float = 1e-5,
    remat: Remat = "none",
    mode: RecurrenceMode = "chunked",
    key: Key[Array, ""],
) -> Decoder:
    """The same of Mamba-2 blocks (Dao & Gu, arXiv:2405.21060).

    - `head_dim`: how wide heads are, of which a layer has `expand * embed / head_dim`; they share B and C in `groups`.
    - `state`: how many numbers each channel remembers.

    The other options, and how weights start, are those of `Mamba`.

    **Raises** `ValueError` for sizes below 1, and where heads do not share out.
    """
    sizes = {"head_dim": head_dim, "groups": groups, "state_dim": state_dim, "expand": expand, "conv_width": conv_width}
    mixer = partial(Mamba2Layer, embed, **sizes, epsilon=epsilon, mode=mode)
    parts = {"tied": tied, "dropout": dropout, "epsilon": epsilon, "remat": remat}
    return _build_mixer_only_decoder(mixer, vocab=vocab, embed=embed, layers=layers, **parts, key=key)


def _build_mixer_only_decoder(
    mixer: Callable[..., AbstractMixer],
    *,
    vocab: int,
    embed: int,
    layers: int,
    tied: bool,
    dropout: float,
    epsilon: float,
    remat: Remat,
    key: Key[Array, ""],
) -> Decoder:
    """A decoder whose layers are this mixer alone. **Raises** `ValueError` for no layers."""
    if layers < 1:
        raise ValueError(f"a model has at least 1 layer, not {layers}")
    norm = partial(RMSNorm, embed, epsilon=epsilon)
    made = partial(mixer, out_scale=layers**-0.5)
    return build_decoder(
        vocab=vocab,
        embed=embed,
        factories=[make_block_factory(MixerBlock, norm=norm, mixer=made, ffn=None, dropout=dropout)] * layers,
        norm=norm,
        tied=tied,
        dropout=dropout,
        remat=remat,
        hidden_states_skip_embedding=True,
        key=key,
    )
