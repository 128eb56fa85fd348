"""The loss that trains the indexers of sparse attention to score keys as the attention weighs them."""

from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from zoo._checks import check_batch
from zoo.layers import CompressedAttention, IndexedAttention, SparseLatentAttention, TokenInfo
from zoo.layers.attention.sparse_latent import DIVERGENCE
from zoo.layers.token_info import batch_token_info
from zoo.parallel import reduce
from zoo.parallel.module import replace_option
from zoo.parallel.scope import calling_modules
from zoo.parallel.taps import Taps, active_taps, current_taps
from zoo.parallel.tokens import merge_copies
from zoo.shapes import Tokens

from .decoder import Decoder, Hidden, find_checkable_vocab

_Model = TypeVar("_Model")
_NAMES = (f"layers.*.{DIVERGENCE}", f"layers.*.*.{DIVERGENCE}")
"""Names of the divergence in layers: of blocks that mix by themselves, and of mixers."""


def indexer_loss(
    model: Decoder, batch: Mapping[str, Array], *, key: Key[Array, "batch"] | None = None
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return the sum over tokens and layers of the divergence of each indexer from its attention, and the number of
    tokens, without padding (DeepSeek-V3.2, arXiv:2512.02556, section 2.1):

        sum over layers of KL(p_t || softmax(I_t)),    p_t = sum over heads of the attention, divided by its sum

    over the keys that a token attends to: those that are selected, or all in a layer that `attend_densely` has set. Its
    gradient is one of the indexers only: attention and hidden states are constants in it.

        loss, grads = zoo.value_and_grad(zoo.models.indexer_loss, mesh)(attend_densely(model), batch)
        loss = zoo.cross_entropy(model, batch, indexer=1.0)         # afterwards, with the loss of the model

    `batch`: `tokens`, and the other keys of `zoo.cross_entropy`, of which targets and weights are not read.

    **Raises** `ValueError` for a model without an indexer, and for a loss whose values are captured;
    `NotImplementedError` on a mesh with `pipe`, and for layers that share an indexer; and as `zoo.cross_entropy` for
    the batch.
    """
    check_batch(batch, find_checkable_vocab(model))
    info = batch_token_info(batch, key).mask_padding()
    divergence = run_measured(model, batch["tokens"], info)[1]
    return divergence.sum(), _mark_tokens(batch["tokens"], info).sum()


def run_measured(model: Decoder, tokens: Tokens, info: TokenInfo) -> tuple[Hidden, Float[Array, "batch seq"]]:
    """Return the hidden states of `model.hidden`, and the sum over layers of the divergence of each token: 0 for
    padding. **Raises** as `indexer_loss` does."""
    outer = current_taps()
    if outer is not None and outer.reads:
        raise ValueError(
            f"the loss of indexers reads values of the model, and so does zoo.capture around it ({outer.reads[0]}): "
            "capture them in a call of their own"
        )
    info = info.mask_padding()
    taps = Taps(_NAMES, depth=len(calling_modules()))
    with active_taps(taps):
        hidden, _ = model.hidden(tokens, info)
    if taps.log.repeated:
        raise NotImplementedError(
            f"{min(taps.log.repeated)}: several layers call one indexer, and its values are not summed"
        )
    values = [values for values, _ in taps.collect().values()]
    if not values:
        raise ValueError(
            f"no indexer to train: {type(model).__name__} has no layer of SparseLatentAttention, CompressedAttention "
            "or IndexedAttention that selects keys by an indexer of its own"
        )
    divergence = merge_copies(sum(value.sum(0) for value in values))
    return hidden, divergence * _mark_tokens(tokens, info)


def average_divergence(divergence: Float[Array, "batch seq"], info: TokenInfo) -> Float[Array, ""]:
    """Return the mean over all tokens of all devices, without padding."""
    is_token = _mark_tokens(divergence, info.mask_padding())
    total, count = (reduce(reduce(x.sum(), over="seq"), over="batch") for x in (divergence, is_token))
    return total / jnp.maximum(count, 1)  # a micro-batch may be padding


def _mark_tokens(like: Array, info: TokenInfo) -> Float[Array, "batch seq"]:
    """Return 1 for tokens and 0 for padding."""
    if info.segment_ids is None:
        return jnp.ones_like(like, jnp.float32)
    return (info.segment_ids != 0).astype(jnp.float32)


def attend_densely(model: _Model, dense: bool = True) -> _Model:
    """Return a model whose sparse attention attends to all keys, or all blocks, to train new indexers before they
    select; or, with `dense=False`, to the keys that its indexers select.

    **Raises** `ValueError` for a model without sparse attention.
    """

    def is_sparse(x: Any) -> bool:
        has_indexer = isinstance(x, CompressedAttention) and x.indexer is not None
        return has_indexer or isinstance(x, SparseLatentAttention | IndexedAttention)

    if not any(map(is_sparse, jax.tree.leaves(model, is_leaf=is_sparse))):
        raise ValueError(f"{type(model).__name__} has no layer of SparseLatentAttention, and no indexer")

    def replace(node: Any) -> Any:
        return replace_option(node, "dense", dense) if is_sparse(node) else node

    return jax.tree.map(replace, model, is_leaf=is_sparse)
