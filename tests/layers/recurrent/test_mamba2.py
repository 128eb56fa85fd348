"""Multipliers and biases of Mamba-2's projections."""

from functools import partial

import equinox as eqx
import jax
import pytest

from tests.layers.random_layers import activations, randomize, relative_error
from zoo.layers import Mamba2, TokenInfo

NAMES = ("gate", "x", "B", "C", "dt")
MULTIPLIERS = (0.5, 2.0, 0.25, 3.0, 1.5)
MAKE = partial(Mamba2, 8, 2, head_dim=4, state_dim=3, bias=True)


def test_multipliers_equal_multiplied_projections():
    """Each multiplies its matrix and its bias."""
    layer, x = randomize(partial(MAKE, multipliers=MULTIPLIERS)), activations(2, 6, 8)
    plain = randomize(MAKE)
    get = lambda layer: [getattr(layer, name) for name in NAMES]
    scaled = [jax.tree.map(lambda x, m=m: m * x, part) for m, part in zip(MULTIPLIERS, get(plain), strict=True)]
    expected = eqx.tree_at(get, plain, scaled)(x, TokenInfo())[0]
    assert relative_error(layer(x, TokenInfo())[0], expected) < 1e-6
    assert relative_error(plain(x, TokenInfo())[0], expected) > 1e-2


@pytest.mark.parametrize("bias, out_bias, has_bias", [(True, None, True), (True, False, False), (False, True, True)])
def test_out_bias_is_of_the_output_alone(bias, out_bias, has_bias):
    layer = MAKE(bias=bias, out_bias=out_bias, key=jax.random.key(0))
    assert (layer.out.bias is not None) == has_bias and (layer.x.bias is not None) == bias


def test_multipliers_are_five():
    with pytest.raises(ValueError, match="multipliers are five, of gate, x, B, C, dt, and 2 were given"):
        MAKE(multipliers=(1.0, 2.0), key=jax.random.key(0))
