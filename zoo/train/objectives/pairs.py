"""Sums over the pairs of packed rows: a preference pair is two segments of one row."""

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from zoo.models.segment_sums import sum_segments
from zoo.parallel import num_shards


class Pairs(NamedTuple):
    """A number of both texts of each pair. A row has seq / 2 places for pairs, which it fills from the left."""

    chosen: Float[Array, "batch pairs"]
    rejected: Float[Array, "batch pairs"]
    mask: Float[Array, "batch pairs"]
    """1 for a pair, 0 for an empty place."""


def sum_pairs(x: Float[Array, "batch seq"], batch: Mapping[str, Array]) -> Pairs:
    """Sum weight * x over both texts of each pair.

    - `x`: of each target, such as log-ratios.
    - `batch`: with `weights` and `segment_ids`. Pair k, from 0, is segments 2k + 1, chosen, and 2k + 2, rejected, as
      `zoo.train.load_records` packs records with `chosen` and `rejected`.
    """
    segment_ids = batch["segment_ids"]
    count = x.shape[1] * num_shards(segment_ids, "seq") // 2 * 2
    sums = sum_segments(x * batch["weights"], segment_ids, count)
    tokens = sum_segments(jnp.ones_like(x), segment_ids, count)
    return Pairs(sums[:, 0::2], sums[:, 1::2], (tokens[:, 1::2] > 0).astype(x.dtype))


def average_pairs(x: Float[Array, "batch seq"], batch: Mapping[str, Array]) -> Pairs:
    """Average x over the targets of both texts of each pair, with their weights: `sum_pairs` per token. It is 0 in an
    empty place."""
    sums = sum_pairs(x, batch)
    counts = sum_pairs(jnp.ones_like(x), batch)
    return Pairs(sums.chosen / _at_least_one(counts.chosen), sums.rejected / _at_least_one(counts.rejected), sums.mask)


def _at_least_one(counts: Float[Array, "batch pairs"]) -> Float[Array, "batch pairs"]:
    return jnp.where(counts > 0, counts, 1)
