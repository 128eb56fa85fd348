"""Shards of a sequence: shifts, halos and prefixes equal those of the unsharded sequence."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.parallel.collectives import sharded_axes
from zoo.parallel.sequence import exclusive_prefix, halo, shift_right

PRIME = 97


def then(earlier, later):
    """Compose affine maps of integers: associative, not commutative."""
    return later[0] * earlier[0] % PRIME, (later[0] * earlier[1] + later[1]) % PRIME


def look_back(x):
    axes = sharded_axes(x, "seq")
    prefix = exclusive_prefix((x[:, :1], x[:, 1:]), then, axes)
    return halo(x, 2, axes), shift_right({"x": x}, axes, 2)["x"], jnp.concatenate(prefix, axis=1)


@pytest.mark.parametrize("shards", [2, 3, 8])
def test_shards_read_what_earlier_ones_hold(shards):
    mesh = zoo.make_mesh(1, context=shards, devices=jax.devices()[:shards])
    x = np.random.default_rng(0).integers(1, PRIME, (1, 2 * shards))
    before, shifted, prefix = zoo.spmd(look_back, mesh, out=("batch seq",) * 3)(x)
    assert before.tolist() == np.pad(x, [(0, 0), (2, 0)])[:, :-2].tolist()
    assert shifted.tolist() == np.pad(x, [(0, 0), (4, 0)])[:, : 2 * shards].tolist()
    maps = x.reshape(-1, 2).tolist()
    assert prefix.reshape(-1, 2).tolist() == [[0, 0], *map(list, itertools.accumulate(maps[:-1], then))]


def test_prefix_receives_a_value_once_per_doubling():
    """1 + ceil(log2(n - 1)) permutations of each array, of which the last factor is unused and not compiled."""
    x = jnp.ones((1, 16), int)
    for shards, permutations in ((2, 1), (8, 7)):
        mesh = zoo.make_mesh(1, context=shards, devices=jax.devices()[:shards])
        prefix = lambda x: exclusive_prefix((x[:, :1], x[:, 1:2]), then, sharded_axes(x, "seq"))[1]
        program = zoo.inspect.compiled(zoo.spmd(prefix, mesh, out="batch seq"), x)
        moved = {(row.kind, row.axes): row.count for row in program.collectives}
        assert moved == {("collective-permute", ("context",)): permutations}


def test_halo_longer_than_a_shard_raises():
    mesh = zoo.make_mesh(1, context=8)
    x = jnp.ones((1, 16), int)
    with pytest.raises(ValueError, match="a shard of 2 tokens is too short: the next one looks back 3. Use 24 tokens"):
        zoo.spmd(lambda x: halo(x, 3, sharded_axes(x, "seq")), mesh, out="batch seq")(x)
