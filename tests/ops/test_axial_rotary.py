"""Two-dimensional RoPE: scores depend on distances alone, along each axis by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zoo.ops.axial_rotary import AxialRotary, patch_coordinates
from zoo.ops.rotary import apply_rotary


def test_patch_coordinates_are_centers_row_by_row():
    wanted = [[-0.5, -2 / 3], [-0.5, 0], [-0.5, 2 / 3], [0.5, -2 / 3], [0.5, 0], [0.5, 2 / 3]]
    np.testing.assert_allclose(patch_coordinates(2, 3), wanted, atol=1e-7)


def test_axial_rotary_scores_depend_on_distances():
    rotary, shift = AxialRotary(8), jnp.array([0.25, -0.5])
    vectors = jax.random.normal(jax.random.key(0), (2, 1, 6, 1, 8))
    coordinates = jnp.asarray(patch_coordinates(2, 3))[None]

    def score(coordinates):
        query, key = (apply_rotary(x, *rotary(coordinates)) for x in vectors)
        return jnp.einsum("bqhd,bkhd->bqk", query, key)

    np.testing.assert_allclose(score(coordinates + shift), score(coordinates), atol=1e-5)
    assert np.abs(score(coordinates * 2) - score(coordinates)).max() > 0.1
    assert np.abs(score(coordinates[..., ::-1]) - score(coordinates)).max() > 0.1


def test_axial_rotary_leaves_tokens_at_the_center():
    cos, sin = AxialRotary(8)(jnp.zeros((1, 1, 2)))
    np.testing.assert_array_equal(cos, 1)
    np.testing.assert_array_equal(sin, 0)


def test_axial_rotary_refuses_odd_sizes():
    with pytest.raises(ValueError, match="4 divides dim=6"):
        AxialRotary(6)
