"""Build a decoder from factories of its parts: used by presets and by checkpoint families alike."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
from jaxtyping import Array, Key

from zoo._checks import wrap_key
from zoo.layers import (
    AbstractFeedForward,
    AbstractMixer,
    AbstractNorm,
    Dropout,
    Embedding,
    Linear,
    PositionEmbedding,
)
from zoo.layers.embedding import AbstractPositionEmbedding
from zoo.parallel import Dim
from zoo.parallel.remat import Remat

from .blocks import FeedForwardBlock, MixerBlock
from .decoder import AbstractBlock, AbstractLayerInputs, Block, Decoder
from .factories import check_factory
from .loop import Loop
from .stack import BlockFactory, SharedFactory, Stack

MixerFactory = Callable[..., AbstractMixer]
"""A function `key= -> mixer`."""
FeedForwardFactory = Callable[..., AbstractFeedForward | AbstractMixer]
"""A function `key= -> feed-forward layer`. RWKV's is a mixer."""
LayerFactories = tuple[MixerFactory | None, FeedForwardFactory | None]
"""The parts of one layer: a mixer and a feed-forward layer, or one of the two and None. Equal pairs make layers of
equal structure."""


def build_decoder(
    *,
    vocab: int,
    embed: int,
    layers: Sequence[LayerFactories | BlockFactory],
    norm: Callable[[], AbstractNorm],
    tied: bool,
    block: Callable[..., AbstractBlock] | Sequence[Callable[..., AbstractBlock]] = Block,
    embedding_size: int | None = None,
    positions: int | AbstractPositionEmbedding | None = None,
    position_offset: int = 0,
    multiplier: float | int = 1.0,
    logits_multiplier: float | int = 1.0,
    soft_cap: float | int | None = None,
    head_bias: bool = False,
    dropout: float = 0.0,
    remat: Remat = "none",
    loop: Loop = "auto",
    embedding_norm: Callable[[], AbstractNorm] | None = None,
    final_norm: Callable[[], AbstractNorm] | None = None,
    hidden_states_skip_embedding: bool = False,
    parts: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
    layer_inputs: Callable[..., AbstractLayerInputs] | None = None,
    shared: Sequence[SharedFactory] = (),
    order: Sequence[int] | None = None,
    key: Key[Array, ""],
) -> Decoder:
    """Build a decoder.

    - `layers`: a mixer factory and a feed-forward factory per layer; `MixerBlock` is used if the second is None, and
      `FeedForwardBlock` if the first is. Layers with the same two factory objects share a compiled block: repeat the
      objects, not equal copies. A layer that is neither has a factory of its block, called with a PRNG key.
    - `norm`: factory of the norms before each sublayer, and of the final norm unless `final_norm` is given.
    - `tied`: tie the head to the embedding.
    - `block`: residual wiring of a mixer and a feed-forward layer, of all layers or of each.
    - `embedding_size`: features of the embedding and of the head. If they are not `embed`, a linear layer without a
      bias projects embeddings to the residual stream, and the `final_norm` is to project it back.
    - `positions`: number of learned position embeddings, None without. Their table has `position_offset` unused rows
      before them. Or a position embedding that is not learned.
    - `multiplier`: of embeddings; `logits_multiplier`: of logits.
    - `soft_cap`: of logits, see `Decoder`. `head_bias`: add a bias to an untied head.
    - `remat`, `loop`: see `zoo.models.Transformer`.
    - `embedding_norm`: factory of a norm after the embedding.
    - `hidden_states_skip_embedding`: see `Decoder`.
    - `parts`: factories of further parts of a `block`, called with `key=`, by their names.
    - `layer_inputs`: factory of what layers read besides the embedding, called with `key=`.
    - `shared`: factories of modules that several layers call, and `order`: numbers of the layers in the order in which
      they run, for layers that run several times; see `Stack`.
    """

    embedding_key, stack_key, head_key = jax.random.split(wrap_key(key), 3)
    position_key = jax.random.fold_in(embedding_key, 1)
    deviation = embed**-0.5
    head = None
    projection = None
    if embedding_size is None:
        embedding_size = embed
    if embedding_size != embed:
        projection = make_embedding_projection(embedding_size, embed, key=jax.random.fold_in(embedding_key, 3))
    if isinstance(positions, int):
        options = {"offset": position_offset, "scale": deviation, "key": position_key}
        positions = PositionEmbedding(positions, embed, **options)
    made_inputs = None
    if layer_inputs is not None:
        made_inputs = layer_inputs(key=jax.random.fold_in(embedding_key, 2))
    if final_norm is None:
        final_norm = norm
    if soft_cap is not None:
        soft_cap = float(soft_cap)
    if not tied:
        head = Linear(embedding_size, vocab, in_=Dim("embed"), out=Dim("vocab"), bias=head_bias, key=head_key)
    return Decoder(
        embedding=Embedding(vocab, embedding_size, scale=deviation, multiplier=multiplier, key=embedding_key),
        embedding_projection=projection,
        position_embedding=positions,
        stack=build_stack(
            layers,
            norm,
            block=block,
            parts=parts,
            dropout=dropout,
            remat=remat,
            loop=loop,
            shared=shared,
            order=order,
            key=stack_key,
        ),
        embedding_norm=None if embedding_norm is None else embedding_norm(),
        layer_inputs=made_inputs,
        norm=final_norm(),
        head=head,
        dropout=Dropout(dropout),
        logits_multiplier=float(logits_multiplier),
        soft_cap=soft_cap,
        hidden_states_skip_embedding=hidden_states_skip_embedding,
    )


def make_embedding_projection(size: int, embed: int, *, bias: bool = False, key: Key[Array, ""]) -> Linear:
    """Make the linear layer from embeddings of `size` features to the residual stream."""
    return Linear(size, embed, in_=Dim("latent"), out=Dim("embed"), bias=bias, key=key)


def build_stack(
    layers: Sequence[LayerFactories | BlockFactory],
    norm: Callable[[], AbstractNorm],
    *,
    block: Callable[..., AbstractBlock] | Sequence[Callable[..., AbstractBlock]],
    dropout: float,
    remat: Remat,
    loop: Loop,
    parts: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
    shared: Sequence[SharedFactory] = (),
    order: Sequence[int] | None = None,
    key: Key[Array, ""],
) -> Stack:
    """Build the layers of a model. Arguments are as in `build_decoder`; layers may differ in their `block`, too."""
    blocks = [block] * len(layers) if callable(block) else block

    def make_block(
        mixer: MixerFactory | None,
        ffn: FeedForwardFactory | None,
        block: Callable[..., AbstractBlock],
        key: Key[Array, ""],
    ) -> AbstractBlock:
        mixer_key, ffn_key = jax.random.split(key)
        if mixer is None:
            assert ffn is not None
            made_ffn: Any = ffn(key=ffn_key)
            return FeedForwardBlock(ffn=made_ffn, mixer_norm=norm(), dropout=Dropout(dropout))
        made = {"mixer": mixer(key=mixer_key), "mixer_norm": norm(), "dropout": Dropout(dropout)}
        if ffn is None:
            return MixerBlock(**made)
        for i, (name, make) in enumerate(parts.items()):
            made[name] = make(key=jax.random.fold_in(ffn_key, i))
        return block(ffn=ffn(key=ffn_key), ffn_norm=norm(), **made)

    for layer in layers:
        if callable(layer):
            continue
        mixer, ffn = layer
        if mixer is None and ffn is None:
            raise ValueError("a layer has a mixer, a feed-forward layer or both, and one was given neither")
        if mixer is not None:
            check_factory("mixer", mixer)
        if ffn is not None:
            check_factory("feed-forward layer", ffn)
    makers = [layer if callable(layer) else (*layer, block) for layer, block in zip(layers, blocks, strict=True)]
    factories = {  # equal layers share one object
        maker: maker if callable(maker) else partial(make_block, *maker) for maker in dict.fromkeys(makers)
    }
    options = {"order": order, "shared": shared, "remat": remat, "loop": loop}
    return Stack([factories[maker] for maker in makers], **options, key=key)
