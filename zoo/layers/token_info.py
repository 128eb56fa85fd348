"""Positions, segment ids and PRNG keys of a batch, as passed to every mixer."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int, Key

from zoo._checks import check_batch_keys, check_token_arrays, is_host_readable, wrap_key
from zoo.ops.recurrence.chunks import find_segment_starts
from zoo.parallel import Module, num_shards
from zoo.parallel.collectives import current_mesh, shard_offset
from zoo.shapes import HiddenStates, PaddingMask, Positions, SegmentIds, Tokens


class TokenInfo(Module):
    """Positions, segment ids and PRNG keys of a batch.

    Row first, so that micro-batches, meshes and pipeline stages slice it together with the hidden states.
    """

    positions: Positions | None = None
    """Position of each token in its document; None if every row counts 0, 1, 2, ... In calls with states a negative
    position is padding."""
    segment_ids: SegmentIds | None = None
    """Document of each token in packed sequences: tokens attend only within a segment, and segment 0 is padding. None
    if a row is one document, and in calls with states."""
    keys: Key[Array, "batch"] | None = None
    """One PRNG key per row; None at inference."""
    coordinates: Float[Array, "batch seq axes"] | None = None
    """Row and column of each patch of an image, for `zoo.ops.axial_rotary`, (0, 0) for other tokens; of texts with
    images the time, row and column of each token, for `zoo.ops.sectioned_rotary`."""
    lookahead: Int[Array, "batch seq"] | None = None
    """Number of later tokens that each token attends to besides those before it, such as the rest of its image; None
    for 0. A window counts from the token itself."""
    token_types: Int[Array, "batch seq"] | None = None
    """Type of each token, for encoders that embed it: 0 for the first text of a pair, 1 for the second."""
    windows: SegmentIds | None = None
    """Window of each patch of an image, for layers in which tokens attend only within a window; 0 for padding."""

    def mask_padding(self) -> "TokenInfo":
        """Give padding, which is at negative positions, segment id 0, for a call without states.

        With segment ids or without positions it is the identity; also if values can be read and none is negative.
        """
        if self.positions is None or self.segment_ids is not None:
            return self
        if is_host_readable(self.positions) and np.min(jax.device_get(self.positions), initial=0) >= 0:
            return self
        return dataclasses.replace(self, segment_ids=_to_int32(self.positions >= 0))

    def fold_keys(self, number: int | Int[Array, ""]) -> "TokenInfo":
        """Fold a number, such as a layer's index, into the PRNG keys."""
        if self.keys is None:
            return self
        keys = jax.vmap(jax.random.fold_in, (0, None))(self.keys, number)
        return dataclasses.replace(self, keys=keys)


def token_positions(x: HiddenStates | Tokens, info: TokenInfo) -> Int[Array, "*batch seq"]:
    """Return `info.positions`, or 0, 1, 2, ... along the (possibly sharded) sequence."""
    if info.positions is None:
        return jnp.arange(x.shape[1]) + shard_offset(x, "seq", x.shape[1])
    return info.positions


def token_info(
    tokens: Tokens,
    *,
    mask: PaddingMask | None = None,
    segment_ids: SegmentIds | None = None,
    positions: Positions | None = None,
    key: Key[Array, ""] | Key[Array, "batch"] | None = None,
) -> TokenInfo:
    """Build the `TokenInfo` of a batch from a padding mask, or from segment ids and positions.

    Arguments are as in `zoo.models.Decoder`, arrays of NumPy or JAX. A mask becomes segment ids of 0 and 1. Positions
    count in each document unless they are given. A single PRNG key is split into one per row.

    Every document of a row has an id of its own. Inside programs, where values cannot be checked, an id that comes
    again after another is a new document.

    **Raises** `TypeError` and `ValueError` as `zoo.models.Decoder`; `ValueError` also inside `zoo.spmd` for what only
    whole rows can tell: positions where the sequence is sharded, and one key per row.
    """
    check_token_arrays(tokens, mask=mask, segment_ids=segment_ids, positions=positions)
    keys = split_row_keys(key, tokens.shape[0])
    is_sharded = num_shards(tokens, "seq") > 1
    if is_sharded and (mask is not None or (segment_ids is not None and positions is None)):
        raise ValueError(
            "positions cannot be counted where the mesh shards the sequence: make `positions` with the batch, as "
            "zoo.models.pack_positions(segment_ids) does"
        )
    if mask is not None:
        segment_ids = _to_int32(mask)
    if positions is not None:
        positions = _to_int32(positions)
    if segment_ids is None:
        return TokenInfo(positions, None, keys)
    segment_ids = _to_int32(segment_ids)
    if isinstance(segment_ids, Tracer) and not is_sharded:
        segment_ids = _number_documents(segment_ids)
    if positions is None:
        positions = jnp.where(segment_ids == 0, -1, pack_positions(segment_ids))
    else:
        segment_ids = jnp.where(positions < 0, 0, segment_ids)
    return TokenInfo(positions, segment_ids, keys)


def refuse_segments(info: TokenInfo, state: Any) -> None:
    """**Raises** `ValueError` for segment ids in a call with a state, which continues one document per row."""
    if state is not None and info.segment_ids is not None:
        raise ValueError(
            "a call with states continues one document in each row, and was given segment ids, or a mask, which "
            "becomes some: give positions only, -1 for padding, as zoo.models.count_positions(mask, start) does"
        )


def split_row_keys(key: Key[Array, "..."] | None, rows: int) -> Key[Array, "batch"] | None:
    """Split a single PRNG key into one per row; keys that are one per row pass through.

    **Raises** `TypeError` for what is not a PRNG key; `ValueError` for another number of keys than of rows, and for a
    single key inside `zoo.spmd`, where a device has some of the rows.
    """
    if key is None:
        return None
    key = wrap_key(key)
    if key.ndim == 0:
        if current_mesh() is not None:
            raise ValueError("inside zoo.spmd keys are one per row: pass on the `key` that the loss was given")
        return jax.random.split(key, rows)
    if key.shape != (rows,):
        raise ValueError(f"key: expected one PRNG key, or one for each of {rows} rows, got {key.shape}")
    return key


def batch_token_info(batch: Mapping[str, Array], key: Key[Array, "batch"] | None = None) -> TokenInfo:
    """Build the `TokenInfo` of a batch that is a mapping of "batch seq" arrays.

    **Raises** `ValueError` for a batch without `tokens`, and for a key that neither a model nor a loss reads.
    """
    check_batch_keys(batch)
    info = token_info(batch["tokens"], segment_ids=batch.get("segment_ids"), positions=batch.get("positions"), key=key)
    return dataclasses.replace(info, lookahead=batch.get("lookahead"), coordinates=batch.get("coordinates"))


def pack_positions(segment_ids: SegmentIds) -> Positions:
    """Return the position of each token in its document, for packed sequences: 0, 1, 2, ... restarting in each."""
    index = jnp.arange(segment_ids.shape[1])
    return index - jax.lax.cummax(jnp.where(find_segment_starts(segment_ids), index, 0), axis=1)


def count_lookahead(spans: Int[Array, "batch seq"]) -> Int[Array, "batch seq"]:
    """Return the number of tokens after each one in its span: neighbors with the same id above 0, which attend to each
    other in both directions.

    **Raises** `NotImplementedError` where the sequence is sharded.
    """
    if num_shards(spans, "seq") > 1:
        raise NotImplementedError("a span of tokens that see each other may be on two devices: take context=1")
    spans = _to_int32(spans)
    place = jnp.arange(spans.shape[1])
    is_last = spans != jnp.pad(spans[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
    last = jax.lax.cummin(jnp.where(is_last, place, spans.shape[1]), axis=1, reverse=True)
    return jnp.where(spans > 0, last - place, 0).astype(jnp.int32)


def count_positions(mask: PaddingMask, start: int | Int[Array, "batch"] = 0) -> Positions:
    """Return the position of each real token, counted in its row from `start` on, and -1 for padding.

    For calls with states: `start` is the number of real tokens that the states have, one number or one per row.
    """
    is_real = jnp.asarray(mask, bool)
    first = jnp.reshape(jnp.asarray(start, jnp.int32), (-1, 1))
    counted = first + jnp.cumsum(is_real, axis=1, dtype=jnp.int32) - 1
    return jnp.where(is_real, counted, -1)


def _to_int32(x: Any) -> Int[Array, "batch seq"]:
    return jnp.asarray(x).astype(jnp.int32)


def _number_documents(segment_ids: SegmentIds) -> SegmentIds:
    """Number the documents of each row from 1 on, by the changes of their ids. Padding remains 0."""
    number = 1 + jnp.cumsum(find_segment_starts(segment_ids), axis=1, dtype=jnp.int32)
    return jnp.where(segment_ids == 0, 0, number)
