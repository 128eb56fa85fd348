"""Token embedding with a sharded vocabulary."""

import jax
import jax.numpy as jnp

import zoo
from zoo.layers import Embedding, PositionEmbedding

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
