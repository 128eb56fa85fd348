"""Positions, segment ids and PRNG keys of a batch, as passed to every mixer."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from zoo._checks import check_batch_keys
from zoo.parallel import Module, current_mesh, shard_offset
from zoo.shapes import HiddenStates, PaddingMask, Positions, SegmentIds, Tokens


class TokenInfo(Module):
    """Positions, segment ids and PRNG keys of a batch.

    Row first, so that micro-batches, meshes and pipeline stages slice it together with the hidden states.
    """

    positions: Positions | None = None
    """Position of each token in its document; None if every row counts 0, 1, 2, ... A negative position is padding,
    which KV caches mask."""
    segment_ids: SegmentIds | None = None
    """Document of each token in packed sequences: tokens attend only within a segment. None if a row is one
    document."""
    keys: Key[Array, "batch"] | None = None
    """One PRNG key per row; None at inference."""
    coordinates: Float[Array, "batch seq 2"] | None = None
    """Row and column of each patch of an image, for `zoo.ops.axial_rotary`; (0, 0) for other tokens."""
    token_types: Int[Array, "batch seq"] | None = None
    """Type of each token, for encoders that embed it: 0 for the first text of a pair, 1 for the second."""

    def fold_keys(self, number: int | Int[Array, ""]) -> "TokenInfo":
        """Fold a number, such as that of a layer, into the PRNG keys."""
        if self.keys is None:
            return self
        keys = jax.vmap(jax.random.fold_in, (0, None))(self.keys, number)
        return dataclasses.replace(self, keys=keys)


def token_positions(x: HiddenStates | Tokens, info: TokenInfo) -> Int[Array, "*batch seq"]:
    """Return `info.positions`, or 0, 1, 2, ... along the (possibly sharded) sequence."""
    return jnp.arange(x.shape[1]) + shard_offset(x, "seq", x.shape[1]) if info.positions is None else info.positions


def token_info(
    tokens: Tokens,
    *,
    mask: PaddingMask | None = None,
    segment_ids: SegmentIds | None = None,
    positions: Positions | None = None,
    key: Key[Array, ""] | Key[Array, "batch"] | None = None,
) -> TokenInfo:
    """Build the `TokenInfo` of a batch from a padding mask, or from segment ids and positions.

    A padding mask becomes segment ids (0 is padding) and positions; a single PRNG key is split into one per row. The
    arguments are those of `zoo.models.Decoder`.

    **Raises** `ValueError` for a `mask` together with `segment_ids` or `positions`, and inside `zoo.spmd` for what only
    the unsharded batch can tell: positions, and one key per row.
    """
    if mask is not None and (segment_ids is not None or positions is not None):
        raise ValueError("pass mask alone, or segment_ids and positions: padding is a segment of its own")
    if current_mesh() is not None and (mask is not None or (segment_ids is not None and positions is None)):
        raise ValueError(
            "inside zoo.spmd positions cannot be counted, since the sequence may be sharded: make `positions` with the "
            "batch, as zoo.models.pack_positions(segment_ids) does"
        )
    if mask is not None:
        segment_ids = mask.astype(jnp.int32)
        positions = jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0)
    elif segment_ids is not None and positions is None:
        positions = pack_positions(segment_ids)
    return TokenInfo(positions, segment_ids, split_row_keys(key, tokens.shape[0]))


def split_row_keys(key: Key[Array, "..."] | None, rows: int) -> Key[Array, "batch"] | None:
    """Split a single PRNG key into one per row; keys that are one per row pass through. **Raises** `ValueError` for a
    single key inside `zoo.spmd`, where a device has some of the rows."""
    if key is None or key.ndim:
        return key
    if current_mesh() is not None:
        raise ValueError("inside zoo.spmd keys are one per row: pass on the `key` that the loss was given")
    return jax.random.split(key, rows)


def batch_token_info(batch: Mapping[str, Array], key: Key[Array, "batch"] | None = None) -> TokenInfo:
    """Build the `TokenInfo` of a batch that is a mapping of "batch seq" arrays.

    **Raises** `ValueError` for a batch without `tokens`, and for a key other than `tokens`, `targets`, `weights`,
    `segment_ids` and `positions`.
    """
    check_batch_keys(batch)
    return token_info(batch["tokens"], segment_ids=batch.get("segment_ids"), positions=batch.get("positions"), key=key)


def pack_positions(segment_ids: SegmentIds) -> Positions:
    """Return the position of each token in its document, for packed sequences: 0, 1, 2, ... restarting in each."""
    index = jnp.arange(segment_ids.shape[1])
    starts = jnp.concatenate([jnp.ones_like(segment_ids[:, :1]), jnp.diff(segment_ids, axis=1)], axis=1) != 0
    return index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)
