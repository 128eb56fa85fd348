"""Description of a call of the loss, which the choice of its implementation depends on."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array

from zoo.layers.embedding import AbstractEmbedding
from zoo.ops.platform import current_platform
from zoo.parallel import num_shards

from .encoders.heads import MaskedUnembedding

_CPU_CHUNK = 1024
_CHUNK = 4096
_MOST_LOGITS = 2**28
"""Logits of a chunk: with their gradient 1 GiB in bfloat16."""


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
    def from_head(cls, head: Any, x: Array, z_loss: float, chunk: int | None) -> "LossRequest":
        """Describe the loss of hidden states `x` with a head as `gather_unembedding` returns it. Without a `chunk`,
        `choose_chunk` chooses one."""
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
            chunk=choose_chunk(vocab) if chunk is None else chunk,
            embed=x.shape[1],
            vocab=vocab,
            dtype=x.dtype,
            has_z_loss=z_loss != 0,
            is_matrix=is_matrix,
            vocab_shards=max(num_shards(array, "vocab") for array in arrays),
        )


def choose_chunk(vocab: int) -> int:
    """Return the number of tokens whose logits are computed at a time: 1,024 on a CPU, where they stay in its caches.

    Elsewhere 4,096, or 1,024 and more of a vocabulary so large that these have over 2²⁸ logits. Each chunk adds to the
    gradient of the head: 10 bytes per parameter with bfloat16 products, which take 6 FLOPs per parameter and token. At
    the rates measured on an H100, chunks of 1,024 tokens add two fifths to the time of the products.
    """
    if current_platform() == "cpu":
        return _CPU_CHUNK
    return min(max(_MOST_LOGITS // vocab, _CPU_CHUNK), _CHUNK)
