"""Description of a call of the loss, which the choice of its implementation depends on."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array

from zoo.layers.embedding import AbstractEmbedding
from zoo.parallel import num_shards

from .encoders.heads import MaskedUnembedding


@dataclasses.dataclass(frozen=True)
class LossRequest:
    """Facts of a call, by which an implementation is chosen."""

    tokens: int
    chunk: int
    embed: int
    vocab: int
    """Words of this device's shard."""
    dtype: Any
    has_z_loss: bool
    is_matrix: bool
    """True if the logits are a matrix times the hidden states: without a bias, a soft cap or a transform."""
    vocab_shards: int

    @classmethod
    def from_head(cls, head: Any, x: Array, z_loss: float, chunk: int) -> "LossRequest":
        """Describe the loss of hidden states `x` with a head as `gather_unembedding` returns it."""
        if isinstance(head.table, AbstractEmbedding):
            vocab = head.table.table_shape[0]
        else:
            vocab = head.table.out_size
        arrays = jax.tree.leaves(eqx.filter(head.table, eqx.is_array))
        if isinstance(head, MaskedUnembedding):
            is_matrix = False
        else:
            is_matrix = head.soft_cap is None and head.table.dense_bias is None
        return cls(
            tokens=len(x),
            chunk=chunk,
            embed=x.shape[1],
            vocab=vocab,
            dtype=x.dtype,
            has_z_loss=z_loss != 0,
            is_matrix=is_matrix,
            vocab_shards=max(num_shards(array, "vocab") for array in arrays),
        )
