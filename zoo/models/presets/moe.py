"""Mixture-of-experts Transformer, initialized from scratch."""

from collections.abc import Callable, Sequence
from functools import partial

from jaxtyping import Array, Key

from zoo._keywords import check_keywords
from zoo.layers import AbstractMixer, GatedMLP, RMSNorm, SoftmaxRouter
from zoo.layers import MixtureOfExperts as Mixture
from zoo.layers.moe.router import AbstractRouter
from zoo.ops.rotary import Rotary
from zoo.parallel.remat import Remat

from ..build import build_decoder
from ..decoder import Decoder
from ..loop import Loop
from .mixers import make_mixer_pattern


@check_keywords
def MixtureOfExperts(
    *,
    vocab: int,
    embed: int,
    layers: int,
    heads: int,
    mlp: int,
    experts: int,
    top: int,
    router: Callable[..., AbstractRouter] = SoftmaxRouter,
    shared: int | None = None,
    dense_layers: int = 0,
    dense_mlp: int | None = None,
    capacity_factor: float | None = None,
    mixer: Callable[..., AbstractMixer] | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    rotary: Rotary | None = None,
    qk_norm: bool = False,
    windows: Sequence[int | None] = (None,),
    soft_cap: float | None = None,
    tied: bool = True,
    dropout: float = 0.0,
    remat: Remat = "none",
    loop: Loop = "auto",
    implementation: str | Callable = "auto",
    key: Key[Array, ""],
) -> Decoder:
    """Build a `Transformer` whose feed-forward layers are mixtures of experts, as in Mixtral (arXiv:2401.04088) and
    DeepSeekMoE (arXiv:2401.06066).

    - `experts`: SwiGLUs of width `mlp` per layer, with top-k routing of each token to `top` of them.
    - `router`: a class of `zoo.layers`, or `functools.partial` of one with further options:
      `partial(BiasedRouter, groups=4, kept_groups=2)`. Softmax with renormalized weights by default.
    - `shared`: width of a shared expert, which every token uses.
    - `dense_layers`: the first layers have one SwiGLU of width `dense_mlp` instead, by default the width that is active
      per token in the others: `top * mlp + shared`.
    - `capacity_factor`: capacity of an expert per row, as a multiple of an even load; further tokens are dropped.
      Dropless by default: see `zoo.layers.MixtureOfExperts`.
    - `mixer`: instead of `Attention`, as in `Transformer`:
      `partial(LatentAttention, latent=64, head_dim=32, rotary=Rotary(16))`.

    The other options and the initialization are as in `Transformer`. To balance the load, train with
    `zoo.cross_entropy(..., balance=0.01)`, or with a `BiasedRouter` and `zoo.models.update_expert_bias`.

    **Raises** `ValueError` for sizes that do not fit together, and for options of `Attention` together with a `mixer`;
    `TypeError` for a `mixer` that cannot be called so.
    """
    if not 0 <= dense_layers <= layers:
        raise ValueError(f"of {layers} layers at least 0 and at most all are dense, not {dense_layers}")
    if experts < 1:
        raise ValueError(f"a mixture has at least 1 expert, not {experts}")
    out_scale = (2 * layers) ** -0.5
    gated = partial(GatedMLP, embed, out_scale=out_scale)
    shared_expert = None if shared is None else partial(gated, shared)
    sparse = partial(
        Mixture,
        partial(router, embed, experts, top),
        partial(gated, mlp),
        experts,
        shared=shared_expert,
        capacity_factor=capacity_factor,
    )
    if dense_mlp is None:
        dense_mlp = top * mlp + (shared or 0)
    dense = partial(gated, dense_mlp)
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
    return build_decoder(
        vocab=vocab,
        embed=embed,
        layers=[(mixers[i % len(mixers)], dense if i < dense_layers else sparse) for i in range(layers)],
        norm=partial(RMSNorm, embed),
        tied=tied,
        dropout=dropout,
        remat=remat,
        loop=loop,
        key=key,
    )
