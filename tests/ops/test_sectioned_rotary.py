"""RoPE on three axes against the turn of each pair by itself, in Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zoo.ops.rotary import Rotary, apply_rotary
from zoo.ops.sectioned_rotary import SectionedRotary

AXES = {
    ((3, 3, 2), False): "ttthhhww",
    ((1, 5, 2), False): "thhhhhww",
    ((4, 2, 2), True): "thwthwtt",
    ((3, 3, 2), True): "thwthwth",
}
BASE = 50.0


def turn(x, coordinates, axes, sign=1):
    """Turn feature i with i + 8 by the position on the axis of pair i."""
    y = np.zeros(x.shape)
    for i, axis in enumerate(axes):
        angle = sign * coordinates[..., "thw".index(axis)] * BASE ** (-i / 8)
        cos, sin = np.cos(angle)[..., None], np.sin(angle)[..., None]
        y[..., i] = x[..., i] * cos - x[..., i + 8] * sin
        y[..., i + 8] = x[..., i + 8] * cos + x[..., i] * sin
    return y


def test_pairs_turn_by_the_position_on_their_axis():
    """In values and gradients, in bfloat16 too, with angles of float32."""
    rng = np.random.default_rng(0)
    coordinates = rng.integers(0, 900, (2, 5, 3))
    x, weights = rng.normal(size=(2, 2, 5, 3, 16))

    @jax.jit
    def run(x, weights, coordinates):
        results = {}
        for sections, alternating in AXES:
            rotary = SectionedRotary(16, BASE, sections=sections, alternating=alternating)
            rotate = lambda x, rotary=rotary: apply_rotary(x, *rotary.turn_on_axes(coordinates))
            grad = jax.grad(lambda x, rotate=rotate: (weights * rotate(x)).sum())(x)
            results[sections, alternating] = rotate(x), grad, rotate(x.astype(jnp.bfloat16))
        return results

    found = run(*(jnp.asarray(array, jnp.float32) for array in (x, weights, coordinates)))
    for layout, (value, grad, half) in found.items():
        wanted = turn(x, coordinates, AXES[layout])
        np.testing.assert_allclose(value, wanted, atol=2e-3)  # angles of 900 in float32
        np.testing.assert_allclose(grad, turn(weights, coordinates, AXES[layout], sign=-1), atol=2e-3)
        assert half.dtype == jnp.bfloat16
        np.testing.assert_allclose(half.astype(jnp.float32), wanted, atol=4e-2)


@pytest.mark.parametrize("alternating", [False, True])
def test_equal_coordinates_are_positions(alternating):
    rotary = SectionedRotary(16, BASE, sections=(4, 2, 2), alternating=alternating)
    positions = jnp.array([[0, 1, 7, 4000]])
    coordinates = jnp.broadcast_to(positions[..., None], (1, 4, 3)).astype(jnp.float32)
    for ours, plain in zip(rotary.turn_on_axes(coordinates), Rotary(16, BASE)(positions), strict=True):
        assert ours.dtype == jnp.float32
        np.testing.assert_array_equal(ours, plain)


def test_sections_share_out_all_pairs():
    with pytest.raises(ValueError, match=r"sections \[4, 2, 1\] have 7 pairs, and 8 are rotated"):
        SectionedRotary(16, BASE, sections=(4, 2, 1))
