"""Mamba and Mamba-2, initialized from scratch."""

from functools import partial

from jaxtyping import Array, Key

from zoo._keywords import check_keywords
from zoo.layers import Mamba as MambaLayer
from zoo.layers import Mamba2 as Mamba2Layer
from zoo.layers import RMSNorm
from zoo.parallel.remat import Remat

from ..build import build_decoder
from ..decoder import Decoder
from ..loop import Loop


@check_keywords
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
    loop: Loop = "auto",
    implementation: str = "auto",
    key: Key[Array, ""],
) -> Decoder:
    """Build a decoder of Mamba blocks only (Gu & Dao, arXiv:2312.00752). Its recurrent state does not grow with the
    sequence.

    - `vocab`, `embed`, `layers`: sizes. A layer has `expand * embed` channels with `state_dim` states each.
    - `conv_width`: of the short convolutions. `rank`: of the projection to dt, `embed / 16` rounded up by default.
    - `tied`: tie the head to the embedding.
    - `epsilon`: of the RMSNorms.
    - `remat`, `loop`: as in `Transformer`.
    - `implementation`: a name in `zoo.ops.recurrence.mamba.SELECTIVE_SCAN`.

    Initialization: matrices have standard deviation 1 / sqrt(inputs); matrices that write to the residual stream, one
    per layer, are divided by sqrt(layers) (the paper's code, after GPT-2, section 2.3). The rest is as in
    `zoo.layers.Mamba`.

    **Raises** `ValueError` for sizes below 1.
    """
    if layers < 1:
        raise ValueError(f"a model has at least 1 layer, not {layers}")
    sizes = {"inner": expand * embed, "state_dim": state_dim, "rank": rank, "conv_width": conv_width}
    mixer = partial(MambaLayer, embed, **sizes, implementation=implementation, out_scale=layers**-0.5)
    return build_decoder(
        vocab=vocab,
        embed=embed,
        layers=[(mixer, None)] * layers,
        norm=partial(RMSNorm, embed, epsilon=epsilon),
        tied=tied,
        dropout=dropout,
        remat=remat,
        loop=loop,
        hidden_states_skip_embedding=True,
        key=key,
    )


@check_keywords
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
    loop: Loop = "auto",
    implementation: str = "auto",
    key: Key[Array, ""],
) -> Decoder:
    """Build a decoder of Mamba-2 blocks only (Dao & Gu, arXiv:2405.21060).

    - `head_dim`: width of the `expand * embed / head_dim` heads of a layer, which share B and C in `groups`.
    - `state_dim`: states per channel.

    The other options and the initialization are as in `Mamba`.

    **Raises** `ValueError` for sizes below 1, and if heads do not divide evenly.
    """
    if layers < 1:
        raise ValueError(f"a model has at least 1 layer, not {layers}")
    sizes = {"head_dim": head_dim, "groups": groups, "state_dim": state_dim, "expand": expand, "conv_width": conv_width}
    mixer = partial(Mamba2Layer, embed, **sizes, epsilon=epsilon, implementation=implementation, out_scale=layers**-0.5)
    return build_decoder(
        vocab=vocab,
        embed=embed,
        layers=[(mixer, None)] * layers,
        norm=partial(RMSNorm, embed, epsilon=epsilon),
        tied=tied,
        dropout=dropout,
        remat=remat,
        loop=loop,
        hidden_states_skip_embedding=True,
        key=key,
    )
