"""Token embedding with a sharded vocabulary, and position embeddings."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.layers import Embedding, PositionEmbedding
from zoo.layers.embedding import SinusoidalPositionEmbedding

KEY = jax.random.key(0)


def test_embedding_of_an_invalid_id_is_nan_on_a_mesh():
    mesh = zoo.make_mesh(data=4, tensor=2)
    tokens = jnp.array([[0, 7], [8, -1], [3, 4], [5, 6]])
    table = zoo.place(Embedding(8, 4, key=KEY), mesh)
    x = zoo.spmd(lambda table, tokens: table(tokens), mesh, out="batch seq embed")(table, tokens)
    assert (jnp.isnan(x).all(-1) == jnp.array([[0, 0], [1, 1], [0, 0], [0, 0]], bool)).all()


def test_position_embedding_skips_the_rows_before_its_offset():
    table = PositionEmbedding(5, 4, offset=2, key=KEY)
    x = table(jnp.array([0, 4, -3, 5]))
    assert table.length == 5 and table.weight.shape == (7, 4)
    assert (x[:3] == table.weight[jnp.array([2, 6, 2])]).all() and jnp.isnan(x[3]).all()


def test_sinusoidal_positions_are_sines_and_cosines():
    embedding = SinusoidalPositionEmbedding(6, offset=2)
    x = np.asarray(embedding(jnp.array([[0, 1, 5000], [-4, 0, 0]])))
    for row, position in ((x[0, 0], 2), (x[0, 1], 3), (x[0, 2], 5002), (x[1, 0], 2)):
        angles = [position * 10000 ** (-i / 2) for i in range(3)]
        wanted = [*map(math.sin, angles), *map(math.cos, angles)]
        np.testing.assert_allclose(row, wanted, atol=2e-6 * max(1, position / 10))
    slower = SinusoidalPositionEmbedding(6, steps=3)(jnp.array([[7]]))[0, 0]
    np.testing.assert_allclose(
        slower[1:4], [math.sin(7 / 10 ** (4 / 3)), math.sin(7 / 10 ** (8 / 3)), math.cos(7)], rtol=1e-5
    )
    assert embedding.length == math.inf and not jax.tree.leaves(embedding)
    for size in (5, 2):
        with pytest.raises(ValueError, match=f"an even number of features from 4 on, not {size}"):
            SinusoidalPositionEmbedding(size)
