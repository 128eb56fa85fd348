"""Decoders put together from makers of their parts. Presets from scratch and families of checkpoints both end here."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
from jaxtyping import Array, Key

from zoo.layers import AbstractNorm, Dropout, Embedding, Linear, PositionEmbedding
from zoo.parallel import Dim, Remat

from .blocks import AbstractBlock
from .decoder import Decoder
from .stack import BlockFactory, Stack


def make_block_factory(
    block: Callable[..., AbstractBlock],
    *,
    norm: Callable[[], AbstractNorm],
    mixer: Callable[..., Any],
    ffn: Callable[..., Any] | None,
    dropout: float = 0.0,
) -> BlockFactory:
    """A maker of blocks with a mixer and a feed-forward part, each with a norm of its own; or with a mixer alone.

    `mixer` and `ffn` are called with `key=`; `norm()` is called once for each norm.
    """

    def make(key: Key[Array, ""]) -> AbstractBlock:
        mixer_key, ffn_key = jax.random.split(key)
        parts = {"mixer": mixer(key=mixer_key), "mixer_norm": norm(), "dropout": Dropout(dropout)}
        return block(**parts) if ffn is None else block(ffn=ffn(key=ffn_key), ffn_norm=norm(), **parts)

    return make


def share_factories(values: Iterable[Hashable], make: Callable[[Any], BlockFactory]) -> list[BlockFactory]:
    """`make(value)` for each layer's value, where equal values share one maker: they are layers of one kind."""
    values = list(values)
    made = {value: make(value) for value in dict.fromkeys(values)}
    return [made[value] for value in values]


def build_decoder(
    *,
    vocab: int,
    embed: int,
    factories: Sequence[BlockFactory],
    norm: Callable[[], AbstractNorm],
    tied: bool,
    positions: int | None = None,
    multiplier: float | int = 1.0,
    logits_multiplier: float | int = 1.0,
    dropout: float = 0.0,
    remat: Remat = "none",
    embedding_norm: Callable[[], AbstractNorm] | None = None,
    hidden_states_skip_embedding: bool = False,
    key: Key[Array, ""],
) -> Decoder:
    """A decoder of these layers.

    - `tied`: the head is the embedding's table; otherwise a matrix of its own.
    - `positions`: how many learned position vectors there are, if any.
    - `multiplier`: of what the embedding gives; `logits_multiplier`: of what the head gives.
    - `embedding_norm`: makes a norm of what the embedding gives.
    - `lists_outputs`: how hidden states are counted. See `Decoder`.
    """
    embedding_key, stack_key, head_key = jax.random.split(key, 3)
    deviation = embed**-0.5
    head = partial(Linear, embed, vocab, in_=Dim("embed"), out=Dim("vocab"))
    position_key = jax.random.fold_in(embedding_key, 1)
    return Decoder(
        embedding=Embedding(vocab, embed, scale=deviation, multiplier=multiplier, key=embedding_key),
        position_embedding=PositionEmbedding(positions, embed, scale=deviation, key=position_key)
        if positions
        else None,
        stack=Stack(factories, remat=remat, key=stack_key),
        embedding_norm=None if embedding_norm is None else embedding_norm(),
        norm=norm(),
        head=None if tied else head(key=head_key),
        dropout=Dropout(dropout),
        logits_multiplier=float(logits_multiplier),
        hidden_states_skip_embedding=hidden_states_skip_embedding,
    )
