"""Round rows and lengths up to buckets and pad prompts to them, so that few programs are compiled."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from zoo._checks import is_host_readable
from zoo.models import Decoder
from zoo.parallel import Mesh, Module, leaves

_MIN_LENGTH = 128
"""Minimum cache length unless `length` is given, so that short texts share a program."""
_MAX_PIECE = 256
"""Maximum number of tokens in a piece of the prompt. Longer pieces would cost short prompts with a long cache more
padding; shorter ones would read the weights more often than matrix products need."""
_MOST_PIECES_AT_ONCE = 8
_MOST_TOKENS_AT_ONCE = 2**14
"""Maximum number of tokens of all rows that are read at once, for the memory of their activations."""


def choose_cache_length(model: Decoder, prompt: int, new: int, length: int | None) -> int:
    """Return the capacity of the KV caches: `length` if given, otherwise prompt and new tokens rounded up to a bucket.

    A bucket is at most the number of learned positions.

    **Raises** `ValueError` for a `length` below prompt and new tokens, and for more tokens than learned positions.
    """
    needed = prompt + new
    if length is not None and length < needed:
        raise ValueError(f"length={length} does not hold {prompt} tokens of the prompt and {new} new ones: {needed}")
    if model.position_embedding is None:
        longest = math.inf
    else:
        longest = model.position_embedding.length
    if (asked := length or needed) > longest:
        raise ValueError(
            f"{asked} tokens are too many: the model learned {longest} positions, and the prompt has {prompt} tokens, "
            f"before {new} new ones"
        )
    if length is not None:
        return length
    return int(min(max(round_up(needed), _MIN_LENGTH), longest))


def choose_piece(length: int, mesh: Mesh | None = None) -> int:
    """Return the number of tokens of a piece of the prompt: a quarter of the cache length, and at most 256; rounded up
    to a multiple of the devices that share it."""
    shards = 1 if mesh is None else mesh.count_shards("seq")
    return -(-min(-(-length // 4), _MAX_PIECE) // shards) * shards


def count_pieces_at_once(rows: int, piece: int) -> int:
    """Return how many pieces of a long prompt are read at once: 8 if the tokens of all rows are then at most 2¹⁴."""
    return max(min(_MOST_PIECES_AT_ONCE, _MOST_TOKENS_AT_ONCE // (rows * piece)), 1)


def choose_rows(model: Module, rows: int, mesh: Mesh | None, samples: int = 1) -> int:
    """Return the number of rows to read: per shard of the batch 1, 4, 8, 12, 16, 24, 32, 48, ... Not rounded for a
    model with arrays of its own per row, as `zoo.adapters.select_per_row` makes it, nor for several samples of each
    row, where padding would be decoded as often."""
    shards = 1 if mesh is None else mesh.count_shards("batch")
    local = -(-rows // shards)
    if local > 8:
        rounded = round_up(local)
    else:
        rounded = min(size for size in (1, 4, 8) if size >= local)
    if samples > 1 or (rounded > local and _has_arrays_per_row(model)):
        rounded = local
    return shards * rounded


def refuse_arrays_per_row(model: Decoder, use: str, advice: str) -> None:
    """**Raises** `ValueError` for a model with arrays of its own per row where the rows of a program change."""
    if _has_arrays_per_row(model):
        raise ValueError(f"{use}: the model has an adapter for each row of a batch (adapters.select_per_row): {advice}")


def _has_arrays_per_row(model: Module) -> bool:
    return any(dim.name == "batch" for leaf in leaves(eqx.filter(model, eqx.is_array)) for dim in leaf.dims or ())


def round_up(size: int) -> int:
    """Return the smallest of 2ⁿ and 3 · 2ⁿ that is at least `size`: two buckets per octave."""
    power = 1 << (size - 1).bit_length()
    if power >= 4 and size <= power * 3 // 4:
        return power * 3 // 4
    return power


class Prompt(Module):
    """A prompt padded to its bucket. The last token of each row is kept apart: decoding begins with it.

    Every device has the whole prompt, which is only a few integers. Only its pieces are sharded.
    """

    tokens: Int[Array, "batch prompt"]
    positions: Int[Array, "batch prompt"]
    """Position of each token, -1 for padding."""
    last: Int[Array, "batch"]
    """The last token of each row."""
    last_position: Int[Array, "batch"]
    rows: Int[Array, "batch"]
    """Row number in the global batch, which selects the PRNG key; -1 for rows of padding."""
    pieces: Int[Array, ""]
    """Number of pieces that hold tokens; they are the last ones."""
    rope_length: Int[Array, ""]
    """Sequence length for RoPE that depends on it; 0 for the number of tokens so far."""


def pad_prompt(
    tokens: Int[Array, "batch seq"] | Int[np.ndarray, "batch seq"],
    mask: Bool[Array, "batch seq"] | None,
    rows: int,
    length: int,
    mesh: Mesh | None = None,
    rope_length: int = 0,
    first_position: int = 0,
    spare: int = 0,
) -> Prompt:
    """Pad a prompt to `rows` rows, and to a cache of `length` on `mesh`. `rope_length` is for RoPE that depends on the
    sequence length; 0 is the number of tokens so far. `first_position` is the number of tokens that were read before,
    and `spare` the number of columns to keep free in the pieces, on the left of the tokens.

    Tokens are padded on the left to the whole pieces that fill the cache, with position -1: padding takes no slot of a
    KV cache. Rows are padded with copies of the last one, which end at once.
    """
    count, seq = tokens.shape
    piece = choose_piece(length, mesh)
    is_real: Any = np.ones(tokens.shape, bool) if mask is None else mask
    # With NumPy if possible, so that nothing compiles for each shape of a prompt.
    on_host = is_host_readable(tokens) and (mask is None or is_host_readable(mask))
    xp: Any = np if on_host else jnp
    ids: Any = tokens
    if on_host:
        ids, is_real = jax.device_get((tokens, is_real))
    is_real = is_real.astype(bool)
    row = np.arange(rows)
    source = np.minimum(row, count - 1)
    number = np.where(row < count, row, -1)
    ids = xp.where(is_real, ids, 0)[source]  # padding may be any id, and an unknown one is NaN
    positions = xp.where(is_real, xp.cumsum(is_real, axis=1) - 1 + first_position, -1)[source]
    pad = (0, 0), (-(-length // piece) * piece - seq + 1, 0)
    tokens = xp.pad(ids[:, :-1], pad)
    before = xp.pad(positions[:, :-1], pad, constant_values=-1)
    pieces = np.asarray(-(-(seq - 1 + spare) // piece))
    arrays = tokens, before, ids[:, -1], positions[:, -1], number, pieces, np.asarray(rope_length)
    return Prompt(*jax.device_put([x.astype(np.int32) for x in arrays]))
