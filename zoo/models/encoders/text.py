"""From tokens to logits or features in both directions: BERT and its kin, on the blocks and the stack of decoders."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from zoo._checks import check_token_arrays, check_tokens, wrap_key
from zoo.layers import AbstractLinear, AbstractNorm, Dropout, Embedding, PositionEmbedding, TokenInfo
from zoo.layers.abstract import check_sequence_sharding
from zoo.layers.embedding import AbstractEmbedding, AbstractPositionEmbedding, SharedEmbedding, TokenTypeEmbedding
from zoo.layers.encoders.pooling import EndTokenPooler
from zoo.layers.token_info import token_info, token_positions
from zoo.parallel import Module, buffer, gather, implementation_option, num_shards
from zoo.parallel.activation import Edit
from zoo.parallel.remat import Remat
from zoo.parallel.tokens import merge_copies, replicate_tokens, shard_tokens
from zoo.shapes import HiddenStates, PaddingMask, Positions, SegmentIds, Tokens

from ..build import LayerFactories, build_stack, make_embedding_projection
from ..decoder import EMBEDDING_DROPOUT_SITE, AbstractBlock, AbstractStack, Hidden, check_length, find_checkable_vocab
from ..hf.spec import Origin
from ..loop import Loop
from ..stack import BlockFactory, SharedFactory
from ..torch_habits import explain_torch_habit, hash_for_jit
from .heads import (
    AbstractEncoderHead,
    EncoderFeatures,
    FeatureHead,
    MaskedLMHead,
    MaskedUnembedding,
    ReplacedTokenHead,
    TokenClassificationHead,
)
from .relative import AbstractRelativeEmbedding, RelativeHidden


class Encoder(Module):
    """A bidirectional language model: head(norm(stack(embedding(tokens)))) (BERT, Devlin et al., arXiv:1810.04805).

    The head is a `MaskedLMHead`, whose result is logits of the vocabulary, and which `cross_entropy` trains; a
    `ClassificationHead` of texts; a `TokenClassificationHead`; a `ReplacedTokenHead`; or a `FeatureHead`, whose result
    is `EncoderFeatures`. Learned positions and token types are added to the embedding, `embedding_norm` normalizes the
    sum, and an `embedding_projection` maps it to the residual stream where that has another number of features.

    A token also attends to later tokens, except in CLIP's causal layers, so there is neither a KV cache nor generation.
    """

    embedding: AbstractEmbedding | SharedEmbedding
    stack: AbstractStack
    norm: AbstractNorm
    head: AbstractEncoderHead | MaskedLMHead
    dropout: Dropout
    position_embedding: AbstractPositionEmbedding | None = None
    type_embedding: TokenTypeEmbedding | None = None
    embedding_norm: AbstractNorm | None = None
    embedding_projection: AbstractLinear | None = None
    relative_embedding: AbstractRelativeEmbedding | None = None
    """Table of relative positions that all layers read (`zoo.models.encoders.relative`)."""

    edits: tuple[Edit, ...] = buffer(default=())
    """Edits of values of the forward pass (`zoo.patch`)."""
    origin: Origin | None = implementation_option(default=None)
    """The checkpoint that the model was loaded from, which `zoo.save` needs."""

    hidden_states_skip_embedding: ClassVar[bool] = False
    logit_maximum: ClassVar[None] = None

    if not TYPE_CHECKING:  # for a type checker every name would be an attribute
        __getattr__ = explain_torch_habit

    def __hash__(self) -> int:
        return hash_for_jit(self)

    def __call__(
        self,
        tokens: Tokens,
        *,
        mask: PaddingMask | None = None,
        segment_ids: SegmentIds | None = None,
        positions: Positions | None = None,
        token_types: Int[Array, "batch seq"] | None = None,
        key: Key[Array, ""] | Key[Array, "batch"] | None = None,
    ) -> (
        Float[Array, "batch seq vocab"] | Float[Array, "batch seq classes"] | Float[Array, "batch _"] | EncoderFeatures
    ):
        """Return the head's output for each token or row.

        - `mask`: padding mask, True or 1 for real tokens. Padding is left or right; its logits are meaningless.
        - `segment_ids`: packed sequences. Tokens attend only within their segment; 0 is padding.
        - `positions`: position of each token in its document.
        - `token_types`: type of each token, such as 1 for the second text of a pair; 0 by default.
        - `key`: PRNG key for dropout, one or one per row. No dropout without it.

        **Raises** `ValueError` as `zoo.models.Decoder`; for token types without an embedding of types; and for packed
        sequences with a head that makes one vector of a row.
        """
        check_tokens(tokens, find_checkable_vocab(self))
        if token_types is not None and self.type_embedding is None:
            raise ValueError("token_types were given, and the model embeds no types: leave them out")
        is_pooled = not isinstance(self.head, MaskedLMHead | TokenClassificationHead | ReplacedTokenHead)
        if segment_ids is not None and is_pooled:
            raise ValueError(
                f"{type(self.head).__name__} makes one vector of a row, and packed rows hold several texts: give each "
                "text a row, with a padding mask"
            )
        options = {"segment_ids": segment_ids, "positions": positions, "token_types": token_types, "key": key}
        hidden, _ = self.hidden(tokens, self.token_info(tokens, mask=mask, **options))
        if mask is not None:
            mask = jnp.asarray(mask, bool)
        return self.read_head(hidden.x, mask, tokens)

    def token_info(
        self,
        tokens: Tokens,
        *,
        mask: PaddingMask | None = None,
        segment_ids: SegmentIds | None = None,
        positions: Positions | None = None,
        token_types: Int[Array, "batch seq"] | None = None,
        key: Key[Array, ""] | Key[Array, "batch"] | None = None,
    ) -> TokenInfo:
        """Build the `TokenInfo` of texts, as `zoo.layers.token_info.token_info` does."""
        info = token_info(tokens, mask=mask, segment_ids=segment_ids, positions=positions, key=key)
        if token_types is None:
            return info
        check_token_arrays(tokens, token_types=token_types)
        return dataclasses.replace(info, token_types=jnp.asarray(token_types).astype(jnp.int32))

    def read_head(self, x: HiddenStates, mask: PaddingMask | None, tokens: Tokens) -> Any:
        """Return the head's output for normalized hidden states of these tokens.

        **Raises** `NotImplementedError` for a head that makes one vector of a row, where the sequence is sharded.
        """
        if isinstance(self.head, MaskedLMHead):
            return self.logits(x)
        if num_shards(x, "seq") > 1 and not isinstance(self.head, TokenClassificationHead | ReplacedTokenHead):
            raise NotImplementedError(
                f"{type(self.head).__name__} makes one vector of a row, and the mesh shards its tokens: take context=1"
            )
        if isinstance(self.head, FeatureHead) and isinstance(self.head.pooler, EndTokenPooler):
            mask = self.head.pooler.find_end(tokens, mask)
        return gather(self.head)(x, mask)

    def hidden(self, tokens: Tokens, info: TokenInfo, states: None = None) -> tuple[Hidden, None]:
        """Return the hidden states after the final norm, and None: there are no states.

        **Raises** `NotImplementedError` where the sequence is sharded, for a mixer that needs all of it.
        """
        info = info.mask_padding()
        hidden = self.embed(tokens, info)
        check_sequence_sharding(self.stack, hidden.x)
        hidden, _ = self.stack(hidden, info)
        return Hidden(replicate_tokens(gather(self.norm)(hidden.x)), merge_copies(hidden.routing)), None

    def embed(self, tokens: Tokens, info: TokenInfo) -> Hidden:
        """Return the input of the first layer: embeddings of tokens, positions and types, normalized and projected.

        **Raises** `ValueError` for more tokens than there are learned positions.
        """
        x = gather(self.embedding)(tokens)
        if self.position_embedding is not None:
            if info.positions is None:
                check_length(self, tokens.shape[1] * num_shards(x, "seq"))
            positions = shard_tokens(token_positions(tokens, info), axis=-1)
            x = x + gather(self.position_embedding)(positions).astype(x.dtype)
        if self.type_embedding is not None:
            if info.token_types is None:
                types = jnp.zeros_like(tokens)
            else:
                types = info.token_types
            x = x + gather(self.type_embedding)(shard_tokens(types, axis=-1))
        if self.embedding_norm is not None:
            x = gather(self.embedding_norm)(x)
        x = self.dropout(x, info, site=EMBEDDING_DROPOUT_SITE)
        if self.embedding_projection is not None:
            x = gather(self.embedding_projection)(x)
        if self.relative_embedding is None:
            return Hidden(x)
        return RelativeHidden(x, table=gather(self.relative_embedding)())

    def logits(self, x: Float[Array, "*rows embed"]) -> Float[Array, "*rows vocab"]:
        """Return the masked-LM logits of normalized hidden states: this device's shard of them if the vocabulary is
        sharded. **Raises** `TypeError` as `gather_unembedding`."""
        return self.gather_unembedding()(x)

    def gather_unembedding(self) -> MaskedUnembedding:
        """All-gather the parameters of the masked-LM head. **Raises** `TypeError` for a model with another head."""
        if not isinstance(self.head, MaskedLMHead):
            raise TypeError(
                f"the model has a {type(self.head).__name__}, and logits of the vocabulary are MaskedLMHead's"
            )
        table = self.embedding if self.head.decoder is None else self.head.decoder
        return MaskedUnembedding(gather(self.head), gather(table))

    def init_state(self, batch: int, length: int) -> Any:
        """**Raises** `NotImplementedError`: a token attends to later ones, so none can be decoded before them."""
        raise NotImplementedError("an Encoder attends in both directions: it has no KV cache, and generates no text")


def build_encoder(
    *,
    vocab: int,
    embed: int,
    layers: Sequence[LayerFactories | BlockFactory],
    norm: Callable[[], AbstractNorm],
    head: Callable[..., AbstractEncoderHead | MaskedLMHead],
    block: Callable[..., AbstractBlock] | Sequence[Callable[..., AbstractBlock]],
    embedding_size: int | None = None,
    positions: int | AbstractPositionEmbedding | None = None,
    position_offset: int = 0,
    multiplier: float = 1.0,
    token_types: int = 0,
    relative_embedding: Callable[..., AbstractRelativeEmbedding] | None = None,
    embedding_norm: Callable[[], AbstractNorm] | None = None,
    final_norm: Callable[[], AbstractNorm],
    dropout: float = 0.0,
    remat: Remat = "none",
    loop: Loop = "auto",
    shared: Sequence[SharedFactory] = (),
    key: Key[Array, ""],
) -> Encoder:
    """Build an encoder of texts from factories of its parts, as `zoo.models.build_decoder` builds a decoder.

    - `head` is called with `key=`. `norm` makes the norms of the layers, `final_norm` that after the last:
      `IdentityNorm` for none.
    - `block`: residual wiring of all layers, or of each.
    - `embedding_size`: features of the embeddings, whose sum a linear layer projects; None for `embed` features without
      a projection.
    - `positions`: number of learned positions, None without; `position_offset`: unused rows before them. Or a position
      embedding that is not learned.
    - `multiplier`: of the embeddings of tokens.
    - `token_types`: number of token types, 0 without an embedding of types.
    - `relative_embedding`: factory of the table of relative positions that all layers read, called with `key=`.
    - `shared`: factories of modules that several layers call, see `zoo.models.Stack`.
    """
    embedding_key, stack_key, head_key = jax.random.split(wrap_key(key), 3)
    position_key = jax.random.fold_in(embedding_key, 1)
    type_key = jax.random.fold_in(embedding_key, 2)
    scale = embed**-0.5
    type_embedding = projection = relative = None
    size = embed if embedding_size is None else embedding_size
    if isinstance(positions, int):
        positions = PositionEmbedding(positions, size, offset=position_offset, scale=scale, key=position_key)
    if token_types:
        type_embedding = TokenTypeEmbedding(token_types, size, scale=scale, key=type_key)
    if embedding_size is not None:
        projection_key = jax.random.fold_in(embedding_key, 4)
        projection = make_embedding_projection(size, embed, bias=True, key=projection_key)
    if relative_embedding is not None:
        relative = relative_embedding(key=jax.random.fold_in(embedding_key, 3))
    return Encoder(
        embedding=Embedding(vocab, size, scale=scale, multiplier=multiplier, key=embedding_key),
        position_embedding=positions,
        type_embedding=type_embedding,
        relative_embedding=relative,
        embedding_norm=None if embedding_norm is None else embedding_norm(),
        embedding_projection=projection,
        stack=build_stack(
            layers, norm, block=block, dropout=dropout, remat=remat, loop=loop, shared=shared, key=stack_key
        ),
        norm=final_norm(),
        head=head(key=head_key),
        dropout=Dropout(dropout),
    )
