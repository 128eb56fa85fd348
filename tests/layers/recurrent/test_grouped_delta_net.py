"""Gated DeltaNet with groups of queries and keys: equal to one with as many of them as heads, if they are repeated."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.layers import GatedDeltaNet, GroupedGatedDeltaNet, TokenInfo
from zoo.tools.testing import check_mixer

EMBED, HEADS, GROUPS, KEY_DIM, VALUE_DIM = 12, 4, 2, 3, 5
SIZES = {"groups": GROUPS, "key_dim": KEY_DIM, "value_dim": VALUE_DIM}


def repeat(weight):
    """Repeat the rows of each group for its heads."""
    return jnp.repeat(weight.reshape(GROUPS, KEY_DIM, -1), HEADS // GROUPS, axis=0).reshape(HEADS * KEY_DIM, -1)


@pytest.mark.parametrize("negative", [False, True])
def test_groups_equal_repeated_queries_and_keys(negative):
    """Without negative eigenvalues, and with."""
    layer_key, input_key = jax.random.split(jax.random.key(0))
    grouped = GroupedGatedDeltaNet(EMBED, HEADS, **SIZES, negative_eigenvalues=negative, key=layer_key)
    sizes = {"key_dim": KEY_DIM, "value_dim": VALUE_DIM}
    whole = GatedDeltaNet(EMBED, HEADS, **sizes, negative_eigenvalues=negative, key=layer_key)
    parts = lambda m: (m.corrector.projections, m.corrector.rate, m.decay, m.readout)
    projections = parts(whole)[0]
    weights = lambda p: (p.query.weight, p.key.weight, p.value.weight, *(x.weight for x in p.convolutions))
    ours = ("query", "key", "value", "query_convolution", "key_convolution", "value_convolution")
    new = [getattr(grouped, name).weight for name in ours]
    new = [x if name.startswith("value") else repeat(x) for name, x in zip(ours, new, strict=True)]
    projections = eqx.tree_at(weights, projections, new)
    whole = eqx.tree_at(parts, whole, (projections, grouped.rate, grouped.decay, grouped.readout))
    x, info = jax.random.normal(input_key, (2, 7, EMBED)), TokenInfo(jnp.broadcast_to(jnp.arange(7), (2, 7)))
    apply = eqx.filter_jit(lambda layer: layer(x, info)[0])
    np.testing.assert_allclose(apply(grouped), apply(whole), atol=1e-6)


def test_sizes_that_do_not_fit_are_refused():
    make = partial(GroupedGatedDeltaNet, EMBED, HEADS, key=jax.random.key(0))
    with pytest.raises(ValueError, match="4 heads do not divide evenly over 3 groups"):
        make(groups=3)
    with pytest.raises(ValueError, match="value_dim is 0, and a size is at least 1"):
        make(value_dim=0)


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [2, 4])
def test_groups_on_a_mesh_equal_one_device(tensor):
    mesh = zoo.make_mesh(data=8 // tensor, tensor=tensor)
    assert check_mixer(partial(GroupedGatedDeltaNet, EMBED, HEADS, **SIZES), meshes=[mesh]).passed
