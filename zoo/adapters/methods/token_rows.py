"""Trainable rows of a frozen embedding: of some tokens of the vocabulary, or of virtual tokens after it."""

from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from zoo._checks import wrap_key
from zoo._keywords import check_keywords
from zoo.layers.embedding import AbstractEmbedding
from zoo.layers.linear import contract
from zoo.parallel import buffer
from zoo.parallel.collectives import shard_offset
from zoo.parallel.fields import adapter_parameter, wrapped
from zoo.parallel.tokens import match_tokens
from zoo.parallel.trainable_copy import materialize
from zoo.shapes import ResidualStream, Tokens

from ..apply import apply_adapters
from ..base import AbstractAdapter, Strength

_Model = TypeVar("_Model")


class TokenRows(AbstractAdapter, AbstractEmbedding):
    """The rows of the tokens `ids` in place of the table's; a tied head uses them, too. Ids from the size of the
    vocabulary on are virtual tokens, which are read and never predicted."""

    base: AbstractEmbedding = wrapped()
    rows: Float[Array, "prompt embed"] = adapter_parameter(no_weight_decay=True)
    ids: Int[Array, "prompt"]
    strength: Strength = buffer()

    num_virtual: int = eqx.field(static=True)
    """Number of virtual tokens: all of them, or 0."""
    adapter_name: str = eqx.field(static=True)
    multiplier: float = eqx.field(static=True)

    @property
    def has_adapter(self) -> Bool[Array, "*stacked"]:
        return jnp.array(True)

    def __call__(self, tokens: Tokens) -> ResidualStream:
        is_own = tokens[..., None] == self.ids
        y = self.base(jnp.where(is_own.any(-1), 0, tokens) if self.num_virtual else tokens)
        row = (self.rows[is_own.argmax(-1)] * self.multiplier).astype(y.dtype)
        row, is_own = match_tokens(row, y), match_tokens(is_own.any(-1, keepdims=True), y)
        strength = self.strength_per_row(y)
        return jnp.where(is_own, (1 - strength) * y * (self.num_virtual == 0) + strength * row, y).astype(y.dtype)

    def transposed(self, x: Float[Array, "*rows embed"]) -> Float[Array, "*rows vocab"]:
        logits = self.base.transposed(x)
        if self.num_virtual:
            return logits
        strength = self.strength_per_row(x)
        size = logits.shape[-1]
        local = self.ids - shard_offset(logits, "vocab", size)
        local = jnp.where((0 <= local) & (local < size), local, size)  # of another shard, and dropped
        own = (1 - strength) * logits[..., local] + strength * contract(x, self.rows.astype(x.dtype), 1)
        return logits.at[..., local].set(own.astype(logits.dtype), mode="drop")

    @property
    def dense_weight(self) -> Float[Array, "vocab embed"]:
        """The table with these rows, and with rows of virtual tokens at its end."""
        table = self.base.dense_weight
        strength = self.strength_per_expert(self.strength)
        if self.num_virtual:
            return jnp.concatenate([table, strength * self.rows])
        return table.at[self.ids].set((1 - strength) * table[self.ids] + strength * self.rows)

    def with_weight(self, weight: Float[Array, "vocab embed"], bias: None = None) -> AbstractEmbedding:
        raise NotImplementedError("the table under an adapter is not exchanged: merge the adapter first")

    @property
    def table_shape(self) -> tuple[int, int]:
        vocab, embed = self.base.table_shape
        return vocab + self.num_virtual, embed


def has_virtual_tokens(model: Any) -> bool:
    """Return True for a model with virtual tokens."""
    nodes = jax.tree.leaves(model, is_leaf=lambda node: isinstance(node, TokenRows))
    return any(isinstance(node, TokenRows) and node.num_virtual > 0 for node in nodes)


def wrap_embedding(model: _Model, make_rows: Any, ids: Any, adapter_name: str) -> _Model:
    """Train the rows `make_rows(table)` of these ids; of virtual tokens if `ids` is their number."""

    def make(base: AbstractEmbedding, key: Key[Array, ""]) -> TokenRows:
        vocab, _ = materialize(base).table_shape
        num_virtual = ids if isinstance(ids, int) else 0
        own = vocab + jnp.arange(ids) if isinstance(ids, int) else jnp.asarray(ids, jnp.int32)
        rows = jnp.array(make_rows(materialize(base).dense_weight))
        return TokenRows(
            base=base,
            rows=rows,
            ids=own,
            strength=jnp.ones((), jnp.float32),
            num_virtual=num_virtual,
            adapter_name=adapter_name,
            multiplier=base.multiplier,
        )

    return apply_adapters(model, lambda site: (make, {}) if site.name == "embedding" else None, jax.random.key(0))


@check_keywords
def prompt(
    model: _Model,
    length: int,
    *,
    text: Int[Array, "text"] | None = None,
    adapter_name: str = "prompt",
    key: Key[Array, ""],
) -> _Model:
    """Train the embeddings of `length` virtual tokens, and freeze the model: prompt tuning (Lester et al.,
    arXiv:2104.08691, section 2). P-tuning's encoders end in the same embeddings.

    Their ids follow the vocabulary: V, V + 1, ... Put them before each text, in batches and prompts; packed documents
    each have their own. `zoo.prefill` reads them once, for any number of texts.

    - `text`: ids of `length` tokens whose embeddings they begin with. By default tokens are drawn.

    **Raises** `ValueError` for a length below 1 and a `text` of another length.
    """
    vocab, _ = model.embedding.table_shape  # pyright: ignore[reportAttributeAccessIssue]
    if text is None:
        text = jax.random.randint(wrap_key(key), (max(length, 1),), 0, vocab)
    if length < 1 or np.shape(text) != (length,):
        raise ValueError(f"length={length}: expected 1 or more, and a text of as many tokens")
    return wrap_embedding(model, lambda table: table[jnp.asarray(text)], length, adapter_name)


def token_rows(model: _Model, tokens: Any, *, adapter_name: str = "tokens") -> _Model:
    """Train the embeddings of some tokens, and freeze the rest, as PEFT's trainable tokens: new words of a domain. A
    tied head uses the same rows. **Raises** `ValueError` for ids that are repeated or outside of the vocabulary."""
    ids = np.asarray(tokens, np.int32)
    vocab, _ = model.embedding.table_shape  # pyright: ignore[reportAttributeAccessIssue]
    if ids.ndim != 1 or not ids.size or len(set(ids.tolist())) < len(ids) or not (0 <= ids.min() <= ids.max() < vocab):
        raise ValueError(f"expected different ids of tokens below {vocab}, got {tokens}")
    return wrap_embedding(model, lambda table: table[ids], ids, adapter_name)
