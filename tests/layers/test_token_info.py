"""Positions of packed sequences."""

import jax.numpy as jnp

from zoo.layers.token_info import pack_positions


def test_pack_positions_restarts_in_each_document():
    assert pack_positions(jnp.array([[1, 1, 1, 2, 2, 0, 0]])).tolist() == [[0, 1, 2, 0, 1, 0, 1]]
