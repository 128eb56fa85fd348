"""Options of gated linear attention that no reference case sees."""

from functools import partial

import equinox as eqx
import jax.numpy as jnp

from tests.layers.random_layers import activations, randomize, relative_error
from tests.layers.recurrent.checks import forward
from zoo.layers import GatedLinearAttention


def test_log_decays_have_a_lower_bound():
    """A bound of 0 is no decay, and a bound that no decay reaches changes nothing."""
    x = activations(1, 6, 12)
    plain, bounded, loose = (
        randomize(partial(GatedLinearAttention, 12, 2, min_log_decay=bound)) for bound in (None, 0.0, -100.0)
    )
    undecayed = eqx.tree_at(lambda layer: layer.decay.up.bias, plain, replace_fn=lambda bias: bias + 100)
    assert relative_error(forward(bounded, x), forward(undecayed, x)) < 1e-5
    assert jnp.array_equal(forward(loose, x), forward(plain, x))
    assert relative_error(forward(bounded, x), forward(plain, x)) > 1e-2
