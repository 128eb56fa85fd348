"""Mixtures of experts from scratch."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial

from jaxtyping import Array, Key

from zoo.layers import AbstractMixer, AbstractRouter, GatedMLP, SoftmaxRouter
from zoo.layers import MixtureOfExperts as Mixture
from zoo.ops.attention import grouped_query_attention
from zoo.ops.rotary import Rotary
from zoo.parallel import Remat

from ..decoder import Decoder
from .transformer import Transformer, build_transformer, make_attention_factories


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
    implementation: Callable = grouped_query_attention,
    key: Key[Array, ""],
) -> Decoder:
    """A `Transformer` whose feed-forward layers are mixtures of experts, as Mixtral's (arXiv:2401.04088) and
    DeepSeekMoE's (arXiv:2401.06066).

    - `experts` SwiGLUs of width `mlp` a layer, of which a token uses `top`.
    - `router`: a class of `zoo.layers`, or `functools.partial` of one with options of its own:
      `partial(BiasedRouter, groups=4, kept_groups=2)`. Softmax and renormalized weights unless given.
    - `shared`: the width of an expert that every token uses.
    - `dense_layers`: so many first layers have one SwiGLU of width `dense_mlp` instead, which is what a token meets in
      the others unless given: `top * mlp + shared`.
    - `capacity_factor`: how many visits an expert takes of each row, as a multiple of an even share; the rest are
      dropped. Unless given nothing is: see `zoo.layers.MixtureOfExperts`.
    - `mixer`: `functools.partial` of a class of `zoo.layers`, called with `embed` and `heads`, in place of `Attention`:
      `partial(LatentAttention, latent=64, head_dim=32, rotary=Rotary(16))`. `Attention`'s options are then not taken.

    The other options, and how weights start, are those of `Transformer`. For a balance of experts train with
    `zoo.cross_entropy(..., balance=0.01)`, or with a `BiasedRouter` and `zoo.models.rebalance`.

    **Raises** `ValueError` for sizes that do not go together, and for options of `Attention` beside a `mixer`.
    """
    if not 0 <= dense_layers <= layers:
        raise ValueError(f"of {layers} layers at least 0 and at most all are dense, not {dense_layers}")
    if experts < 1:
        raise ValueError(f"a mixture has at least 1 expert, not {experts}")
    gated = partial(GatedMLP, embed, out_scale=(2 * layers) ** -0.5)
    sparse = partial(
        Mixture,
        partial(router, embed, experts, top),
        partial(gated, mlp),
        experts,
        shared=None if shared is None else partial(gated, shared),
        capacity_factor=capacity_factor,
    )
    dense = partial(gated, top * mlp + (shared or 0) if dense_mlp is None else dense_mlp)
    options = {"kv_heads": kv_heads, "head_dim": head_dim, "rotary": rotary, "qk_norm": qk_norm}
    options |= {"windows": windows, "soft_cap": soft_cap, "implementation": implementation}
    if mixer is None:
        mixers = make_attention_factories(embed, heads, layers, **options)
    else:
        usual = inspect.signature(Transformer).parameters
        if given := [name for name, value in options.items() if value != usual[name].default]:
            raise ValueError(f"{given[0]} is an option of Attention, and a mixer was given: say it to the mixer")
        mixers = [partial(mixer, embed, heads, out_scale=(2 * layers) ** -0.5)] * layers
    return build_transformer(
        vocab=vocab,
        embed=embed,
        mixers=mixers,
        ffns=[dense] * dense_layers + [sparse] * (layers - dense_layers),
        tied=tied,
        dropout=dropout,
        remat=remat,
        key=key,
    )
