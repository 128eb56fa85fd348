"""The skeleton that language models share: embedding, stack, norm, head."""

from collections.abc import Mapping

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from zoo.layers import (
    AbstractEmbedding,
    AbstractLinear,
    AbstractNorm,
    Dropout,
    PositionEmbedding,
    TokenInfo,
    token_positions,
)
from zoo.parallel import Module, current_mesh, gather, implementation_option, materialize, num_shards

from .blocks import Hidden
from .hf.spec import Origin
from .stack import AbstractStack, LayerStates

_EMBEDDING_DROPOUT_SITE = 2**32 - 1
"""The site of the embedding's dropout: keys of layers are folded by their numbers, and none is as large."""


class Decoder(Module):
    """logits = head(norm(stack(embedding(tokens)))). Without a head the embedding's own table is one: tied. Learned
    positions are added to what the embedding gives, which then may have a norm of its own.

    A batch is explicit: `model(tokens)` takes "batch seq" and gives "batch seq vocab".
    """

    embedding: AbstractEmbedding
    stack: AbstractStack
    norm: AbstractNorm
    head: AbstractLinear | None
    dropout: Dropout
    position_embedding: PositionEmbedding | None = None
    embedding_norm: AbstractNorm | None = None

    logits_multiplier: float = eqx.field(static=True, default=1.0)
    soft_cap: float | None = eqx.field(static=True, default=None)
    """Logits are bounded to c tanh(logits / c), after they were multiplied."""
    hidden_states_skip_embedding: bool = implementation_option(default=False)
    """Whether `hidden_states` are the outputs of layers, then the last one normed, as transformers has them of some
    families, and not the input of the first layer, then the outputs."""
    origin: Origin | None = implementation_option(default=None)
    """The checkpoint that the model was read from, which says how it is written again."""

    def __call__(
        self,
        tokens: Int[Array, "batch seq"],
        *,
        mask: Bool[Array, "batch seq"] | None = None,
        segment_ids: Int[Array, "batch seq"] | None = None,
        positions: Int[Array, "batch seq"] | None = None,
        key: Key[Array, ""] | Key[Array, "batch"] | None = None,
    ) -> Float[Array, "batch seq vocab"]:
        """Logits of the token that follows each.

        - `mask`: True where a token is real; padding may stand left or right, and its logits mean nothing.
        - `segment_ids`: documents packed into one row; tokens see their own. Positions start anew in each, unless
          given.
        - `positions`: the place of each token in its document.
        - `key`: for dropout; without it nothing is dropped. One key, or one a row.

        **Raises** `ValueError` where `mask` comes with `segment_ids` or `positions`, which say the same, and for more
        tokens than there are learned positions.
        """
        info = token_info(tokens, mask=mask, segment_ids=segment_ids, positions=positions, key=key)
        stream, _ = self.hidden(tokens, info)
        return self.logits(stream.x)

    def embed(self, tokens: Int[Array, "batch seq"], info: TokenInfo) -> Hidden:
        """What the first layer reads."""
        x = gather(self.embedding)(tokens)
        if self.position_embedding is not None:
            if info.positions is None:
                self.check_length(tokens.shape[1] * num_shards(x, "seq"))
            x = x + gather(self.position_embedding)(token_positions(x, info))
        if self.embedding_norm is not None:
            x = gather(self.embedding_norm)(x)
        return Hidden(self.dropout(x, info, site=_EMBEDDING_DROPOUT_SITE))

    def hidden(
        self, tokens: Int[Array, "batch seq"], info: TokenInfo, states: LayerStates | None = None
    ) -> tuple[Hidden, LayerStates | None]:
        """What the head reads: the stream after the final norm; and the states after these tokens, where some came."""
        stream, states = self.stack(self.embed(tokens, info), info, states)
        return Hidden(gather(self.norm)(stream.x), stream.routing), states

    def logits(self, x: Float[Array, "*rows embed"]) -> Float[Array, "*rows vocab"]:
        """Of hidden vectors. Over a vocabulary that is split, a device gives those of its share."""
        return self.gather_unembedding()(x)

    def gather_unembedding(self) -> "_Unembedding":
        """The head by itself, its parameters gathered."""
        table = gather(self.embedding if self.head is None else self.head)
        return _Unembedding(table, self.soft_cap, self.logits_multiplier)

    def init_state(self, batch: int, length: int) -> LayerStates:
        """Empty states, one a layer, for `batch` rows of up to `length` tokens, in the dtype of the activations.

        **Raises** `ValueError` for more tokens than there are learned positions.
        """
        self.check_length(length)
        dtype = jax.eval_shape(materialize(self.embedding), jnp.zeros((1, 1), int)).dtype
        return self.stack.init_state(batch, length, dtype)

    def check_length(self, length: int) -> None:
        if self.position_embedding is not None and length > self.position_embedding.length:
            raise ValueError(
                f"{length} tokens are too many: the model learned {self.position_embedding.length} positions"
            )


class _Unembedding(Module):
    """From hidden vectors to logits: a head, or an embedding used backward."""

    table: AbstractLinear | AbstractEmbedding

    soft_cap: float | None = eqx.field(static=True)
    multiplier: float = eqx.field(static=True, default=1.0)

    def __call__(self, x: Float[Array, "*rows embed"]) -> Float[Array, "*rows vocab"]:
        logits = self.table.transposed(x) if isinstance(self.table, AbstractEmbedding) else self.table(x)
        logits = logits if self.multiplier == 1 else self.multiplier * logits
        return logits if self.soft_cap is None else self.soft_cap * jnp.tanh(logits / self.soft_cap)


def token_info(
    tokens: Int[Array, "batch seq"],
    *,
    mask: Bool[Array, "batch seq"] | None = None,
    segment_ids: Int[Array, "batch seq"] | None = None,
    positions: Int[Array, "batch seq"] | None = None,
    key: Key[Array, ""] | Key[Array, "batch"] | None = None,
) -> TokenInfo:
    """What layers need to know of these tokens. See `Decoder.__call__`."""
    if mask is not None and (segment_ids is not None or positions is not None):
        raise ValueError("pass mask alone, or segment_ids and positions: padding is a segment of its own")
    if current_mesh() is not None and (mask is not None or (segment_ids is not None and positions is None)):
        raise ValueError(
            "inside zoo.spmd positions cannot be counted, since the sequence may be split: make `positions` with the "
            "batch, as zoo.models.pack_positions(segment_ids) does"
        )
    if mask is not None:
        segment_ids = mask.astype(jnp.int32)
        positions = jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0)
    elif segment_ids is not None and positions is None:
        positions = pack_positions(segment_ids)
    if key is not None and key.ndim == 0:
        if current_mesh() is not None:
            raise ValueError("inside zoo.spmd keys are one a row: pass on the `key` that the loss was given")
        key = jax.random.split(key, tokens.shape[0])
    return TokenInfo(positions, segment_ids, key)


def batch_token_info(batch: Mapping[str, Array], key: Key[Array, "batch"] | None = None) -> TokenInfo:
    """The same for a batch, a mapping of "batch seq" arrays."""
    return token_info(batch["tokens"], segment_ids=batch.get("segment_ids"), positions=batch.get("positions"), key=key)


def pack_positions(segment_ids: Int[Array, "batch seq"]) -> Int[Array, "batch seq"]:
    """The place of each token in its document, for documents that stand one after another in a row."""
    index = jnp.arange(segment_ids.shape[1])
    starts = jnp.concatenate([jnp.ones_like(segment_ids[:, :1]), jnp.diff(segment_ids, axis=1)], axis=1) != 0
    return index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)
