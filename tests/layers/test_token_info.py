"""Positions of packed sequences, and spans that see each other."""

import jax.numpy as jnp

from zoo.layers.token_info import batch_token_info, count_lookahead, pack_positions


def test_pack_positions_restarts_in_each_document():
    assert pack_positions(jnp.array([[1, 1, 1, 2, 2, 0, 0]])).tolist() == [[0, 1, 2, 0, 1, 0, 1]]


def test_lookahead_counts_the_rest_of_a_span():
    spans = [[1, 1, 1, 0, 0, 1, 1], [0, 2, 2, 3, 3, 3, 0], [4, 0, 4, 4, -1, -1, 5]]
    wanted = [[2, 1, 0, 0, 0, 1, 0], [0, 1, 0, 2, 1, 0, 0], [0, 0, 1, 0, 0, 0, 0]]
    assert count_lookahead(jnp.array(spans)).tolist() == wanted


def test_places_of_images_are_read_from_a_batch():
    tokens = jnp.ones((1, 2), int)
    places = {"lookahead": jnp.array([[1, 0]]), "coordinates": jnp.ones((1, 2, 3))}
    info = batch_token_info({"tokens": tokens, **places})
    assert info.lookahead is places["lookahead"] and info.coordinates is places["coordinates"]
