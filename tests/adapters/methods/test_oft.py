"""OFT: orthogonal rotations, the agreement of all its products, and blocks on a mesh."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.quick import mark_slow
from zoo.adapters.methods.oft import OFT, cayley_transform, skew_symmetric
from zoo.layers import Linear
from zoo.parallel import Dim

KEY = jax.random.key(0)


def make_oft(in_size=24, out_size=6, in_=Dim("in"), experts=None, **options):
    """An OFT of one linear layer, or of one per expert, with random parameters."""

    def make(key):
        keys = jax.random.split(key)
        oft = OFT(Linear(in_size, out_size, in_=in_, bias=experts is None, key=keys[0]), **options)
        return eqx.combine(jax.tree.map(lambda x: 0.3 * jax.random.normal(keys[1], x.shape), zoo.trainable(oft)), oft)

    make = make if experts is None else eqx.filter_vmap(make)
    return eqx.filter_jit(make)(KEY if experts is None else jax.random.split(KEY, experts))


def test_cayley_transform_matches_closed_form_and_series():
    pairs = 0.1 * jax.random.normal(KEY, (3, 6))
    skewed = np.asarray(skew_symmetric(pairs, 4), np.float64)
    np.testing.assert_array_equal(skewed, -skewed.swapaxes(1, 2))
    np.testing.assert_array_equal(skewed[:, [0, 0, 0, 1, 1, 2], [1, 2, 3, 2, 3, 3]], np.asarray(pairs, np.float64))
    identity = np.eye(4)
    exact = (identity - skewed) @ np.linalg.inv(identity + skewed)
    np.testing.assert_allclose(cayley_transform(skew_symmetric(pairs, 4), None), exact, atol=1e-6)
    power = lambda n: np.linalg.matrix_power(skewed, n)
    truncated = {
        1: identity + 0 * skewed,
        2: identity + 2 * skewed,
        3: identity + 2 * skewed + 2 * power(2) + power(3),
        4: identity + 2 * skewed + 2 * power(2) + power(3),
        6: identity + 2 * sum(power(n) for n in range(1, 5)) + power(5),
    }
    for terms, expected in truncated.items():
        np.testing.assert_allclose(cayley_transform(skew_symmetric(pairs, 4), terms), expected, atol=1e-6)
    many = cayley_transform(skew_symmetric(pairs, 4), 40)
    np.testing.assert_allclose(many, exact.swapaxes(1, 2), atol=1e-6)
    np.testing.assert_allclose(many @ many.swapaxes(1, 2), np.broadcast_to(identity, (3, 4, 4)), atol=1e-5)


@pytest.mark.ci
@pytest.mark.parametrize(
    "options",
    mark_slow(
        [{"block_size": 4}, {"blocks": 3, "neumann_terms": None}, {"blocks": 2, "shared": True}],
        but=["blocks, shared"],
        name=", ".join,
    ),
)
def test_oft_products_match_dense_weight(options):
    oft = make_oft(**options)
    x, y = jax.random.normal(KEY, (2, 5, 24)), jax.random.normal(KEY, (5, 6))
    np.testing.assert_allclose(oft(x), x @ oft.dense_weight.T + oft.dense_bias, atol=1e-5)
    np.testing.assert_allclose(oft.transposed(y), y @ oft.dense_weight, atol=1e-5)
    assert jnp.abs(oft.dense_weight - oft.base.dense_weight).max() > 0.1
    if oft.neumann_terms is None:
        np.testing.assert_allclose(
            oft.dense_weight @ oft.dense_weight.T, oft.base.dense_weight @ oft.base.dense_weight.T, atol=1e-5
        )

    experts, sizes = make_oft(experts=3, **options), jnp.array([4, 0, 3])
    rows = jax.random.normal(KEY, (9, 24))  # the last two belong to no expert
    weights = eqx.filter_vmap(lambda oft: oft.dense_weight)(experts)
    expected = np.concatenate([rows[:4] @ weights[0].T, rows[4:7] @ weights[2].T, np.zeros((2, 6))])
    np.testing.assert_allclose(experts.grouped(rows, sizes), expected, atol=1e-5)


def test_oft_on_a_mesh_keeps_blocks_on_one_device():
    """Half of 24 inputs is three blocks of 4 and two heads of 6, though blocks cross the boundaries of heads."""
    mesh, x = zoo.make_mesh(data=1, tensor=2, devices=jax.devices()[:2]), jax.random.normal(KEY, (2, 24))
    heads = Dim("heads", 6)
    multiply = zoo.spmd(lambda oft, x: oft(split(x)), mesh, out="batch out")

    def split(x):
        return jax.lax.dynamic_slice_in_dim(x, 12 * jax.lax.axis_index("tensor"), 12, 1)

    for options in ({"block_size": 4}, {"block_size": 4, "shared": True}):
        oft = make_oft(in_=heads, **options)
        np.testing.assert_allclose(multiply(zoo.place(oft, mesh), x), oft(x), atol=1e-5)
    with pytest.raises(ValueError, match="12 inputs of heads are not whole blocks of 8"):
        multiply(zoo.place(make_oft(in_=heads, block_size=8, shared=True), mesh), x)
    with pytest.raises(ValueError, match="3 heads do not divide evenly over tensor=2"):
        zoo.place(make_oft(in_=heads, block_size=8), mesh)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs the size of its blocks or their number"),
        ({"block_size": 4, "blocks": 6}, "needs the size of its blocks or their number"),
        ({"block_size": 7}, "24 inputs do not divide into blocks of 7.* 2, 3, 4, 6, 8, 12, 24"),
        ({"block_size": 1}, "24 inputs do not divide into blocks of 1 of two inputs or more"),
        ({"blocks": 5}, "24 inputs do not divide into 5 blocks"),
        ({"blocks": 0}, "24 inputs do not divide into 0 blocks"),
    ],
)
def test_oft_with_wrong_blocks_raises(options, message):
    with pytest.raises(ValueError, match=message):
        make_oft(**options)
